"""List the strategies by name, and build the configured one.

`STRATEGIES` joins the constants of that name of all modules in this package, so a new strategy is a
new file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.strategy import Basis, Method, Strategy, StrategySettings
from fleet_protocol.discovery import discover
from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean
from models.layout import Layout
from models.tier import Tier

STRATEGIES: Mapping[str, Method[Any]] = discover("broker_server.strategies", "STRATEGIES")


def build_strategy(
    settings: StrategySettings[Any],
    layout: Layout,
    tiers: Sequence[Tier],
    optimizer: OptimizerSettings | None = None,
) -> Strategy:
    """Build the configured strategy for a run.

    Raises:
        ConfigError: there is no strategy of that name.
        PlanError: settings, model, tiers and optimizer do not fit together.
    """
    method = STRATEGIES.get(settings.name)
    if method is None:
        hint = did_you_mean(settings.name, STRATEGIES)
        raise ConfigError(
            f"strategy.name: no strategy {settings.name!r}{hint}; there are {', '.join(STRATEGIES)}"
        )
    return method.build(Basis(**vars(settings), layout=layout, tiers=tiers, optimizer=optimizer))
