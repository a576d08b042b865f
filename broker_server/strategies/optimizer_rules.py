"""The settings of the server optimizers, and their formulas for one block of values.

See `broker_server.strategies.server_optimizer` for the papers and the notation. The formulas write
into memory that the caller provides, because memory traffic limits their speed.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from fleet_protocol.frozen import FrozenModel

OptimizerName = Literal["plain", "fedavgm", "fedadam", "fedyogi", "fedadagrad"]
Array = NDArray[Any]

ADAPTIVE = frozenset({"fedadam", "fedyogi", "fedadagrad"})
"""The optimizers with a second moment."""


class OptimizerSettings(FrozenModel):
    """``[server_optimizer]``: the optimizer and its numbers.

    The defaults are specification 3.5's starting values.

    Attributes:
        name: rule of the server's step; ``plain`` multiplies the merged change by the learning
            rate.
        learning_rate: learning rate of the server's step, eta; None means 1 for ``plain`` and
            ``fedavgm``, and 0.01 for the other rules.
        beta1: decay of the first moment, m.
        beta2: decay of the second moment, v.
        tau: number that is added to the square root of the second moment; a smaller number makes
            the step more adaptive.
        second_start: initial value of the second moment. The paper requires at least tau^2; the
            specification's test vectors use 0.
        milestones: steps, counted from 1, at which the moments are reset and the learning rate is
            multiplied by ``restart_factor`` (specification 2.5).
        restart_factor: factor by which each milestone multiplies the learning rate.
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
        return 0.01 if self.name in ADAPTIVE else 1.0


Rule = Callable[[OptimizerSettings, list[Array], Array, Array], None]
"""Write the step, from settings, moments, update g and the memory of the step.

Moments are overwritten by the new ones, and g may be overwritten.
"""


def _plain_step(
    _settings: OptimizerSettings,
    _moments: list[Array],
    g: Array,
    step: Array,
) -> None:
    np.copyto(step, g)


def _fedavgm(
    settings: OptimizerSettings,
    moments: list[Array],
    g: Array,
    step: Array,
) -> None:
    (m,) = moments
    np.multiply(m, settings.beta1, out=m)
    np.add(m, g, out=m)
    np.copyto(step, m)


def _adaptive(
    settings: OptimizerSettings,
    moments: list[Array],
    g: Array,
    step: Array,
) -> None:
    """Write m / (sqrt(v) + tau); the three methods differ in v."""
    m, v = moments
    _decay(
        m,
        settings.beta1,
        g,
        step,
    )
    # g is no longer needed: its memory holds the square.
    square = np.multiply(g, g, out=g)
    if settings.name == "fedadam":
        _decay(
            v,
            settings.beta2,
            square,
            step,
        )
    elif settings.name == "fedyogi":
        np.subtract(v, square, out=step)
        np.sign(step, out=step)
        np.multiply(step, square, out=step)
        np.multiply(step, 1 - settings.beta2, out=step)
        np.subtract(v, step, out=v)
    else:
        # FedAdagrad lets nothing decay.
        np.add(v, square, out=v)
    np.sqrt(v, out=step)
    np.add(step, settings.tau, out=step)
    np.divide(m, step, out=step)


def _decay(
    moment: Array,
    beta: float,
    value: Array,
    scratch: Array,
) -> None:
    """Set ``moment = beta * moment + (1 - beta) * value``; `scratch` is overwritten."""
    np.multiply(moment, beta, out=moment)
    np.multiply(value, 1 - beta, out=scratch)
    np.add(moment, scratch, out=moment)


RULES: Mapping[OptimizerName, Rule] = MappingProxyType(
    {
        "plain": _plain_step,
        "fedavgm": _fedavgm,
        "fedadam": _adaptive,
        "fedyogi": _adaptive,
        "fedadagrad": _adaptive,
    }
)
