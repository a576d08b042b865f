"""The features that a configuration may state, with the traits that each needs and breaks.

A new feature of settings is one more row of `TABLE`; nothing else has to know of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from broker_server.settings.privacy import PrivacyConfig, SecureSumConfig
from broker_server.settings.robust import RobustConfig
from broker_server.settings.rounds import DownloadConfig, RoundKeys, UploadConfig
from broker_server.strategies.traits import Feature, Trait


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
    # The bound is a multiple of the median norm of a tier's updates: single updates must be
    # visible, and what one counts depends on the others of its round.
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
    # An order of values has no weights, and is one of values that started from the same ones.
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
    # Distances between updates exist where these have the same entries, all of them.
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
    # The server decodes an update before it adds it up.
    Row(
        lambda run: run.upload.encoding != "fp32",
        Feature(
            name="upload.encoding",
            remedy='set upload.encoding = "fp32"',
            needs=frozenset({Trait.SINGLE}),
        ),
    ),
    # What an update leaves out is added to the device's next one, of the same units.
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
    # A round closes when it has the updates that it wants, and drops those that come later.
    Row(
        lambda run: run.round.over_selection > 0,
        Feature(
            name="round.over_selection",
            remedy="remove round.over_selection",
            breaks=frozenset({Trait.COMPLETE, Trait.LATE_COUNTS}),
        ),
    ),
    # A merge takes what has arrived, of devices that began with different versions.
    Row(
        lambda run: run.round.buffer is not None,
        Feature(
            name="round.buffer",
            remedy="remove round.buffer",
            needs=frozenset({Trait.MEAN_OF_CHANGES, Trait.ASSIGNED_TIERS, Trait.LATE_COUNTS}),
            breaks=frozenset({Trait.ONE_VERSION, Trait.KNOWN_COUNT}),
        ),
    ),
    # The noise covers what one device can change of the sum. That is bounded only if no device
    # changes how others count, and if its labels and its choice of a tier reveal nothing.
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
"""The features that settings state, in the order in which conflicts are reported."""
