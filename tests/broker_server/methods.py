"""Strategies as configurations build them, and whole merges, for tests."""

from collections.abc import Iterable, Sequence
from typing import Any

from broker_server.settings.method import StrategyConfig
from broker_server.strategies.accumulator import finish, fold, start
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.registry import build_strategy
from broker_server.strategies.strategy import Contribution, GlobalModel, Strategy
from models.layout import Layout
from models.plan import compile_plan, make_plan
from models.slicing import Tensors
from models.tier import Tier

__all__ = ["built", "merge_memes", "merged"]


def built(
    config: dict[str, Any],
    layout: Layout,
    tiers: Sequence[Tier] = (),
    optimizer: OptimizerSettings | None = None,
) -> Strategy:
    """The strategy of a ``[strategy]`` table; by default for the full tier alone."""
    settings = StrategyConfig.model_validate(config).settings
    return build_strategy(settings, layout, tiers or (layout.tier(1.0),), optimizer)


def merged(strategy: Strategy, updates: Iterable[Contribution], weights: Tensors) -> Tensors:
    """The weights after a first round of these updates."""
    sums = strategy.merge.start()
    for update in updates:
        strategy.merge.fold(sums, update)
    return strategy.merge.finish(sums, GlobalModel(weights, {})).weights


def merge_memes(layout: Layout, old: Tensors, memes: Iterable[Tensors]) -> dict[str, Any]:
    """The plain mean of the memes of one round, in layout order; without a meme the weights
    before.
    """
    plan = compile_plan(layout, make_plan(layout, layout.tier(1.0)))
    state = start(layout)
    for meme in memes:
        fold(state, "meme", plan, meme)
    return finish(state, old)
