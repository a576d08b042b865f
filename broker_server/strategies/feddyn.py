"""FedDyn: devices remember how far they were pulled, so that fleets agree in spite of unequal data.

Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew Mattina, Paul N. Whatmough, Venkatesh
Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR 2021,
https://openreview.net/forum?id=B7v4QMR6Z9w, algorithm 1. Specification section 9.

A device minimises ``F_k(w) - <g_k, w> + alpha / 2 * |w - w_t|^2``, which is the proximal term of
FedProx around ``w_t + g_k / alpha``: the server sends alpha as the strength of that term, and each
device keeps ``g_k / alpha`` (`device_runtime.training.routines.dynamic`). The server keeps the
correction ``h / alpha``, which it subtracts from the mean of the updates. DepthFL was published
with FedDyn, so its strategy uses `regularise`, too.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from broker_server.strategies import fedavg
from broker_server.strategies.accumulator import Accumulator, coverage
from broker_server.strategies.strategy import (
    Basis,
    GlobalModel,
    Merge,
    Method,
    ServerState,
    Strategy,
)
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Instructions

ROUTINE = "dynamic"

# Prefix of the correction of a parameter among the stored arrays of a version.
_CORRECTION = "feddyn.correction."

_NEEDS = frozenset(
    {
        # A device's memory belongs to the entries of its sub-model.
        Trait.FIXED_PLANS,
        # The correction follows from changes of one version.
        Trait.ONE_VERSION,
        # The routine has no part that stays on the device.
        Trait.ALL_MERGED,
    }
)

Floats = NDArray[np.float32]


class FedDynSettings(FrozenModel):
    """``[strategy.feddyn]`` (specification 9).

    Attributes:
        alpha: strength of the regularisation of a device's weights.
        fleet_devices: number of devices in the whole fleet, including devices that a round does not
            select; must be set.
    """

    alpha: float = Field(default=0.1, gt=0, le=1e6)
    fleet_devices: int | None = Field(default=None, ge=1)


def regularise(strategy: Strategy, settings: FedDynSettings, basis: Basis[Any]) -> Strategy:
    """Return a strategy of plain means with FedDyn at its devices and its server.

    Args:
        strategy: the selective average of a method.
        settings: settings of FedDyn.
        basis: the configuration of the method.

    Raises:
        PlanError: the number of devices is not set, updates have weights, the merge is not a mean,
            or an optimizer of the server is configured.
    """
    if settings.fleet_devices is None:
        raise PlanError(
            "feddyn needs the number of devices of the whole fleet; set fleet_devices in its table"
        )
    if basis.weighting == "samples" or basis.average != "mean":
        raise PlanError(
            "feddyn corrects the plain mean of the updates; remove strategy.weighting and"
            " robust.merge"
        )
    if basis.optimizer is not None:
        raise PlanError("feddyn has its own step of the server; remove [server_optimizer]")

    def instruct(instructions: Instructions, closed_rounds: int) -> Instructions:
        asked = strategy.instruct(instructions, closed_rounds)
        train = asked.train.model_copy(update={"proximal_mu": settings.alpha})
        return asked.model_copy(update={"train": train, "routine": ROUTINE})

    # Noise would have to cover the correction, too, which is not a mean of changes.
    merge = replace(
        strategy.merge,
        finish=_corrected(strategy.merge, settings.fleet_devices),
        deltas=False,
    )
    return replace(
        strategy,
        merge=merge,
        instruct=instruct,
        needs=strategy.needs | _NEEDS,
        breaks=strategy.breaks | {Trait.MEAN_OF_CHANGES},
    )


def _corrected(
    merge: Merge[Accumulator], fleet_devices: int
) -> Callable[[Accumulator, GlobalModel], GlobalModel]:
    """Return a `Merge.finish` that subtracts the correction from the mean."""

    def finish(sums: Accumulator, old: GlobalModel) -> GlobalModel:
        mean = merge.finish(sums, GlobalModel(old.weights, {}))
        weights: dict[str, Floats] = {}
        state: dict[str, NDArray[Any]] = {}
        for name, before in old.weights.items():
            # Each update has the weight 1, so the weights of an entry add up to its holders.
            holders = coverage(sums, name)
            change = mean.weights[name] - before
            # No correction is stored with the version that a run starts from.
            stored = correction_of(old.state, name) if old.state else np.float32(0.0)
            correction = stored - holders / np.float32(fleet_devices) * change
            # Without a holder an entry keeps its bits.
            weights[name] = np.where(holders > 0, mean.weights[name] - correction, before)
            state[_CORRECTION + name] = correction
        return GlobalModel(weights, state)

    return finish


def correction_of(state: ServerState, name: str) -> Floats:
    """Return the correction of a parameter, as it is stored beside a global version."""
    return state[_CORRECTION + name]


def build(basis: Basis[FedDynSettings]) -> Strategy:
    """Build FedAvg with FedDyn; ``label_rule`` defaults to off.

    Raises:
        PlanError: an error of FedAvg or of `regularise`.
    """
    average = fedavg.build(replace(basis, weighting=basis.weighting or "uniform"))
    return replace(
        regularise(average, basis.options, basis),
        name="feddyn",
        paper="https://openreview.net/forum?id=B7v4QMR6Z9w",
    )


STRATEGIES = {"feddyn": Method(build, FedDynSettings)}
