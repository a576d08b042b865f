"""The features of a run that come from its method, once it is built for a model and its tiers."""

from collections.abc import Sequence
from dataclasses import dataclass

from broker_server.strategies.private_parts import COMMON_ROUTINES
from broker_server.strategies.stage import Settings
from broker_server.strategies.strategy import Strategy
from broker_server.strategies.traits import Feature, Trait
from fleet_protocol.messages import Instructions

_OTHER = "use another strategy"
_STATIC = 'use heterofl with plan = "static"'
_STATISTICS = 'set evaluation.statistics = "server-batch", or use a norm without statistics'
_NOT_JUDGED = (
    "remove evaluation.data (in a simulation give [[own_models.models]] their labels), and "
    "use the accuracy that the devices report (shoal rounds)"
)


@dataclass(frozen=True)
class Method:
    """Facts about a run's method once it is built for a model and its tiers.

    Attributes:
        strategy: the built strategy.
        asked: its instructions to devices in the first round.
        moving: a tier whose units change from round to round; None if there is none.
        shared_plans: whether all devices of a tier share one plan.
        own_heads: tiers with separate heads.
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
    """Return the features that a method has, and those that it must support."""
    evident = evident_features(run, method)
    return [_stated(method.strategy, evident), *evident]


def evident_features(run: Settings, method: Method) -> list[Feature]:
    """Return the features that follow from a method's behaviour, whatever it states of itself."""
    merge = method.strategy.merge
    # A merge that `robust.merge` has set counts as that feature's.
    # Shoal's robust merge states its own features (`broker_server.strategies`).
    replaced = run.robust.merge != "mean" and merge.average == run.robust.merge
    return [*_broken_by(method, replaced=replaced), *_needed_of(method, replaced=replaced)]


def _stated(strategy: Strategy, evident: Sequence[Feature]) -> Feature:
    """Return what a strategy states of itself beyond what is evident.

    Evident traits are refused elsewhere, with a more specific remedy, so they are left out here. A
    user's strategy need not state it.
    """
    needs = strategy.needs
    breaks = strategy.breaks
    for feature in evident:
        needs -= feature.needs
        breaks -= feature.breaks
    return Feature(f"strategy {strategy.name}", _OTHER, needs, breaks)


def _broken_by(method: Method, *, replaced: bool) -> list[Feature]:
    """Return features of a method that break something.

    Args:
        method: the built method.
        replaced: whether `robust.merge` has replaced its merge.
    """
    strategy = method.strategy
    name = f"strategy {strategy.name}"
    features = []
    if not replaced:
        features.append(_breaking(Trait.OPEN_MERGE, name, _OTHER))
    # A merge is taken for something else than a mean of changes unless it says so: noise would not
    # cover it.
    if not replaced and not strategy.merge.deltas:
        features.append(_breaking(Trait.MEAN_OF_CHANGES, name, "use heterofl or fedavg"))
    if method.asked.chooser is not None:
        features.append(_breaking(Trait.ASSIGNED_TIERS, name, "use heterofl"))
    if not method.shared_plans:
        own_plans = f"{name} with a plan for each device"
        features.append(_breaking(Trait.SHARED_PLANS, own_plans, _STATIC))
    if method.moving is not None:
        moving = f"{name}, which moves the units of {method.moving},"
        features.append(_breaking(Trait.FIXED_PLANS, moving, _STATIC))
    # Only a method with its own beginning can start heads of single tiers.
    if strategy.begin is None:
        features.append(_breaking(Trait.TIER_HEADS, name, "use inclusivefl"))
    if method.asked.routine not in COMMON_ROUTINES:
        features.append(_breaking(Trait.COMMON_ROUTINE, name, _OTHER))
    if method.asked.stays:
        leaving = f"{name}, which leaves {method.asked.stays[0]} on the devices,"
        features.append(_breaking(Trait.ALL_MERGED, leaving, _OTHER))
    if method.statistics:
        query = 'evaluation.statistics = "query"'
        features.append(_breaking(Trait.NO_STATISTICS, query, _STATISTICS))
    return features


def _needed_of(method: Method, *, replaced: bool) -> list[Feature]:
    """Return features that need a trait of a method; the arguments are those of `_broken_by`."""
    strategy = method.strategy
    features = []
    # A median or trimmed mean has no weights, so its updates must be alike.
    if not replaced and strategy.merge.average != "mean":
        features.append(_needing(Trait.ALIKE, f"strategy {strategy.name}", "use heterofl"))
    if method.own_heads:
        heads = f"tiers with separate heads ({', '.join(method.own_heads)})"
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
