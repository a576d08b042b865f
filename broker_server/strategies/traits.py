"""The traits of a run, which its features need or break."""

from dataclasses import dataclass
from enum import Enum


class Trait(Enum):
    """Possible traits of a run; the values complete the sentence "this requires that ..."."""

    SINGLE = "the server sees each individual update"
    INDEPENDENT = "no update affects whether another update counts"
    LABELS_HIDDEN = "devices do not tell the server which labels they hold"
    WHOLE = "every update has a value for each entry of its sub-model"
    ONE_VERSION = "all updates of a round start from the same version of the model"
    COMPLETE = "the server waits for every device that it selected in a round"
    KNOWN_COUNT = (
        "before any device answers, the server knows the number by which it will divide a sum"
    )
    ALIKE = "every update has the same weight"
    MEAN_OF_CHANGES = "the server adds the mean of the devices' changes to each entry of the model"
    ASSIGNED_TIERS = "no device chooses its tier by its own losses"
    SHARED_PLANS = "all devices of a tier train the same units"
    FIXED_PLANS = "a tier keeps the same units in every round"
    LATE_COUNTS = "the server merges late updates"
    SERVER_NOISE = "the server adds the noise, because a sum needs less noise than single updates"
    NO_STATISTICS = "devices send no batch norm statistics"
    OPEN_MERGE = "another aggregation rule can replace the strategy's own"
    TIER_HEADS = "the strategy keeps a head for each tier"
    ALL_MERGED = "the server merges every parameter of the model"
    EVALUATIONS = "devices send the evaluations of their models"
    COMMON_ROUTINE = "the strategy does not replace the routine by which devices train"
    PIECES = "the strategy's routine trains on a batch in pieces"


@dataclass(frozen=True)
class Feature:
    """One feature of a run that touches updates.

    Attributes:
        name: name of the trait in a configuration.
        remedy: how to disable this feature, as a clause.
        needs: traits that the run must have for this feature to work as intended.
        breaks: traits that a run with this feature lacks.
    """

    name: str
    remedy: str
    needs: frozenset[Trait] = frozenset()
    breaks: frozenset[Trait] = frozenset()
