"""A board's samples as its files hold them, and the same in the form of the fleet's contract.

Only this module converts them, at an offer and whenever changed files were read again, so that no
task uses the board's own numbering of labels and columns.
"""

from dataclasses import dataclass, replace

from fleet_protocol.data import DataSet
from fleet_protocol.data.contract import reconcile
from fleet_protocol.data.stamps import Stamps
from fleet_protocol.data.terms import DataContract
from fleet_protocol.messages import Instructions


@dataclass(frozen=True)
class SampleRequirements:
    """A task's requirements for the samples.

    Attributes:
        contract: contract of the fleet; None if it has none.
        own_labels: whether the board may number its labels in its own order, because a part of the
            model stays on it.
    """

    contract: DataContract | None
    own_labels: bool

    def apply(self, raw: DataSet) -> "AgreedData":
        """Return the samples with labels and columns as the task requires.

        Args:
            raw: the samples from the reader.

        Raises:
            MismatchError: they do not fit; the message names the label or the column, and says what
                to change.
            DataError: a file that holds them can no longer be read.
        """
        return AgreedData(raw, reconcile(raw, self.contract, own_labels=self.own_labels), self)


def terms_of(instructions: Instructions) -> SampleRequirements:
    """Return a task's requirements for the samples.

    If a part of the model stays on the board, the board may define what its labels mean.
    """
    contract = instructions.contract
    own_labels = bool(instructions.stays)
    if own_labels and contract is not None:
        contract = contract.model_copy(update={"labels": ()})
    return SampleRequirements(contract, own_labels)


@dataclass(frozen=True)
class AgreedData:
    """Samples in both forms; `SampleRequirements.apply` creates it.

    Attributes:
        raw: the samples from the reader. The board keeps them, because another contract may need
            further columns.
        samples: the same in the form of the terms, for all computation; `raw` itself if they are
            the same.
        terms: the task's requirements.
    """

    raw: DataSet
    samples: DataSet
    terms: SampleRequirements

    def stamped(self, stamps: Stamps) -> "AgreedData":
        """Return the same samples with a newer state of their files."""
        raw = replace(self.raw, stamps=stamps)
        samples = raw if self.samples is self.raw else replace(self.samples, stamps=stamps)
        return AgreedData(raw, samples, self.terms)
