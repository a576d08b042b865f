"""Server optimizers: what the server does with the update that a round's merge amounts to.

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

There is no bias correction, and tau stands outside the root. Entries that no device held have g = 0
and yet move while m decays. FedAvgM is Hsu, Qi, Brown: "Measuring the effects of non-identical data
distribution", 2019.

The functions are pure over an explicit state. They are bound by memory traffic, so tensors are
walked in pieces that stay in the second-level cache, and `donate` lets the results take the memory
of the arguments.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel

OptimizerName = Literal["plain", "fedavgm", "fedadam", "fedyogi", "fedadagrad"]
Array = NDArray[Any]
Tensors = Mapping[str, Array]

_ADAPTIVE = frozenset({"fedadam", "fedyogi", "fedadagrad"})
_PIECE = (
    32 * 1024
)  # values: six float32 pieces of 128 kB are in use at once, which a second-level cache holds
_STEPS = "optimizer.steps"
_FIRST = "optimizer.first."
_SECOND = "optimizer.second."


class OptimizerSettings(FrozenModel):
    """``[server_optimizer]``: which, and its numbers.

    The defaults are specification 3.5's starting values.

    Attributes:
        name: ``plain`` takes the merge as it is, times the learning rate.
        learning_rate: eta; None takes 1 for plain and fedavgm, 0.01 for the others.
        beta1: decay of the first moment, m.
        beta2: decay of the second, v.
        tau: how adaptive the step is; added to the root of the second moment.
        second_start: what the second moment starts at. The paper asks for at least tau^2, the
            vectors of the specification for 0.
        milestones: steps (from 1) that start with fresh moments and multiply the learning rate
            (specification 2.5).
        restart_factor: by what.
    """

    name: OptimizerName = "plain"
    learning_rate: float | None = Field(default=None, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    tau: float = Field(default=1e-3, gt=0)
    second_start: float = Field(default=0.0, ge=0)
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = ()
    restart_factor: float = Field(default=0.5, gt=0)

    @field_validator("milestones")
    @classmethod
    def _ascend(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if list(steps) != sorted(set(steps)):
            raise ValueError(f"milestones must ascend, not {steps}")
        return steps

    @property
    def eta(self) -> float:
        """The learning rate before the first milestone."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 0.01 if self.name in _ADAPTIVE else 1.0


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer carries from round to round."""

    steps: int = 0
    first: Tensors = field(
        default_factory=dict
    )  # m, of the shapes and the dtype of the weights; empty for plain
    second: Tensors = field(default_factory=dict)  # v; empty for plain and fedavgm


def init(settings: OptimizerSettings, weights: Tensors) -> OptimizerState:
    """The state before the first step of some weights."""
    first = (
        {}
        if settings.name == "plain"
        else {name: np.zeros_like(value) for name, value in weights.items()}
    )
    second = (
        {name: np.full_like(value, settings.second_start) for name, value in weights.items()}
        if settings.name in _ADAPTIVE
        else {}
    )
    return OptimizerState(0, MappingProxyType(first), MappingProxyType(second))


def apply(
    settings: OptimizerSettings,
    state: OptimizerState,
    weights: Tensors,
    given: Tensors,
    *,
    merged: bool = False,
    donate: bool = False,
) -> tuple[dict[str, Array], OptimizerState]:
    """One step along an update.

    Args:
        settings: which optimizer.
        state: from `init` or the step before.
        weights: the weights before the step, floats of any shapes.
        given: g above, of the same names and shapes.
        merged: what is given are the merged weights, and the update is the way to them. Plain with
            eta 1 returns exactly these.
        donate: the arrays of `state` and `given` may be overwritten to hold the results; do not use
            them again.

    Returns:
        The new weights, in the order of `weights`, and the new state.

    Raises:
        PlanError: a tensor is missing from the update or the state, or has another shape.
    """
    state, eta = _restarted(settings, state)
    for name, value in weights.items():
        _check(name, value, given, "update")
    if merged and settings.name == "plain" and eta == 1.0:
        # old + (merged - old) would lose the last bit.
        taken = {name: given[name] if donate else np.array(given[name]) for name in weights}
        return taken, replace(state, steps=state.steps + 1)
    new: dict[str, Array] = {}
    first = dict(state.first)
    second = dict(state.second)
    for name, old in weights.items():
        moments = []
        for held in (first, second):
            if held:
                _check(name, old, held, "server optimizer's state")
                mine = donate and _reusable(held[name], held[name].dtype)
                held[name] = held[name] if mine else np.array(held[name], order="C")
                moments.append(held[name])
        out = (
            given[name]
            if donate and _reusable(given[name], old.dtype)
            else np.empty(old.shape, old.dtype)
        )
        _walk(settings, eta, (old, given[name], out), moments, merged=merged)
        new[name] = out
    return new, OptimizerState(state.steps + 1, MappingProxyType(first), MappingProxyType(second))


def _restarted(settings: OptimizerSettings, state: OptimizerState) -> tuple[OptimizerState, float]:
    number = state.steps + 1
    eta = settings.eta * settings.restart_factor ** sum(
        number >= milestone for milestone in settings.milestones
    )
    if number in settings.milestones:
        fresh = init(settings, state.first)
        state = OptimizerState(state.steps, fresh.first, fresh.second)
    return state, eta


def _check(name: str, weight: Array, given: Tensors, where: str) -> None:
    value = given.get(name)
    if value is None or value.shape != weight.shape:
        found = "missing" if value is None else f"of shape {value.shape}"
        raise PlanError(
            f"server optimizer: tensor {name} of the {where} should be {weight.shape} but is {found}"
        )


def _reusable(value: Array, dtype: np.dtype[Any]) -> bool:
    return value.flags.writeable and value.flags.c_contiguous and value.dtype == dtype


def _walk(
    settings: OptimizerSettings,
    eta: float,
    arrays: tuple[Array, Array, Array],
    moments: list[Array],
    *,
    merged: bool,
) -> None:
    """Step one tensor, piece by piece.

    Its old, given and new values are `arrays`, of which the last is written.
    """
    old, given, out = arrays
    rule = _RULES[settings.name]
    size = min(_PIECE, old.size)
    update = np.empty(size, old.dtype)
    spare = np.empty(size, old.dtype)
    source = np.ascontiguousarray(old).reshape(-1)
    target = out.reshape(-1)
    change = np.ascontiguousarray(given).reshape(-1)
    flat = [moment.reshape(-1) for moment in moments]
    for start in range(0, old.size, _PIECE):
        place = slice(start, min(start + _PIECE, old.size))
        length = place.stop - start
        g = update[:length]
        step = spare[:length]
        if merged:
            np.subtract(change[place], source[place], out=g)
        else:
            np.copyto(g, change[place])
        rule(settings, [moment[place] for moment in flat], g, step)
        np.multiply(step, eta, out=step)
        np.add(source[place], step, out=target[place])


def _plain(_settings: OptimizerSettings, _moments: list[Array], g: Array, step: Array) -> None:
    np.copyto(step, g)


def _fedavgm(settings: OptimizerSettings, moments: list[Array], g: Array, step: Array) -> None:
    (first,) = moments
    np.multiply(first, settings.beta1, out=first)
    np.add(first, g, out=first)
    np.copyto(step, first)


def _adaptive(settings: OptimizerSettings, moments: list[Array], g: Array, step: Array) -> None:
    """The first moment over the root of the second, in which the three methods differ."""
    first, second = moments
    _decay(first, settings.beta1, g, step)
    np.multiply(g, g, out=g)
    if settings.name == "fedadam":
        _decay(second, settings.beta2, g, step)
    elif settings.name == "fedyogi":
        np.subtract(second, g, out=step)
        np.sign(step, out=step)
        np.multiply(step, g, out=step)
        np.multiply(step, 1 - settings.beta2, out=step)
        np.subtract(second, step, out=second)
    else:
        np.add(second, g, out=second)
    np.sqrt(second, out=step)
    np.add(step, settings.tau, out=step)
    np.divide(first, step, out=step)


def _decay(moment: Array, beta: float, value: Array, spare: Array) -> None:
    """``moment = beta * moment + (1 - beta) * value``; `spare` is overwritten."""
    np.multiply(moment, beta, out=moment)
    np.multiply(value, 1 - beta, out=spare)
    np.add(moment, spare, out=moment)


_RULES: Mapping[str, Callable[[OptimizerSettings, list[Array], Array, Array], None]] = (
    MappingProxyType(
        {
            "plain": _plain,
            "fedavgm": _fedavgm,
            **dict.fromkeys(("fedadam", "fedyogi", "fedadagrad"), _adaptive),
        }
    )
)


def state_tensors(state: OptimizerState) -> dict[str, Array]:
    """The state as one flat mapping of arrays, as it is stored beside a global version."""
    return {
        _STEPS: np.array(state.steps, np.int64),
        **{_FIRST + name: value for name, value in state.first.items()},
        **{_SECOND + name: value for name, value in state.second.items()},
    }


def state_from_tensors(tensors: Tensors) -> OptimizerState:
    """Read back what `state_tensors` made of a state, among other arrays.

    Without its number of steps a PlanError.
    """
    if _STEPS not in tensors:
        raise PlanError(
            f"the stored state of a server optimizer lacks {_STEPS}; start the run afresh"
        )
    first = {
        name[len(_FIRST) :]: value for name, value in tensors.items() if name.startswith(_FIRST)
    }
    second = {
        name[len(_SECOND) :]: value for name, value in tensors.items() if name.startswith(_SECOND)
    }
    return OptimizerState(int(tensors[_STEPS]), MappingProxyType(first), MappingProxyType(second))


def server_step(
    settings: OptimizerSettings,
) -> Callable[[Tensors, dict[str, Array], Tensors], tuple[dict[str, Array], dict[str, Array]]]:
    """The optimizer as a strategy's ``step``: old weights, merged weights and stored state to new
    ones.

    Before the first round the state is an empty mapping. Merged weights and state may be
    overwritten.
    """

    def step(
        old: Tensors, merged: dict[str, Array], stored: Tensors
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        state = state_from_tensors(stored) if stored else init(settings, old)
        weights, state = apply(settings, state, old, merged, merged=True, donate=True)
        return weights, state_tensors(state)

    return step
