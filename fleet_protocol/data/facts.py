"""Facts about a source's samples besides their numbers: names, rules, and what it left out."""

import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleet_protocol.errors import DataError

_IMAGE_AXES = 3  # channels, height and width
_CHANNELS = (1, 3)  # of a reader of images: grey or colour


@dataclass(frozen=True)
class SourceFacts:
    """Facts of a reader about the samples that it has read.

    Attributes:
        labels: names of the labels 0, 1, ...; empty where they are numbers.
        labels_said: whether the user named them in this order, as `labels` in ``[data]`` does; else
            the reader has sorted the names in the data, or the fleet's contract has named them.
        labels_nameable: whether labels are numbers without names, and `labels` in ``[data]`` could
            name them, as in a table. For arrays it cannot.
        columns: names of the columns of a table, in the order of the samples; empty where there are
            none. A column without a name has an empty one.
        columns_left_out: names of further columns of the table, which `columns` in ``[data]``
            leaves out.
        columns_by_place: whether a function of the user's got the columns in this order, so that
            they can no longer change places.
        filled: the number that replaced missing values; None if no value was missing.
        left_out: how many files or folders were passed over, by kind.
    """

    labels: tuple[str, ...] = ()
    labels_said: bool = False
    labels_nameable: bool = False
    columns: tuple[str, ...] = ()
    columns_left_out: tuple[str, ...] = ()
    columns_by_place: bool = False
    filled: float | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def labels_digest(self) -> str | None:
        """SHA-256 of the labels in the user's order; None if the user set no order."""
        # An order that the reader chose is not a statement of the user.
        if not self.labels_said:
            return None
        return hashlib.sha256(json.dumps(self.labels).encode()).hexdigest()

    @property
    def left_out_text(self) -> str:
        """Description of everything that was left out, for messages; empty if nothing was."""
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.left_out.items()))


def shape_remedy(own: Sequence[int], wanted: Sequence[int]) -> str:
    """Return what gives samples another shape: the keys of ``[data]`` that can.

    Args:
        own: shape of a sample.
        wanted: shape that it should have.
    """
    transform = "change the samples with a function in `transforms` of [data]"
    # Reshaping is enough if no number is added or lost.
    if math.prod(own) == math.prod(wanted):
        return f"set shape = {[*wanted]} in [data], or move axes with a function in `transforms`"
    if len(own) == len(wanted) == 1:
        return _columns_remedy(own[0], wanted[0])
    if len(own) != _IMAGE_AXES or len(wanted) != _IMAGE_AXES:
        return transform
    keys = []
    if own[0] != wanted[0] and wanted[0] in _CHANNELS:
        keys.append(f"channels = {wanted[0]}")
    if [*own[1:]] != [*wanted[1:]]:
        keys.append(f"size = {[*wanted[1:]]}")
    if not keys:
        return transform
    return f"for a folder of images, set {' and '.join(keys)} in [data]; otherwise, {transform}"


def _columns_remedy(own: int, wanted: int) -> str:
    if own < wanted:
        remedy = f"for a table, add the missing columns, so that there are {wanted}"
    else:
        remedy = f"for a table, name the {wanted} to use as `columns` in [data]"
    return f"{remedy}; otherwise, change the samples with a function in `transforms`"


def label_place(
    number: float,
    labels: Sequence[str],
    where: str,
) -> int:
    """Return the label that a number in a file means if `labels` in ``[data]`` names the labels.

    Args:
        number: the label's number in the file.
        labels: names of the labels 0, 1, ...
        where: the place in the file, for messages.

    Raises:
        DataError: no name has this number.
    """
    # Also refuses fractions.
    if number not in range(len(labels)):
        raise DataError(
            f"{where} has the label {number:g}, and `labels` in [data] names the numbers 0 to "
            f"{len(labels) - 1}; name all labels there, the first for the number 0"
        )
    return int(number)


NO_FACTS = SourceFacts()
"""Facts about plain arrays."""


def plain_name(text: str) -> str:
    """Normalize a name for comparison, without spaces around it.

    A letter with an accent becomes one character, because some file systems store the accent as a
    separate one.
    """
    return unicodedata.normalize("NFC", text.strip())
