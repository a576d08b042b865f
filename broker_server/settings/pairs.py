"""Which settings do not go with which: a table that is held against a run when it is planned.

`docs/privacy.md` shows it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import PlanError

USED: Mapping[str, Callable[[FleetConfig], bool]] = MappingProxyType(
    {
        "norm bound": lambda run: run.robust.norm_bound > 0,
        "refused weights": lambda run: run.robust.beyond_weight == "refuse",
        "median or trimmed mean": lambda run: run.robust.merge in {"median", "trimmed_mean"},
        "krum": lambda run: run.robust.merge == "krum",
        "weights by samples": lambda run: run.strategy.weighting == "samples",
        "label rule": lambda run: run.strategy.label_rule is True,
        "encoding": lambda run: run.upload.encoding != "fp32",
        "largest entries": lambda run: run.upload.encoding == "topk",
        "over-selection": lambda run: run.round.over_selection > 0,
        "buffer": lambda run: run.round.buffer is not None,
        "central noise": lambda run: run.privacy is not None and run.privacy.where == "central",
        "local noise": lambda run: run.privacy is not None and run.privacy.where == "local",
        "secure sum": lambda run: run.secure_sum is not None,
    }
)
"""What the table of pairs is about, and how a configuration says that it is wanted."""


@dataclass(frozen=True)
class WrongPair:
    """Two that do not go together."""

    pair: tuple[str, str]  # their names in `USED`
    why: str  # what would be wrong
    remedy: str  # what to set instead


_MEAN = 'set robust.merge = "mean"'
_ALIKE = 'set strategy.weighting = "uniform"'
_ALL_ROWS = "set strategy.label_rule = false"
_ANY_SAMPLES = 'set robust.beyond_weight = "clip"'
_AVERAGE = "median or trimmed mean"
_OTHERS = "it compares entry by entry, and of most entries an update says nothing"
_ALL_ENTRIES = 'set upload.encoding = "int8"'
WRONG = (
    WrongPair(
        ("norm bound", "central noise"),
        "whether an update counts would depend on the others', beyond what the noise hides",
        "set robust.norm_bound = 0: privacy.clip bounds every update",
    ),
    WrongPair(
        ("refused weights", "central noise"),
        "whether an update counts would depend on the others' samples",
        _ANY_SAMPLES,
    ),
    WrongPair(
        (_AVERAGE, "central noise"),
        "the noise is made for a sum, of which clip bounds a part",
        _MEAN,
    ),
    WrongPair(
        ("krum", "central noise"),
        "who is left out would depend on the others' updates",
        _MEAN,
    ),
    WrongPair((_AVERAGE, "buffer"), "it compares updates of one version", _MEAN),
    WrongPair(("krum", "buffer"), "it compares updates of one version", _MEAN),
    WrongPair(("weights by samples", _AVERAGE), "it counts every device alike", _ALIKE),
    WrongPair(
        ("weights by samples", "central noise"),
        "weights are taken from the samples, which the noise does not hide",
        _ALIKE,
    ),
    WrongPair(
        ("label rule", "central noise"),
        "which rows move, and by whom they are divided, would tell labels",
        _ALL_ROWS,
    ),
    WrongPair(
        ("label rule", "local noise"),
        "devices do not tell their labels then",
        _ALL_ROWS,
    ),
    WrongPair(
        ("buffer", "central noise"),
        "by how many a sum is divided must be known before anyone answers",
        "remove round.buffer",
    ),
    WrongPair(
        ("norm bound", "secure sum"),
        "the server sees no update that it could measure",
        "set robust.norm_bound = 0: secure_sum.clip bounds every update",
    ),
    WrongPair(
        ("refused weights", "secure sum"),
        "what is in a sum cannot be refused",
        _ANY_SAMPLES,
    ),
    WrongPair(
        (_AVERAGE, "secure sum"),
        "the server sees no update that it could compare",
        _MEAN,
    ),
    WrongPair(("krum", "secure sum"), "the server sees no update that it could compare", _MEAN),
    WrongPair(
        ("weights by samples", "secure sum"),
        "every update counts alike in a sum",
        _ALIKE,
    ),
    WrongPair(("label rule", "secure sum"), "devices do not tell their labels then", _ALL_ROWS),
    WrongPair(
        ("encoding", "secure sum"),
        "what is masked cannot be made smaller",
        'set upload.encoding = "fp32"',
    ),
    WrongPair(
        ("largest entries", "secure sum"),
        "a sum takes whole updates",
        'set upload.encoding = "fp32"',
    ),
    WrongPair(("largest entries", _AVERAGE), _OTHERS, _ALL_ENTRIES),
    WrongPair(("largest entries", "krum"), _OTHERS, _ALL_ENTRIES),
    WrongPair(
        ("over-selection", "secure sum"),
        "a round ends when as many as are wanted have answered, and a sum needs most of its tier",
        "remove round.over_selection",
    ),
    WrongPair(
        ("buffer", "secure sum"),
        "it adds up updates of one version",
        "remove round.buffer",
    ),
    WrongPair(
        ("local noise", "secure sum"),
        "the server sees sums alone, and can hide a device with less noise",
        'set privacy.where = "central"',
    ),
)
"""Every pair of `USED` that is not here goes together."""


def require_pairs(config: FleetConfig) -> None:
    """See that a configuration has no pair of `WRONG`; a PlanError where it has one."""
    for wrong in WRONG:
        if all(USED[name](config) for name in wrong.pair):
            raise PlanError(
                f"{' and '.join(wrong.pair)} do not go together: {wrong.why}; {wrong.remedy}"
            )
