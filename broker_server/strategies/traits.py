"""What may hold of a run, and what a feature of a run needs of it or breaks."""

from dataclasses import dataclass
from enum import Enum


class Trait(Enum):
    """What may hold of a run; the values complete the sentence "this needs that ..."."""

    SINGLE = "the server sees each update by itself"
    INDEPENDENT = "no update decides whether another one counts"
    LABELS_HIDDEN = "devices do not tell the server which labels they hold"
    WHOLE = "every update has a value for each entry of its sub-model"
    ONE_VERSION = "all updates of a round start from the same version of the model"
    COMPLETE = "the server waits for every device that it asked in a round"
    KNOWN_COUNT = "the server knows how many updates it divides a sum by before a device answers"
    ALIKE = "every update has the same weight"
    MEAN_OF_CHANGES = "the server adds the mean of the devices' changes to each entry of the model"
    ASSIGNED_TIERS = "no device chooses its tier by its own losses"
    SHARED_PLANS = "all devices of a tier train the same units"
    FIXED_PLANS = "a tier keeps the same units in every round"
    LATE_COUNTS = "the server merges updates that come late"
    SERVER_NOISE = "the server adds the noise, of which a sum needs less than each update does"
    NO_STATISTICS = "devices send no batch norm statistics"
    OPEN_MERGE = "another merge can replace the strategy's own"
    TIER_HEADS = "the strategy keeps a head for each tier"
    ALL_MERGED = "the server merges every parameter of the model"
    PIECES = "the strategy's routine trains on a batch in pieces"


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
