"""The strategies by name, found in the modules of this folder: a new one is a file with a row in
``STRATEGIES``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from broker_server.strategies.server_optimizer import OptimizerSettings
from broker_server.strategies.strategy import Basis, Method, Strategy, StrategySettings
from fleet_protocol.discovery import discover
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.spelling import did_you_mean
from models.layout import Layout
from models.tier import Tier

KNOWN: Mapping[str, Method[Any]] = discover("broker_server.strategies", "STRATEGIES")


def build_strategy(
    settings: StrategySettings[Any],
    layout: Layout,
    tiers: Sequence[Tier],
    optimizer: OptimizerSettings | None = None,
) -> Strategy:
    """Build the configured strategy for a run.

    Raises:
        ConfigError: there is none of that name.
        PlanError: settings, model, tiers and optimizer do not go together.
    """
    method = KNOWN.get(settings.name)
    if method is None:
        hint = did_you_mean(settings.name, KNOWN)
        raise ConfigError(
            f"strategy.name: no strategy {settings.name!r}{hint}; there are {', '.join(KNOWN)}"
        )
    return method.build(Basis(**vars(settings), layout=layout, tiers=tiers, optimizer=optimizer))
