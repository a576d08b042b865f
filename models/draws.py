"""Draws: which units of an axis a narrower model keeps, for each kind of plan.

- static: the leading units (HeteroFL, Diao et al., ICLR 2021).
- rolling: a window that moves by a step each round and wraps around (FedRolex, Alam et al.:
  "FedRolex: Model-heterogeneous federated learning with rolling sub-model extraction", NeurIPS
  2022, eq. 4). The released code moves the window down, the paper up; up is the default.
- random: distinct units drawn anew each round (Federated Dropout, Caldas et al., 2018).

A grouped axis (attention heads) keeps the same offsets in each of its groups.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import PlanError
from models.axes import Axis, kept_units

Indices = NDArray[np.int64]
"""Kept units of an axis, 0-based, in local order."""

PlanKind = Literal["static", "rolling", "random"]
Direction = Literal["up", "down"]
HeadRule = Literal["preserving", "as_released"]


@dataclass(frozen=True)
class Window:
    """How the kept units of every axis are chosen; the defaults are those of FedRolex's paper.

    Attributes:
        kind: ``rolling`` (a moving window), ``static`` (the leading units) or ``random``.
        step: units a rolling window moves in a round. All units are covered evenly when the step
            and the size of the axis have no common factor.
        direction: ``up`` as in the paper, ``down`` as in its released code.
        heads: for rolling windows, whether they stay inside their attention head (``preserving``)
            or move across heads as in the released code (``as_released``).
        draw: for random units, ``tied`` draws once for each axis, so that residual sums line up;
            ``per_layer`` draws for each layer separately, as the released baseline does.

    Raises:
        PlanError: if the kind is unknown, or the window would not move.
    """

    kind: PlanKind = "rolling"
    step: int = 1
    direction: Direction = "up"
    heads: HeadRule = "preserving"
    draw: Literal["tied", "per_layer"] = "tied"

    def __post_init__(self) -> None:
        if self.kind not in get_args(PlanKind):
            raise PlanError(
                f"unknown kind of plan {self.kind!r}; choose one of {', '.join(get_args(PlanKind))}"
            )
        if self.step < 1:
            raise PlanError(
                f"a plan needs step >= 1, not {self.step}: so many units its window moves in a "
                "round"
            )


@lru_cache(256)
def rolling_units(
    axis: Axis,
    width: float,
    *,
    shift: int,
    direction: Direction = "up",
    heads: HeadRule = "preserving",
) -> Indices:
    """Return the units in windows of every group that start `shift` units further and wrap around.

    As released, the whole axis is rolled and then cut into groups, which mixes neighbouring heads.

    Args:
        axis: the axis.
        width: decides how many units are kept, `axis.kept(width)`.
        shift: units from the start.
        direction: as of `Window`.
        heads: as of `Window`.
    """
    start = shift if direction == "up" else -shift
    kept = kept_units(axis.group_size, width)
    if heads == "as_released":
        rolled = (np.arange(axis.size, dtype=np.int64) + start) % axis.size
        units = rolled.reshape(axis.groups, axis.group_size)[:, :kept].reshape(-1)
    else:
        units = _in_every_group(axis, (np.arange(kept, dtype=np.int64) + start) % axis.group_size)
    units.setflags(write=False)  # the same for all devices of a round
    return units


def random_units(axis: Axis, width: float, *, seed: int, round_index: int, label: str) -> Indices:
    """Return distinct units drawn uniformly, ascending, with the same offsets in every group.

    Args:
        axis: the axis.
        width: decides how many units are kept, `axis.kept(width)`.
        seed: of the run, or of a device.
        round_index: number of the round.
        label: what the draw is for, so that two axes of one round differ.
    """
    # A digest, because Python's own hash of a string differs from process to process.
    salt = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little")
    generator = np.random.default_rng([seed, round_index, salt])
    kept = kept_units(axis.group_size, width)
    offsets = np.sort(generator.choice(axis.group_size, size=kept, replace=False)).astype(np.int64)
    return _in_every_group(axis, offsets)


def _in_every_group(axis: Axis, offsets: Indices) -> Indices:
    starts = np.arange(axis.groups, dtype=np.int64) * axis.group_size
    return (starts[:, None] + offsets[None, :]).reshape(-1)
