"""Collects the labels of one column of a table: numbers, or names."""

import math
from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.facts import label_place, plain_name
from fleet_protocol.errors import DataError

_SHOWN_CHARACTERS = 40  # of a field in a message
# What programs write for a missing value, in lower case. Words such as none are often labels.
_MISSING = frozenset({"nan", "na", "n/a", "<na>", "#n/a", "null"})


@dataclass
class LabelColumn:
    """The labels of one column, line by line.

    Attributes:
        listed: names in the order of the labels, if `labels` lists them; the column may have these
            names, or the numbers 0, 1, ... of them.
        numbers: labels read so far: numbers, or places among `names`.
        names: names read so far, with their places; None if the column has numbers.
    """

    listed: tuple[str, ...] | None
    numbers: "array[float]" = field(default_factory=lambda: array("d"))
    names: dict[str, int] | None = None

    def add(self, text: str, where: str) -> None:
        """Add the label of a line.

        Raises:
            DataError: the label is missing, or is a number among names or a name among numbers; the
                message names the line.
        """
        name = plain_name(text)
        if not self.numbers:  # the first label decides for the whole column
            self.names = None if self._are_numbers(name) else self._listed_places()
        if not name:
            raise DataError(f"{where} has no label; leave the line out")
        if self.names is None:
            self._add_number(name, where)
        else:
            self._add_name(self.names, name, where)

    def _add_number(self, text: str, where: str) -> None:
        number = parse_label_number(text, where)
        if self.listed is not None:
            number = label_place(number, self.listed, where)
        self.numbers.append(number)

    def _add_name(
        self,
        names: dict[str, int],
        name: str,
        where: str,
    ) -> None:
        if name.lower() in _MISSING and name not in names:
            raise DataError(
                f"{where} has the label {name!r}, which means a missing value: leave the line"
                " out, or list all labels in [data]: labels = [...]"
            )
        if self.listed is None and is_number(name):
            raise DataError(
                f"{where} has the label {name!r}, a number, but earlier lines have names such as "
                f"{next(iter(names))!r}; list all labels in [data]: labels = [...]"
            )
        if self.listed is not None and name not in names:
            raise DataError(
                f"{where} has the label {name!r}, which `labels` in [data] does not list"
            )
        # A new name gets the next place.
        self.numbers.append(names.setdefault(name, len(names)))

    def _are_numbers(self, first: str) -> bool:
        """Return whether the column has numbers, judged by its first label.

        If listed names are numbers, the labels are these names.
        """
        # Listed numbers are names: `labels = ["3", "1"]` renumbers them.
        return is_number(first) and not any(map(is_number, self.listed or ()))

    def _listed_places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.listed or ())}

    def finish(self) -> tuple[NDArray[np.float64], tuple[str, ...]]:
        """Return the labels ``[N]``, and their names in order.

        Names that are not listed are sorted; numbers that are not listed have no names.
        """
        numbers = np.frombuffer(self.numbers, np.float64)
        if self.listed is not None:
            return numbers, self.listed
        if self.names is None:
            return numbers, ()
        # Sorted, so that boards with the same labels number them in the same way.
        ordered = tuple(sorted(self.names))
        rank = {name: place for place, name in enumerate(ordered)}
        new_places = np.array([rank[name] for name in self.names], np.float64)
        return new_places[numbers.astype(np.int64)], ordered


def parse_label_number(text: str, where: str) -> float:
    """Return the number of a label.

    Raises:
        DataError: the label is a text, or missing; the message names the line.
    """
    try:
        number = parse_number(text)
    except ValueError:
        raise DataError(
            f"{where} has the label {text.strip()[:_SHOWN_CHARACTERS]!r}, expected numbers; if "
            "labels are names, all must be texts, or listed in [data]: labels = [...]"
        ) from None
    if math.isnan(number):
        raise DataError(f"{where} has no label; leave the line out")
    return number


def is_number(text: str) -> bool:
    """Return whether a text is a number other than NaN."""
    try:
        return not math.isnan(parse_number(text))
    except ValueError:
        return False


def parse_number(text: str) -> float:
    """Return the number that a field of a table has.

    Raises:
        ValueError: the text is not a number.
    """
    # Python reads 4_3.5 as 43.5, which no program means that writes tables.
    if "_" in text:
        raise ValueError(f"{text} is not a number")
    return float(text)
