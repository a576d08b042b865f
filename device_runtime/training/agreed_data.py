"""A board's samples as its files hold them, and the same as the fleet's contract wants them.

Only this module makes the second of the first, at an offer and after every reading of files that
have changed, so that no task computes with labels and columns that the board has numbered for
itself.
"""

from dataclasses import dataclass, replace

from fleet_protocol.data import DataSet
from fleet_protocol.data.contract import reconcile
from fleet_protocol.data.stamps import Stamps
from fleet_protocol.data.terms import DataContract
from fleet_protocol.messages import Instructions


@dataclass(frozen=True)
class Terms:
    """What a task asks of the samples.

    Attributes:
        contract: of the fleet; None where it has none.
        own_labels: whether the board may number its labels in an order of its own, as a part of the
            model stays on it.
    """

    contract: DataContract | None
    own_labels: bool

    def apply(self, raw: DataSet) -> "AgreedData":
        """Return the samples with labels and columns as the task wants them.

        Args:
            raw: as a reader gives them.

        Raises:
            MismatchError: they do not fit; the message names the label or the column, and says what
                to change.
            DataError: a file that holds them cannot be read any more.
        """
        return AgreedData(raw, reconcile(raw, self.contract, own_labels=self.own_labels), self)


def terms_of(instructions: Instructions) -> Terms:
    """Return what a task asks of the samples.

    Where a part of the model stays on the board, what a label means may be the board's own
    business.
    """
    contract = instructions.contract
    own_labels = bool(instructions.stays)
    if own_labels and contract is not None:
        contract = contract.model_copy(update={"labels": ()})
    return Terms(contract, own_labels)


@dataclass(frozen=True)
class AgreedData:
    """Samples in both forms; `Terms.apply` makes it.

    Attributes:
        raw: as the reader gave them. The board keeps these, since another contract may want further
            columns of them.
        samples: the same as the terms want them, for everything that computes; `raw` itself where
            nothing differs.
        terms: what the task asks.
    """

    raw: DataSet
    samples: DataSet
    terms: Terms

    def stamped(self, stamps: Stamps) -> "AgreedData":
        """Return the same samples, of files whose state was read once more."""
        raw = replace(self.raw, stamps=stamps)
        samples = raw if self.samples is self.raw else replace(self.samples, stamps=stamps)
        return AgreedData(raw, samples, self.terms)
