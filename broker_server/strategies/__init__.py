"""The strategies by name. A new method is one file with a ``build`` function and one row here."""

from __future__ import annotations

from difflib import get_close_matches
from types import MappingProxyType

from broker_server.config import StrategyConfig
from broker_server.server_optimizer import OptimizerSettings
from broker_server.strategies import fedavg, fedmedian, fedprox, fedrolex, fml, heterofl, inclusive_rounds, whalefl
from broker_server.strategies.strategy import Builder, Contribution, PlannedTier, PlanRequest, ServerState, Strategy
from fleet_protocol.errors import ConfigError

__all__ = [
    "STRATEGIES",
    "Contribution",
    "PlanRequest",
    "PlannedTier",
    "ServerState",
    "Strategy",
    "strategy",
]

STRATEGIES: MappingProxyType[str, Builder] = MappingProxyType(
    {
        "fedavg": fedavg.build,
        "fedprox": fedprox.build,
        "heterofl": heterofl.build,
        "fedrolex": fedrolex.build,
        "federated_dropout": fedrolex.build_dropout,
        "inclusivefl": inclusive_rounds.build,
        "whalefl": whalefl.build,
        "fml": fml.build,
        "fedmedian": fedmedian.build,
    }
)


def strategy(config: StrategyConfig, optimizer: OptimizerSettings | None = None) -> Strategy:
    """Build the configured strategy.

    Args:
        config: names it and sets it up.
        optimizer: of the server; None for what the strategy does by itself.

    Raises:
        ConfigError: there is none of that name.
        PlanError: its settings do not go together.
    """
    builder = STRATEGIES.get(config.name)
    if builder is None:
        close = get_close_matches(config.name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(STRATEGIES)}"
        raise ConfigError(f"strategy.name: no strategy {config.name!r}; {hint}")
    built = builder(config)
    return built if optimizer is None else built.optimized(built, optimizer)
