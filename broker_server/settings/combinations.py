"""Which settings go together, for fleets and simulations: the one place that refuses combinations.

Each feature of a run that touches updates states which traits of the run it needs, and which it
breaks. A run is refused where one feature needs what another one breaks. A new feature is one more
row here; nothing else has to know of it.

A default never conflicts with what a user adds: it is off then. What the user has written and
conflicts is refused, with both names and what to do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from broker_server.settings.privacy import PrivacyConfig, SecureSumConfig
from broker_server.settings.robust import RobustConfig
from broker_server.settings.rounds import DownloadConfig, RoundKeys, UploadConfig
from broker_server.strategies.strategy import Average, Strategy, StrategySettings
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import Instructions


class Trait(Enum):
    """What may hold of a run; the values complete the sentence "this needs that ..."."""

    SINGLE = "the server sees each update by itself"
    INDEPENDENT = "whether an update counts does not depend on the others"
    LABELS_HIDDEN = "devices do not tell their labels"
    WHOLE = "every update says something about every entry"
    ONE_VERSION = "all updates of a round were made from one version"
    COMPLETE = "a round waits for all devices that it has asked"
    KNOWN_COUNT = "the number by which a sum is divided is known before anyone answers"
    ALIKE = "all updates count alike"
    MEAN_OF_CHANGES = "the global model moves by the mean, entry by entry, of what devices changed"
    ASSIGNED_TIERS = "devices do not choose their tier by their losses"
    SHARED_PLANS = "all devices of a tier share one plan"
    FIXED_PLANS = "the units of a tier stay the same from round to round"
    LATE_COUNTS = "updates that come late still count"
    SERVER_NOISE = (
        'the server alone adds noise, of which a sum with privacy.where = "central" needs less'
    )
    NO_STATISTICS = "devices send no batch norm statistics"
    OPEN_MERGE = "the method lets its merge be replaced"
    TIER_HEADS = "the method keeps a head for each tier"
    ALL_MERGED = "all parameters are merged here"
    PIECES = "the routine of the method trains on pieces of a batch"


@dataclass(frozen=True)
class Feature:
    """One feature of a run that touches updates.

    Attributes:
        name: as it is written in a configuration.
        remedy: what to do to have a run without this feature, as a clause.
        needs: traits that the run must have for this feature to do what it promises.
        breaks: traits that a run with this feature does not have.
    """

    name: str
    remedy: str
    needs: frozenset[Trait] = frozenset()
    breaks: frozenset[Trait] = frozenset()


class Settings(Protocol):
    """The tables of a configuration that state features."""

    @property
    def robust(self) -> RobustConfig:
        """Return ``[robust]``."""

    @property
    def strategy(self) -> Any:
        """Return ``[strategy]``."""

    @property
    def round(self) -> RoundKeys:
        """Return ``[round]``."""

    @property
    def upload(self) -> UploadConfig:
        """Return ``[upload]``."""

    @property
    def download(self) -> DownloadConfig:
        """Return ``[download]``."""

    @property
    def privacy(self) -> PrivacyConfig | None:
        """Return ``[privacy]``."""

    @property
    def secure_sum(self) -> SecureSumConfig | None:
        """Return ``[secure_sum]``."""


@dataclass(frozen=True)
class Default:
    """A feature that a run has unless something conflicts with it.

    Attributes:
        table: of the configuration.
        key: of the table.
        off: its value for a run without the feature.
        asked_by: keys of the table that ask for the feature when somebody writes them.
    """

    table: str
    key: str
    off: object
    asked_by: frozenset[str]


@dataclass(frozen=True)
class Row:
    """A feature that a configuration may state, and whether it does."""

    wanted: Callable[[Settings], bool]
    feature: Feature
    default: Default | None = None


TABLE: tuple[Row, ...] = (
    Row(
        lambda run: run.robust.norm_bound > 0,
        Feature(
            name="robust.norm_bound",
            remedy="set robust.norm_bound = 0",
            needs=frozenset({Trait.SINGLE}),
            breaks=frozenset({Trait.INDEPENDENT}),
        ),
        Default("robust", "norm_bound", 0.0, frozenset({"norm_bound", "beyond_norm"})),
    ),
    Row(
        lambda run: run.robust.beyond_weight == "refuse",
        Feature(
            name='robust.beyond_weight = "refuse"',
            remedy='set robust.beyond_weight = "clip"',
            needs=frozenset({Trait.SINGLE}),
            breaks=frozenset({Trait.INDEPENDENT}),
        ),
    ),
    Row(
        lambda run: run.robust.merge in {"median", "trimmed_mean"},
        Feature(
            name='robust.merge = "median" or "trimmed_mean"',
            remedy='set robust.merge = "mean"',
            needs=frozenset(
                {Trait.SINGLE, Trait.ONE_VERSION, Trait.WHOLE, Trait.ALIKE, Trait.OPEN_MERGE}
            ),
            breaks=frozenset({Trait.INDEPENDENT, Trait.MEAN_OF_CHANGES}),
        ),
    ),
    Row(
        lambda run: run.robust.merge == "krum",
        Feature(
            name='robust.merge = "krum"',
            remedy='set robust.merge = "mean"',
            needs=frozenset({Trait.SINGLE, Trait.ONE_VERSION, Trait.WHOLE, Trait.SHARED_PLANS}),
            breaks=frozenset({Trait.INDEPENDENT}),
        ),
    ),
    Row(
        lambda run: run.strategy.weighting == "samples",
        Feature(
            name='strategy.weighting = "samples"',
            remedy='set strategy.weighting = "uniform"',
            breaks=frozenset({Trait.ALIKE}),
        ),
    ),
    Row(
        lambda run: run.strategy.label_rule is True,
        Feature(
            name="strategy.label_rule = true",
            remedy="set strategy.label_rule = false",
            breaks=frozenset({Trait.LABELS_HIDDEN}),
        ),
    ),
    Row(
        lambda run: run.upload.encoding != "fp32",
        Feature(
            name="upload.encoding",
            remedy='set upload.encoding = "fp32"',
            needs=frozenset({Trait.SINGLE}),
        ),
    ),
    Row(
        lambda run: run.upload.encoding == "topk",
        Feature(
            name='upload.encoding = "topk"',
            remedy='set upload.encoding = "int8"',
            needs=frozenset({Trait.MEAN_OF_CHANGES, Trait.FIXED_PLANS}),
            breaks=frozenset({Trait.WHOLE}),
        ),
    ),
    Row(
        lambda run: run.download.encoding != "fp32",
        Feature(
            name="download.encoding",
            remedy='set download.encoding = "fp32"',
            needs=frozenset({Trait.MEAN_OF_CHANGES}),
        ),
    ),
    Row(
        lambda run: run.round.over_selection > 0,
        Feature(
            name="round.over_selection",
            remedy="remove round.over_selection",
            breaks=frozenset({Trait.COMPLETE, Trait.LATE_COUNTS}),
        ),
    ),
    Row(
        lambda run: run.round.buffer is not None,
        Feature(
            name="round.buffer",
            remedy="remove round.buffer",
            needs=frozenset({Trait.MEAN_OF_CHANGES, Trait.ASSIGNED_TIERS, Trait.LATE_COUNTS}),
            breaks=frozenset({Trait.ONE_VERSION, Trait.KNOWN_COUNT}),
        ),
    ),
    Row(
        lambda run: run.privacy is not None and run.privacy.where == "central",
        Feature(
            name='privacy.where = "central"',
            remedy="remove [privacy]",
            needs=frozenset(
                {
                    Trait.INDEPENDENT,
                    Trait.LABELS_HIDDEN,
                    Trait.KNOWN_COUNT,
                    Trait.ALIKE,
                    Trait.MEAN_OF_CHANGES,
                    Trait.ASSIGNED_TIERS,
                    Trait.NO_STATISTICS,
                }
            ),
        ),
    ),
    Row(
        lambda run: run.privacy is not None and run.privacy.where == "local",
        Feature(
            name='privacy.where = "local"',
            remedy="remove [privacy]",
            needs=frozenset({Trait.LABELS_HIDDEN, Trait.ASSIGNED_TIERS, Trait.NO_STATISTICS}),
            breaks=frozenset({Trait.SERVER_NOISE}),
        ),
    ),
    Row(
        lambda run: run.secure_sum is not None,
        Feature(
            name="[secure_sum]",
            remedy="remove [secure_sum]",
            needs=frozenset(
                {
                    Trait.LABELS_HIDDEN,
                    Trait.ALIKE,
                    Trait.ONE_VERSION,
                    Trait.COMPLETE,
                    Trait.WHOLE,
                    Trait.SERVER_NOISE,
                    Trait.MEAN_OF_CHANGES,
                    Trait.ASSIGNED_TIERS,
                    Trait.SHARED_PLANS,
                    Trait.NO_STATISTICS,
                }
            ),
            breaks=frozenset({Trait.SINGLE}),
        ),
    ),
)
"""The features that settings state, in the order in which conflicts are told."""

_OTHER = "take another strategy"
_STATIC = 'take heterofl with plan = "static"'
_STATISTICS = 'set evaluation.statistics = "server-batch", or take a norm without statistics'
_NOT_JUDGED = (
    "remove evaluation.data (in a simulation give [[own_models.models]] their labels), and look at"
    " the accuracy that the devices report (shoal rounds)"
)


def features_of(run: Settings) -> tuple[Feature, ...]:
    """Return the features that a configuration states."""
    return tuple(row.feature for row in TABLE if row.wanted(run))


def keeps(run: Settings, trait: Trait) -> bool:
    """Return whether a trait holds of a run, as far as its settings decide it."""
    return not any(trait in feature.breaks for feature in features_of(run))


def conflict(features: Iterable[Feature]) -> str:
    """Return why features do not go together, with both names and what to do; empty if they do."""
    features = tuple(features)
    for needing in features:
        for breaking in features:
            broken = needing.needs & breaking.breaks
            if broken:
                # The first in the order of the traits, so that a message is the same in every run.
                trait = next(trait for trait in Trait if trait in broken)
                return (
                    f"{needing.name} and {breaking.name} do not go together: {needing.name} needs"
                    f" that {trait.value}; {needing.remedy}, or {breaking.remedy}"
                )
    return ""


def require_together(features: Iterable[Feature]) -> None:
    """Check that no feature of a run breaks what another one needs.

    Raises:
        PlanError: one does.
    """
    problem = conflict(features)
    if problem:
        raise PlanError(problem)


def yielding_defaults(run: Settings) -> dict[str, Any]:
    """Return the tables of a configuration whose defaults conflict, with these switched off."""
    tables = {}
    for row in TABLE:
        default = row.default
        if default is None or not row.wanted(run):
            continue
        table = getattr(run, default.table)
        if default.asked_by & table.model_fields_set:
            continue
        # A feature never conflicts with itself, so it may stay in the list.
        if any(conflict((row.feature, feature)) for feature in features_of(run)):
            tables[default.table] = table.model_copy(update={default.key: default.off})
    return tables


def method_settings(run: Settings) -> StrategySettings[Any]:
    """Return what a run asks of its method; the method's own defaults give way to other features."""
    robust = run.robust
    average: Average = "mean" if robust.merge == "krum" else robust.merge
    settings: StrategySettings[Any] = run.strategy.settings
    settings = replace(settings, average=average, faulty=robust.faulty)
    if any(Trait.LABELS_HIDDEN in feature.needs for feature in features_of(run)):
        # Where devices are hidden, labels and numbers of samples count for nothing unless somebody
        # says so.
        weighting = settings.weighting or "uniform"
        settings = replace(settings, label_rule=False, weighting=weighting)
    return settings


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
    return [*_broken_by(method, replaced=replaced), *_needed_of(method, replaced=replaced)]


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
