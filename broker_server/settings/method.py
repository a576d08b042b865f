"""The tables of ``fleet.toml`` that choose the method: ``[strategy]``, and one table a method."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, model_validator

from broker_server.strategies.registry import STRATEGIES, find_strategy
from broker_server.strategies.strategy import StrategySettings
from broker_server.strategies.trained_window import WindowPlan
from fleet_protocol.configuration import validate_config
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FiniteJson, FrozenModel


class _StrategyKeys(FrozenModel):
    """How sub-models are cut and merged. Each method's own keys are in a table with its name.

    Attributes:
        name: name of a strategy in Shoal or in an installed package. With ``file``, the name under
            which reports list the strategy, by default the name of the file.
        file: a Python file with your own strategy, relative to this file's folder; Shoal executes
            it when a run starts. None for no file.
        plan: rule that selects the units of a narrower sub-model.
        window: which blocks a tier trains if it trains only a share of them: the ``top`` blocks, a
            window that moves down by one block per round (``rolling``), or a ``random`` window for
            each device.
        weighting: whether all updates have equal weights (``uniform``), or each update is weighted
            by its number of samples (``samples``); None for the strategy's own rule.
        label_rule: whether the server merges a row of a label axis only from devices that have the
            row's label; None for the strategy's own rule.
        options: settings of a strategy that comes from ``file`` or from a package.
    """

    name: str = Field(default="heterofl", min_length=1)
    file: Path | None = None
    plan: Literal["static", "rolling", "random"] = "static"
    window: WindowPlan = "top"
    weighting: Literal["uniform", "samples"] | None = None
    label_rule: bool | None = None
    options: Mapping[str, FiniteJson] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _named_after_file(cls, document: Any) -> Any:
        """Set the name of a strategy in a file: reports must not show the default's."""
        # A configuration that names a strategy, or has no file, keeps its name.
        if not isinstance(document, dict) or "name" in document or not document.get("file"):
            return document
        return {**document, "name": Path(str(document["file"])).stem}

    @model_validator(mode="after")
    def _of_this_method(self) -> "_StrategyKeys":
        # A configuration that was written out has every table.
        for name in sorted(self.model_fields_set & STRATEGIES.keys() - {self.name}):
            # A table with its defaults has no effect, whoever wrote it.
            if getattr(self, name) != type(getattr(self, name))():
                raise ValueError(
                    f"the table strategy.{name} has no effect on strategy {self.name!r}; remove it"
                )
        if self.name not in STRATEGIES:
            # The options of a user's strategy are checked once it can be loaded.
            return self
        if self.file is not None:
            raise ValueError(
                f"strategy.file {self.file}: Shoal has a strategy named {self.name!r}; set "
                "strategy.name to another name, or rename the file"
            )
        if self.options:
            raise ValueError(
                f"strategy.options has no effect on strategy {self.name!r}, whose settings "
                f"are in the table strategy.{self.name}; move them there, or remove the table"
            )
        return self

    def python_files(self) -> Iterator[Path]:
        """Yield the user's file with the strategy."""
        if self.file is not None:
            yield self.file

    def require_loadable(self) -> None:
        """Check that the strategy can be loaded, and has the options that are set.

        Raises:
            ConfigError: it cannot, or it lacks them.
        """
        self._method_options()

    @property
    def settings(self) -> StrategySettings[Any]:
        """Return the same for the strategies, with the table of the method's own.

        Raises:
            ConfigError: a strategy of the user cannot be loaded, or lacks such options.
        """
        return StrategySettings(
            self.name,
            self.plan,
            self.weighting,
            self.label_rule,
            self._method_options(),
            file=self.file,
        )

    def _method_options(self) -> FrozenModel | None:
        method = find_strategy(self.name, self.file)
        if self.name in STRATEGIES:
            # A method of Shoal has its own table, or none.
            table: FrozenModel | None = getattr(self, self.name, None)
            return table
        if method.settings is None and self.options:
            raise ConfigError(
                f"strategy.options has no effect on strategy {self.name!r}, which has no options;"
                " remove the table"
            )
        if method.settings is None:
            return None
        source = "strategy.options" if self.file is None else f"strategy.options for {self.file}"
        options: FrozenModel = validate_config(
            self.options, method.settings, source=source, written=True
        )
        return options


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
