"""Steps the global weights along the update that follows from a round's merge.

Sashank Reddi, Zachary Charles, Manzil Zaheer, Zachary Garrett, Keith Rush, Jakub Konecny, Sanjiv
Kumar, Brendan McMahan: "Adaptive Federated Optimization", ICLR 2021,
https://arxiv.org/abs/2003.00295, algorithm 2; the conventions are those of specification 3.5. With
g the update (merged weights minus old weights, so its sign is PLUS, unlike a gradient's), m and v
the moments, element by element:

    plain        w = w + eta * g
    fedavgm      m = b1 * m + g                                   w = w + eta * m
    fedadam      m = b1 * m + (1 - b1) * g
                 v = b2 * v + (1 - b2) * g^2                      w = w + eta * m / (sqrt(v) + tau)
    fedyogi      v = v - (1 - b2) * g^2 * sign(v - g^2)           m and w as fedadam
    fedadagrad   v = v + g^2                                      m and w as fedadam

There is no bias correction, and tau is outside the root. Entries that no device held have g = 0 and
still move while m decays. FedAvgM is Hsu, Qi, Brown: "Measuring the effects of non-identical data
distribution", 2019.

The functions are pure functions of an explicit state. Memory traffic limits their speed. So they
walk tensors in blocks that stay in the second-level cache, and `donate` lets the results take the
memory of the arguments. `broker_server.strategies.optimizer_rules` has the formulas of one block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies.optimizer_rules import ADAPTIVE, RULES, OptimizerSettings
from fleet_protocol.errors import PlanError

Array = NDArray[Any]
Tensors = Mapping[str, Array]

# Values of a block: six float32 blocks of 128 kB are in use at once, which a second-level cache
# holds.
_BLOCK = 32 * 1024

# Names of the state among the stored arrays of a version.
_STEPS = "optimizer.steps"
_FIRST = "optimizer.first."
_SECOND = "optimizer.second."


@dataclass(frozen=True)
class OptimizerState:
    """The state that the optimizer carries from round to round.

    Attributes:
        steps: number of steps so far.
        first: the first moment m, with the shapes and the dtype of the weights; empty for plain.
        second: the second moment v; empty for plain and fedavgm.
    """

    steps: int = 0
    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)


def init(settings: OptimizerSettings, weights: Tensors) -> OptimizerState:
    """Return the state before the first step of some weights."""
    first: dict[str, Array] = {}
    second: dict[str, Array] = {}
    for name, value in weights.items():
        if settings.name != "plain":
            first[name] = np.zeros_like(value)
        if settings.name in ADAPTIVE:
            second[name] = np.full_like(value, settings.second_start)
    return OptimizerState(0, MappingProxyType(first), MappingProxyType(second))


def apply(  # noqa: PLR0913  (options by keyword)
    settings: OptimizerSettings,
    state: OptimizerState,
    weights: Tensors,
    target: Tensors,
    *,
    merged: bool = False,
    donate: bool = False,
) -> tuple[dict[str, Array], OptimizerState]:
    """Make one step along an update.

    Args:
        settings: settings of the optimizer.
        state: from `init` or the previous step.
        weights: the weights before the step, floats of any shapes.
        target: the update g above, with the same names and shapes; or, if `merged`, the merged
            weights.
        merged: the target is the merged weights instead of the update. Plain with eta 1 then
            returns exactly the target.
        donate: the arrays of `state` and `target` may be overwritten with the results; do not use
            them again.

    Returns:
        The new weights, in the order of `weights`, and the new state.

    Raises:
        PlanError: a tensor is missing from the update or the state, or has another shape.
    """
    # Before anything is looked at: a milestone replaces the moments that this step reads.
    state, eta = _restart(settings, state)
    # The shapes of the whole update first, so that a refusal leaves donated arrays as they were.
    for name, value in weights.items():
        _check_shape(
            name,
            value,
            target,
            "update",
        )
    new: dict[str, Array] = {}
    if merged and settings.name == "plain" and eta == 1.0:
        # old + (merged - old) would lose the last bit.
        for name in weights:
            new[name] = target[name] if donate else np.array(target[name])
        return new, replace(state, steps=state.steps + 1)
    first = dict(state.first)
    second = dict(state.second)
    for name, old in weights.items():
        moments = []
        for moment in (first, second):
            if moment:
                _check_shape(
                    name,
                    old,
                    moment,
                    "server optimizer's state",
                )
                moment[name] = _writable(moment[name], donate=donate)
                moments.append(moment[name])
        # The merged weights are as large as the model; their memory holds the result.
        is_reused = donate and _is_reusable(target[name], old.dtype)
        out = target[name] if is_reused else np.empty(old.shape, old.dtype)
        tensor = _TensorStep(
            old,
            target[name],
            out,
            moments,
        )
        _step_tensor(
            settings,
            eta,
            tensor,
            merged=merged,
        )
        new[name] = out
    return new, OptimizerState(state.steps + 1, MappingProxyType(first), MappingProxyType(second))


def _restart(settings: OptimizerSettings, state: OptimizerState) -> tuple[OptimizerState, float]:
    """Return the state and the learning rate of the next step; a milestone renews the moments."""
    step = state.steps + 1
    # Counted from the settings instead of kept, so that a restarted server has the same rate.
    restarts = sum(step >= milestone for milestone in settings.milestones)
    eta = settings.eta * settings.restart_factor**restarts
    if step not in settings.milestones:
        return state, eta
    # The weights are not needed for new moments, only their shapes and types, which the old ones
    # have.
    fresh = init(settings, state.first)
    return OptimizerState(state.steps, fresh.first, fresh.second), eta


def _check_shape(
    name: str,
    weight: Array,
    tensors: Tensors,
    where: str,
) -> None:
    value = tensors.get(name)
    if value is None or value.shape != weight.shape:
        actual = "missing" if value is None else f"of shape {value.shape}"
        raise PlanError(
            f"server optimizer: tensor {name} of the {where} should be {weight.shape} but is"
            f" {actual}"
        )


def _writable(moment: Array, *, donate: bool) -> Array:
    """Return a moment that may be overwritten: the original if it was donated, or else a copy."""
    if donate and _is_reusable(moment, moment.dtype):
        return moment
    return np.array(moment, order="C")


def _is_reusable(value: Array, dtype: np.dtype[Any]) -> bool:
    return value.flags.writeable and value.flags.c_contiguous and value.dtype == dtype


@dataclass(frozen=True)
class _TensorStep:
    """The arrays of one tensor's step.

    Attributes:
        old: the values before the step.
        target: the update, or the merged values.
        out: memory for the values after the step; may be the same as `target`.
        moments: moments of the optimizer, which are overwritten.
    """

    old: Array
    target: Array
    out: Array
    moments: list[Array]


def _step_tensor(
    settings: OptimizerSettings,
    eta: float,
    tensor: _TensorStep,
    *,
    merged: bool,
) -> None:
    """Step one tensor, block by block."""
    rule = RULES[settings.name]
    # Flat views: a rule works element by element, whatever the shape.
    old = np.ascontiguousarray(tensor.old).reshape(-1)
    target = np.ascontiguousarray(tensor.target).reshape(-1)
    out = tensor.out.reshape(-1)
    moments = [moment.reshape(-1) for moment in tensor.moments]
    size = min(_BLOCK, old.size)
    update_memory = np.empty(size, old.dtype)
    step_memory = np.empty(size, old.dtype)
    for start in range(0, old.size, _BLOCK):
        place = slice(start, min(start + _BLOCK, old.size))
        length = place.stop - start
        g = update_memory[:length]
        step = step_memory[:length]
        if merged:
            np.subtract(target[place], old[place], out=g)
        else:
            np.copyto(g, target[place])
        rule(
            settings,
            [moment[place] for moment in moments],
            g,
            step,
        )
        np.multiply(step, eta, out=step)
        # Last, since `out` may be the memory of `target`.
        np.add(old[place], step, out=out[place])


def state_tensors(state: OptimizerState) -> dict[str, Array]:
    """Return the state as one flat mapping of arrays, as it is stored beside a global version."""
    tensors: dict[str, Array] = {_STEPS: np.array(state.steps, np.int64)}
    for name, value in state.first.items():
        tensors[_FIRST + name] = value
    for name, value in state.second.items():
        tensors[_SECOND + name] = value
    return tensors


def state_from_tensors(tensors: Tensors) -> OptimizerState:
    """Read back the state that `state_tensors` wrote, among other arrays.

    Raises:
        PlanError: its number of steps is missing.
    """
    if _STEPS not in tensors:
        raise PlanError(
            f"the stored state of a server optimizer lacks {_STEPS}; start the run again "
            "from the beginning"
        )
    first: dict[str, Array] = {}
    second: dict[str, Array] = {}
    for name, value in tensors.items():
        if name.startswith(_FIRST):
            first[name.removeprefix(_FIRST)] = value
        elif name.startswith(_SECOND):
            second[name.removeprefix(_SECOND)] = value
    return OptimizerState(int(tensors[_STEPS]), MappingProxyType(first), MappingProxyType(second))


def server_step(
    settings: OptimizerSettings,
) -> Callable[[Tensors, dict[str, Array], Tensors], tuple[dict[str, Array], dict[str, Array]]]:
    """Return the optimizer as a function of old weights, merged weights and stored state.

    The function returns the new weights and the new stored state. Before the first round the state
    is an empty mapping. Merged weights and state may be overwritten.
    """

    def step(
        old: Tensors,
        merged: dict[str, Array],
        stored: Tensors,
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        # No state is stored with the version that a run starts from.
        state = state_from_tensors(stored) if stored else init(settings, old)
        weights, state = apply(
            settings,
            state,
            old,
            merged,
            merged=True,
            donate=True,
        )
        return weights, state_tensors(state)

    return step
