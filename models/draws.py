"""Draws: the units of an axis that a narrower model keeps, for each kind of plan.

- static: the leading units (HeteroFL, Diao et al., ICLR 2021).
- rolling: a window that moves by a step each round and wraps around (FedRolex, Alam et al.:
  "FedRolex: Model-heterogeneous federated learning with rolling sub-model extraction", NeurIPS
  2022, eq. 4). The released code moves the window down, the paper up; up is the default.
- random: new distinct units drawn in each round (Federated Dropout, Caldas et al., 2018).

A grouped axis (attention heads) keeps the same offsets in each of its groups.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import PlanError
from models.axes import Axis

Indices = NDArray[np.int64]
"""Kept units of an axis, 0-based, in local order."""

PlanKind = Literal["static", "rolling", "random"]
Direction = Literal["up", "down"]
HeadRule = Literal["preserving", "as_released"]


@dataclass(frozen=True)
class Window:
    """The selection of the kept units of every axis; the defaults are those of FedRolex's paper.

    Attributes:
        kind: ``rolling`` (a moving window), ``static`` (the leading units) or ``random``.
        step: units by which a rolling window moves in a round. All units are covered evenly if the
            step and the size of the axis are coprime.
        direction: ``up`` as in the paper, ``down`` as in its released code.
        heads: for rolling windows, whether they stay inside their attention head (``preserving``)
            or move across heads as in the released code (``as_released``).
        draw: for random units, ``tied`` draws once for each axis, so that residual sums line up;
            ``per_layer`` draws for each layer separately, as the released baseline does.

    Raises:
        PlanError: the kind is unknown, or the window would not move.
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
                f"a plan needs step >= 1, not {self.step}: its window moves by this many units"
                " in a round"
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
    """Return the units of a window in every group, shifted by `shift` units with wrap-around.

    In the released code, the whole axis is rolled and then split into groups, which mixes
    neighbouring heads.

    Args:
        axis: the axis.
        width: determines the number of kept units, `axis.kept(width)`.
        shift: units from the start.
        direction: see `Window`.
        heads: see `Window`.
    """
    # A window that moves down starts at earlier units.
    start = shift if direction == "up" else -shift
    # All groups stay and become smaller, so this counts the units of one group.
    kept = axis.kept(width) // axis.groups
    if heads == "as_released":
        # Over all groups at once, as in the released code: a unit may come from another group.
        rolled = (np.arange(axis.size, dtype=np.int64) + start) % axis.size
        by_group = rolled.reshape(axis.groups, axis.group_size)
        units = by_group[:, :kept].reshape(-1)
    else:
        places = (np.arange(kept, dtype=np.int64) + start) % axis.group_size
        units = _in_every_group(axis, places)
    units.setflags(write=False)  # the same for all devices of a round
    return units


def random_units(
    axis: Axis,
    width: float,
    *,
    seed: int,
    round_index: int,
    label: str,
) -> Indices:
    """Return distinct units drawn uniformly, ascending, with the same offsets in every group.

    Args:
        axis: the axis.
        width: determines the number of kept units, `axis.kept(width)`.
        seed: seed of the run, or of a device.
        round_index: number of the round.
        label: name of the draw, so that the draws of two axes in a round differ.
    """
    # A digest, because Python's hash of a string differs between processes.
    digest = hashlib.sha256(label.encode()).digest()
    salt = int.from_bytes(digest[:8], "little")
    generator = np.random.default_rng([seed, round_index, salt])
    # Ascending, so that layers that read the units see them in the global order.
    kept = axis.kept(width) // axis.groups
    offsets = np.sort(
        generator.choice(
            axis.group_size,
            size=kept,
            replace=False,
        )
    ).astype(np.int64)
    return _in_every_group(axis, offsets)


def _in_every_group(axis: Axis, offsets: Indices) -> Indices:
    starts = np.arange(axis.groups, dtype=np.int64) * axis.group_size
    return (starts[:, None] + offsets[None, :]).reshape(-1)
