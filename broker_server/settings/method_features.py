"""The features of a run that come from its method, once that is built for a model and its tiers."""

from dataclasses import dataclass

from broker_server.settings.feature_table import Settings
from broker_server.strategies.strategy import Strategy
from broker_server.strategies.traits import Feature, Trait
from fleet_protocol.messages import Instructions

_OTHER = "take another strategy"
_STATIC = 'take heterofl with plan = "static"'
_STATISTICS = 'set evaluation.statistics = "server-batch", or take a norm without statistics'
_NOT_JUDGED = (
    "remove evaluation.data (in a simulation give [[own_models.models]] their labels), and look at"
    " the accuracy that the devices report (shoal rounds)"
)


@dataclass(frozen=True)
class Method:
    """What is known of a run's method once it is built for a model and its tiers.

    Attributes:
        strategy: as it was built.
        asked: what it asks of devices in the first round.
        moving: a tier whose units change from round to round; None if there is none.
        shared_plans: whether all devices of a tier share one plan.
        own_heads: tiers with heads of their own.
        judged: whether the server has a test set.
        statistics: whether devices are asked for batch norm statistics.
        pieces: whether batches are computed in pieces.
        keeps_optimizer: whether devices keep the states of their optimizers between rounds.
    """

    strategy: Strategy
    asked: Instructions
    moving: str | None
    shared_plans: bool
    own_heads: tuple[str, ...] = ()
    judged: bool = False
    statistics: bool = False
    pieces: bool = False
    keeps_optimizer: bool = False


def method_features(run: Settings, method: Method) -> list[Feature]:
    """Return the features that a method has, and those that need something of it."""
    merge = method.strategy.merge
    # A merge that `robust.merge` has put into a method is that feature's affair.
    replaced = run.robust.merge != "mean" and merge.average == run.robust.merge
    return [
        _stated(method.strategy),
        *_broken_by(method, replaced=replaced),
        *_needed_of(method, replaced=replaced),
    ]


def _stated(strategy: Strategy) -> Feature:
    """Return what a strategy states of itself; the other features follow from what it does."""
    return Feature(f"strategy {strategy.name}", _OTHER, strategy.needs, strategy.breaks)


def _broken_by(method: Method, *, replaced: bool) -> list[Feature]:
    """Return features of a method that break something.

    Args:
        method: as it was built.
        replaced: whether `robust.merge` has put another merge into it.
    """
    strategy = method.strategy
    name = f"strategy {strategy.name}"
    features = []
    if not replaced:
        features.append(_breaking(Trait.OPEN_MERGE, name, _OTHER))
    if not replaced and not strategy.merge.deltas:
        features.append(_breaking(Trait.MEAN_OF_CHANGES, name, "take heterofl or fedavg"))
    if method.asked.chooser is not None:
        features.append(_breaking(Trait.ASSIGNED_TIERS, name, "take heterofl"))
    if not method.shared_plans:
        own_plans = f"{name} with a plan for each device"
        features.append(_breaking(Trait.SHARED_PLANS, own_plans, _STATIC))
    if method.moving is not None:
        moving = f"{name}, which moves the units of {method.moving},"
        features.append(_breaking(Trait.FIXED_PLANS, moving, _STATIC))
    if strategy.begin is None:
        features.append(_breaking(Trait.TIER_HEADS, name, "take inclusivefl"))
    if method.asked.stays:
        leaving = f"{name}, which leaves {method.asked.stays[0]} on the devices,"
        features.append(_breaking(Trait.ALL_MERGED, leaving, _OTHER))
    if method.asked.routine != "train":
        features.append(_breaking(Trait.PIECES, name, _OTHER))
    if method.statistics:
        query = 'evaluation.statistics = "query"'
        features.append(_breaking(Trait.NO_STATISTICS, query, _STATISTICS))
    return features


def _needed_of(method: Method, *, replaced: bool) -> list[Feature]:
    """Return features that need something of a method; arguments are those of `_broken_by`."""
    strategy = method.strategy
    features = []
    if not replaced and strategy.merge.average != "mean":
        features.append(_needing(Trait.ALIKE, f"strategy {strategy.name}", "take heterofl"))
    if method.own_heads:
        heads = f"tiers with heads of their own ({', '.join(method.own_heads)})"
        features.append(_needing(Trait.TIER_HEADS, heads, "export them without --head"))
    if method.judged:
        features.append(_needing(Trait.ALL_MERGED, "evaluation.data", _NOT_JUDGED))
    if method.pieces:
        features.append(_needing(Trait.PIECES, "train.micro_batch", "remove train.micro_batch"))
    if method.keeps_optimizer:
        keep = 'train.optimizer_state = "keep"'
        features.append(_needing(Trait.FIXED_PLANS, keep, 'use "reset"'))
    return features


def _breaking(trait: Trait, name: str, remedy: str) -> Feature:
    return Feature(name, remedy, breaks=frozenset({trait}))


def _needing(trait: Trait, name: str, remedy: str) -> Feature:
    return Feature(name, remedy, needs=frozenset({trait}))
