"""Entries of a file of worked examples, and the comparison of what they expect with what the
product computes.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fleet_protocol.errors import DataError

__all__ = ["TOLERANCE", "Check", "Entry", "MismatchError", "NotApplicableError", "read_entries"]

TOLERANCE = 1e-6
_SHORT = 120  # characters of a value in a message


class NotApplicableError(Exception):
    """The product has nothing that answers an entry; the message says why."""


class MismatchError(Exception):
    """The product computes something else than an entry expects.

    Attributes:
        label: what was compared.
        expected: what the entry says.
        got: what the product computed.
    """

    def __init__(self, label: str, expected: Any, got: Any) -> None:
        super().__init__(label)
        self.label = label
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return f"expected {_short(self.expected)} got {_short(self.got)} ({self.label})"


@dataclass(frozen=True)
class Entry:
    """One worked example.

    Attributes:
        id: as in the file.
        inputs: what it starts from.
        expected: what must come out.
        others: the file's entries by the prefix of their id, for entries that refer to another's
            inputs.
    """

    id: str
    inputs: Any
    expected: Any
    others: "Mapping[str, Entry]"

    @property
    def prefix(self) -> str:
        """The part of the id that says what is computed: ``H1`` of ``H1-sizes``."""
        return self.id.split("-", 1)[0]


def read_entries(path: Path) -> list[Entry]:
    """Read a file of worked examples.

    Args:
        path: JSON, an object with the list ``vectors``.

    Returns:
        Its entries, in order.

    Raises:
        DataError: the file is missing, is not JSON, or has another form.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {error}; give a JSON file of worked examples"
        ) from error
    items = document.get("vectors") if isinstance(document, dict) else None
    if not isinstance(items, list):
        raise DataError(
            f"{path} is not a file of worked examples: it must be an object with the list 'vectors'"
        )
    others: dict[str, Entry] = {}
    entries: list[Entry] = []
    for number, item in enumerate(items):
        if not isinstance(item, dict) or not isinstance(item.get("id"), str) or not item["id"]:
            raise DataError(f"{path}: entry {number} has no id")
        entry = Entry(
            item["id"], item.get("inputs"), item.get("expected"), MappingProxyType(others)
        )
        others.setdefault(entry.prefix, entry)
        entries.append(entry)
    return entries


@dataclass
class Check:
    """Compares, and remembers that it did.

    Attributes:
        compared: numbers and texts compared so far; an entry in which nothing was compared has not
            passed.
        notes: what a reader of the result should know.
    """

    compared: int = 0
    notes: list[str] = field(default_factory=list)

    def same(
        self,
        label: str,
        got: Any,
        expected: Any,
        *,
        absolute: float = TOLERANCE,
        relative: float = 1e-9,
    ) -> None:
        """Compare two values at every depth.

        Whole numbers must be equal. Others may differ by `absolute`, or by `relative` times the
        expected one, which only counts for large numbers; what went through float32 needs more of
        it.

        Args:
            label: what is compared, for the message.
            got: what the product computed; arrays are compared as lists.
            expected: what the entry says.
            absolute: see above.
            relative: see above.

        Raises:
            MismatchError: they differ; its values are the innermost ones that do.
        """
        if isinstance(got, (np.ndarray, np.generic)):
            got = got.tolist()
        if isinstance(expected, dict):
            if not isinstance(got, Mapping) or set(map(str, got)) != set(expected):
                raise MismatchError(label, expected, got)
            by_text = {str(key): value for key, value in got.items()}
            for key, value in expected.items():
                self.same(
                    f"{label}.{key}", by_text[key], value, absolute=absolute, relative=relative
                )
        elif isinstance(expected, list):
            if (
                not isinstance(got, Iterable)
                or isinstance(got, (str, Mapping))
                or len(list(got)) != len(expected)
            ):
                raise MismatchError(label, expected, got)
            for position, (one, other) in enumerate(zip(got, expected, strict=True)):
                self.same(f"{label}[{position}]", one, other, absolute=absolute, relative=relative)
        elif not _equal(got, expected, absolute, relative):
            raise MismatchError(label, expected, got)
        else:
            self.compared += 1

    def note(self, text: str) -> None:
        """Remember something for the reader of the result."""
        if text not in self.notes:
            self.notes.append(text)


def _equal(got: Any, expected: Any, absolute: float, relative: float) -> bool:
    if not _number(expected) or not _number(got):
        return type(got) is type(expected) and bool(got == expected)
    if isinstance(expected, int) and isinstance(got, int):
        return got == expected
    return math.isclose(got, expected, abs_tol=absolute, rel_tol=relative)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}…"
