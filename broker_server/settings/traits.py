"""What may hold of a run, and what a feature of a run needs of it or breaks."""

from dataclasses import dataclass
from enum import Enum


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
