"""Finds the configured strategy, and builds it.

`STRATEGIES` joins the constants of that name of all modules in this package. A user's strategy is
in a file that the configuration names, or in an installed package (`broker_server.strategies.own`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.own import (
    GROUP,
    installed_names,
    installed_strategies,
    load_file,
    load_installed,
)
from broker_server.strategies.strategy import Basis, Method, Strategy, StrategySettings
from fleet_protocol.discovery import discover
from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean
from models.layout import Layout
from models.tier import Tier

STRATEGIES: Mapping[str, Method[Any]] = discover("broker_server.strategies", "STRATEGIES")


def find_strategy(name: str, file: Path | None = None) -> Method[Any]:
    """Return the strategy of a name.

    Args:
        name: name of one of Shoal's strategies, or of one in an installed package.
        file: the user's file that contains it; None for none. It is run, so it must be trusted.

    Raises:
        ConfigError: it does not exist, several exist, or it cannot be loaded; the message says what
            to do.
    """
    if file is not None:
        return load_file(file)
    packages = installed_strategies(name)
    method = STRATEGIES.get(name)
    offers = [f"package {entry.dist.name if entry.dist else '?'}" for entry in packages]
    if method is not None:
        offers.insert(0, "Shoal")
    if len(offers) > 1:
        raise ConfigError(
            f"strategy.name: {' and '.join(offers)} each have a strategy {name!r}; rename "
            f"the package's entry point in the group {GROUP}, or uninstall it"
        )
    if method is not None:
        return method
    if packages:
        return load_installed(packages[0])
    names = (*STRATEGIES, *installed_names())
    raise ConfigError(
        f"strategy.name: strategy {name!r} does not exist{did_you_mean(name, names)}; the "
        f"strategies are {', '.join(names)}; to use your own, name its file in strategy.file"
    )


def build_strategy(
    settings: StrategySettings[Any],
    layout: Layout,
    tiers: Sequence[Tier],
    optimizer: OptimizerSettings | None = None,
) -> Strategy:
    """Build the configured strategy for a run.

    Raises:
        ConfigError: no strategy has that name, or a user's strategy cannot be loaded.
        PlanError: settings, model, tiers and optimizer are incompatible.
    """
    method = find_strategy(settings.name, settings.file)
    return method.build(Basis(**vars(settings), layout=layout, tiers=tiers, optimizer=optimizer))
