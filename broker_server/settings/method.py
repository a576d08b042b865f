"""The tables of ``fleet.toml`` that choose the method: ``[strategy]``, one table a method, ``[server_optimizer]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model, model_validator

from broker_server.strategies.registry import KNOWN
from broker_server.strategies.server_optimizer import OptimizerName, OptimizerSettings
from broker_server.strategies.strategy import StrategySettings
from fleet_protocol.frozen import FrozenModel

__all__ = ["ServerOptimizerConfig", "StrategyConfig"]


class ServerOptimizerConfig(FrozenModel):
    """What the server does with a round's merge (specification 3.5).

    Attributes:
        name: ``plain`` takes the merge as it is, times the learning rate.
        learning_rate: None takes 1 for plain and fedavgm, 0.01 for the others.
        beta1: decay of the first moment.
        beta2: decay of the second.
        tau: added to the root of the second moment.
        second_start: what the second moment starts at.
        milestones: steps that start with fresh moments and multiply the learning rate.
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

    @property
    def settings(self) -> OptimizerSettings:
        """The same for the optimizers."""
        return OptimizerSettings(**self.model_dump())


class _StrategyKeys(FrozenModel):
    """How sub-models are cut and merged. A method's own keys are in a table of its name.

    Attributes:
        name: of a strategy.
        plan: which units a narrower sub-model keeps.
        weighting: every update alike, or by its number of samples; None takes the strategy's own.
        label_rule: take rows of label axes only for labels the device holds; None takes the strategy's own.
    """

    name: str = "heterofl"
    plan: Literal["static", "rolling", "random"] = "static"
    weighting: Literal["uniform", "samples"] | None = None
    label_rule: bool | None = None

    @model_validator(mode="after")
    def _of_this_method(self) -> _StrategyKeys:
        # A configuration that was written out has every table.
        for name in sorted(self.model_fields_set & KNOWN.keys() - {self.name}):
            if getattr(self, name) != type(getattr(self, name))():
                raise ValueError(f"the table strategy.{name} has no effect on strategy {self.name!r}; remove it")
        return self

    @property
    def settings(self) -> StrategySettings[Any]:
        """The same for the strategies."""
        own = getattr(self, self.name) if self.name in KNOWN and KNOWN[self.name].settings else None
        return StrategySettings(self.name, self.plan, self.weighting, self.label_rule, own)


if TYPE_CHECKING:
    StrategyConfig = _StrategyKeys
else:
    _TABLES = {name: method.settings for name, method in KNOWN.items() if method.settings is not None}
    StrategyConfig = create_model(
        "StrategyConfig",
        __base__=_StrategyKeys,
        __module__=__name__,
        __doc__=_StrategyKeys.__doc__,
        **{name: (table, table()) for name, table in _TABLES.items()},
    )
