"""Facts of a source about its samples besides their numbers: names, rules, and what it left out."""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SourceFacts:
    """Facts of a reader about the samples that it has read.

    Attributes:
        labels: names of the labels 0, 1, ...; empty if they are numbers.
        labels_said: whether a setting fixed this order, such as `labels` in ``[data]``; otherwise the
            reader sorted the names.
        columns: names of the columns of a table, in the order of the samples; empty if there are none. A column
            without a name has an empty string.
        columns_by_place: whether the user's function received the columns in this order, so that
            they can no longer be reordered.
        filled: the number that replaced missing values; None if no value was missing.
        left_out: how many files or folders were left out, by kind.
    """

    labels: tuple[str, ...] = ()
    labels_said: bool = False
    columns: tuple[str, ...] = ()
    columns_by_place: bool = False
    filled: float | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def left_out_text(self) -> str:
        """What was left out, for messages; empty if nothing was."""
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.left_out.items()))


NO_FACTS = SourceFacts()
"""Facts about plain arrays."""


def plain_name(text: str) -> str:
    """Normalize a name for comparison: no spaces around it, and letters with accents as one character.

    Some file systems store an accent as a separate character.
    """
    return unicodedata.normalize("NFC", text.strip())
