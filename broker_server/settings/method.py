"""The tables of ``fleet.toml`` that choose the method: ``[strategy]``, and one table a method."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model, model_validator

from broker_server.strategies.registry import STRATEGIES
from broker_server.strategies.strategy import StrategySettings
from fleet_protocol.frozen import FrozenModel


class _StrategyKeys(FrozenModel):
    """How sub-models are cut and merged. A method's own keys are in a table of its name.

    Attributes:
        name: of a strategy.
        plan: which units a narrower sub-model keeps.
        weighting: every update alike, or by its number of samples; None takes the strategy's own.
        label_rule: take rows of label axes only for labels the device holds; None takes the
            strategy's own.
    """

    name: str = "heterofl"
    plan: Literal["static", "rolling", "random"] = "static"
    weighting: Literal["uniform", "samples"] | None = None
    label_rule: bool | None = None

    @model_validator(mode="after")
    def _of_this_method(self) -> "_StrategyKeys":
        # A configuration that was written out has every table.
        for name in sorted(self.model_fields_set & STRATEGIES.keys() - {self.name}):
            if getattr(self, name) != type(getattr(self, name))():
                raise ValueError(
                    f"the table strategy.{name} has no effect on strategy {self.name!r}; remove it"
                )
        return self

    @property
    def settings(self) -> StrategySettings[Any]:
        """Return the same for the strategies, with the table of the method's own."""
        method = STRATEGIES.get(self.name)
        own = None
        if method is not None and method.settings is not None:
            own = getattr(self, self.name)
        return StrategySettings(self.name, self.plan, self.weighting, self.label_rule, own)


if TYPE_CHECKING:
    StrategyConfig = _StrategyKeys
else:
    _TABLES = {
        name: method.settings for name, method in STRATEGIES.items() if method.settings is not None
    }
    StrategyConfig = create_model(
        "StrategyConfig",
        __base__=_StrategyKeys,
        __module__=__name__,
        __doc__=_StrategyKeys.__doc__,
        **{name: (table, table()) for name, table in _TABLES.items()},
    )
