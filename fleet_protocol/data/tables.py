"""Reads tables with one sample per line: columns by name, labels as numbers or names, a rule for
missing values.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.facts import SourceFacts, label_place, plain_name
from fleet_protocol.data.files import need, table_rows
from fleet_protocol.data.sources import CsvData
from fleet_protocol.errors import DataError

# Texts that programs write for a missing value, in lower case.
_MISSING = frozenset(
    {"", "nan", "na", "n/a", "<na>", "#n/a", "null", "none", "nil", "?", "-", "missing"}
)
_SHOWN = 12  # names in a message

_Row = tuple[int, list[str]]


@dataclass(frozen=True)
class _Layout:
    """The meaning of the fields of a line.

    Attributes:
        path: path of the table.
        names: names of all columns, empty for a column without a name; None without a header.
        width: number of fields in a line.
        targets: positions of the targets.
        used: positions of the inputs.
    """

    path: object
    names: tuple[str, ...] | None
    width: int
    targets: tuple[int, ...]
    used: tuple[int, ...]

    @property
    def used_names(self) -> tuple[str, ...]:
        """Names of what a model reads; empty without a header."""
        return () if self.names is None else tuple(self.names[place] for place in self.used)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of what is neither learnt nor read."""
        taken = {*self.targets, *self.used}
        return tuple(name for place, name in enumerate(self.names or ()) if place not in taken)

    def title(self, place: int) -> str:
        """Return the name of a column for messages."""
        if self.names is None:
            return f"column {place}"
        return (
            f"column {self.names[place]!r}"
            if self.names[place]
            else f"column {place}, which has no name,"
        )


@dataclass
class _Labels:
    """Collects the labels of one column line by line: numbers or names.

    Attributes:
        said: their names, where somebody named them in the order of the labels; the column may have
            these names, or the numbers 0, 1, ... of them.
        numbers: what was read: numbers, or places among `names`.
        names: those met so far, with their places; None for numbers.
    """

    said: tuple[str, ...] | None
    numbers: "array[float]" = field(default_factory=lambda: array("d"))
    names: dict[str, int] | None = None

    def add(self, text: str, where: str) -> None:
        """Add the label of a line; a DataError names the line."""
        name = plain_name(text)
        if not self.numbers:
            self.names = None if self._are_numbers(name) else self._said_places()
        if not name:
            raise DataError(f"{where} has no label; leave the line out")
        if self.names is None:
            number = _label_number(name, where)
            self.numbers.append(
                number if self.said is None else label_place(number, self.said, where)
            )
            return
        if self.said is None and _is_number(name):
            raise DataError(
                f"{where} has the label {name!r}, a number, but earlier lines have names such as "
                f"{next(iter(self.names))!r}; list all labels in [data]: labels = [...]"
            )
        if self.said is not None and name not in self.names:
            raise DataError(
                f"{where} has the label {name!r}, which `labels` in [data] does not list"
            )
        self.numbers.append(self.names.setdefault(name, len(self.names)))

    def _are_numbers(self, first: str) -> bool:
        """Whether the column has numbers, by its first label.

        Names that are numbers themselves are names.
        """
        return _is_number(first) and not any(map(_is_number, self.said or ()))

    def _said_places(self) -> dict[str, int]:
        return {label: place for place, label in enumerate(self.said or ())}

    def finished(self) -> tuple[NDArray[np.float64], tuple[str, ...]]:
        """The numbers of the labels ``[N]``, and their names in order.

        None where nobody has named numbers.
        """
        numbers = np.frombuffer(self.numbers, np.float64)
        if self.said is not None:
            return numbers, self.said
        if self.names is None:
            return numbers, ()
        ordered = tuple(sorted(self.names))
        rank = {name: place for place, name in enumerate(ordered)}
        new_places = np.array([rank[name] for name in self.names], np.float64)
        return new_places[numbers.astype(np.int64)], ordered


def read_csv(
    config: CsvData, *, labelled: bool = True
) -> tuple[NDArray[np.float32], NDArray[np.float64], SourceFacts]:
    """Read a table; without `labelled`, label columns are skipped and may be missing.

    Returns:
        float32 samples ``[N, columns]``; labels ``[N]``, or ``[N, columns]`` for several label
        columns, all 0 without `labelled`; and the facts.

    Raises:
        DataError: a column is missing, ambiguous, or both target and input; a field is not a
            number; a value is missing without a rule; or the header is a sample.
    """
    need(config.path)
    rows = table_rows(config.path, config.delimiter)
    layout, lines = _begin(config, rows, labelled=labelled)
    values = array("f")
    line_numbers = array("q")
    several = array("d")
    said = None if config.labels is None else tuple(map(plain_name, config.labels))
    labels = _Labels(said)
    for line, row in lines:
        if len(row) != layout.width:
            raise DataError(
                f"line {line} of {config.path} has {len(row)} fields instead of {layout.width}"
            )
        values.extend(_numbers(layout, line, row))
        line_numbers.append(line)
        if labelled and config.label_columns is None:
            labels.add(row[layout.targets[0]], f"line {line} of {config.path}")
        else:
            where = f"line {line} of {config.path}"
            several.extend(_label_number(row[place], where) for place in layout.targets if labelled)
    if not values:
        raise DataError(f"{config.path} is empty: it holds no line of data")
    x = np.frombuffer(values, np.float32).reshape(-1, len(layout.used))
    x, filled = _filled(config, layout, x, line_numbers)
    facts = SourceFacts(columns=layout.used_names, columns_left_out=layout.left_out, filled=filled)
    if not labelled:
        return x, np.zeros(len(x)), facts
    if config.label_columns is not None:
        y = np.frombuffer(several, np.float64).reshape(len(x), -1)
        return x, y, facts
    y, label_names = labels.finished()
    return (
        x,
        y,
        replace(
            facts,
            labels=label_names,
            labels_said=said is not None,
            labels_nameable=not label_names,
        ),
    )


def _begin(
    config: CsvData, rows: Iterator[_Row], *, labelled: bool
) -> tuple[_Layout, Iterator[_Row]]:
    """Return the layout of the columns, and the lines of data."""
    first = next(rows, None)
    if first is None:
        raise DataError(f"{config.path} is empty: it holds no line of data")
    if not config.header:
        return _layout(config, None, len(first[1]), labelled=labelled), chain([first], rows)
    names = tuple(map(plain_name, first[1]))
    second = next(rows, None)
    _check_header(config, names, None if second is None else second[1])
    layout = _layout(config, names, len(names), labelled=labelled)
    return layout, rows if second is None else chain([second], rows)


def _layout(
    config: CsvData, names: tuple[str, ...] | None, width: int, *, labelled: bool
) -> _Layout:
    wanted = config.label_columns or (config.label_column,)
    if not labelled:
        wanted = tuple(column for column in wanted if column in (*(names or ()), *range(width)))
    targets = tuple(_place(config, column, names, width) for column in wanted)
    chosen = config.columns or tuple(place for place in range(width) if place not in targets)
    used = tuple(_place(config, column, names, width) for column in chosen)
    layout = _Layout(config.path, names, width, targets, used)
    both = next((place for place in used if place in targets), None)
    if both is not None:
        raise DataError(
            f"{config.path}: {_bare(layout, both)} is a label and is listed in `columns`, so"
            " a model would read the answer; remove it from `columns`"
        )
    counts = Counter(names[place] for place in {*targets, *used}) if names is not None else {}
    twice = next((name for name, count in counts.items() if name and count > 1), None)
    if twice is not None:
        raise DataError(
            f"{config.path} has {counts[twice]} columns with the name {twice!r}: rename or remove all but one, "
            "or list the columns to use as `columns` in [data]"
        )
    return layout


def _bare(layout: _Layout, place: int) -> str:
    return f"column {layout.names[place] if layout.names else place}"


def _place(config: CsvData, column: str | int, names: Sequence[str] | None, width: int) -> int:
    if isinstance(column, int):
        if not -width <= column < width:
            raise DataError(f"{config.path} has {width} columns, so column {column} does not exist")
        return column % width
    name = plain_name(column)
    if names is None or name not in names:
        shown = ", ".join(names[:_SHOWN]) if names else "no header"
        raise DataError(
            f"{config.path} has no column {column!r} (it has {shown}); check `label_column`, `columns`, `delimiter`, "
            "`header`"
        )
    return list(names).index(name)


def _check_header(config: CsvData, names: tuple[str, ...], second: Sequence[str] | None) -> None:
    """Check that the first line is a header and not a sample, which would be lost.

    The line is a header if it has the name of a configured column, if it has no number, if its
    numbers count the columns (0, 1, 2, ... as pandas writes them), or if the next line has a number
    below one of its texts.
    """
    configured = {
        *(config.label_columns or (config.label_column,)),
        *(config.columns or ()),
    }
    named = any(isinstance(column, str) and plain_name(column) in names for column in configured)
    numbers = [name for name in names if _is_number(name)]
    counted = numbers == [str(place) for place in range(len(numbers))]
    texts = [
        place for place, name in enumerate(names) if not _is_number(name) and not _is_missing(name)
    ]
    following = second if second is not None and len(second) == len(names) else names
    titled = any(_is_number(following[place]) for place in texts)
    if named or counted or titled:
        return
    raise DataError(
        f"the first line of {config.path} holds {'a sample' if texts else 'numbers only'} "
        f"({', '.join(names[:4])}, ...), which would be lost as a header: set header = false in [data]; "
        "if it is a header, set label_column to the label's name in it"
    )


def _numbers(layout: _Layout, line: int, row: Sequence[str]) -> list[float]:
    """Return a line's inputs for the model, with NaN for a missing value."""
    fields = [row[place] for place in layout.used]
    try:
        return [*map(float, fields)]
    except ValueError:
        return [_number(layout, line, place, row[place]) for place in layout.used]


def _number(layout: _Layout, line: int, place: int, text: str) -> float:
    if _is_missing(text):
        return math.nan
    try:
        return float(text)
    except ValueError:
        raise DataError(
            f"line {line} of {layout.path}: {layout.title(place)} holds {text.strip()[:40]!r}, expected numbers; leave "
            "the column out of `columns` in [data], or turn its words into numbers"
            + (
                "; if the line has the names of the columns, set header = true"
                if layout.names is None
                else ""
            )
        ) from None


def _filled(
    config: CsvData, layout: _Layout, x: NDArray[np.float32], lines: Sequence[int]
) -> tuple[NDArray[np.float32], float | None]:
    """Return samples whose missing values have the number of the rule, and that number if it was
    used.
    """
    missing = np.isnan(x)
    if not missing.any():
        return x, None
    if config.missing is None:
        row, column = np.argwhere(missing)[0]
        place = layout.used[int(column)]
        raise DataError(
            f"line {lines[int(row)]} of {config.path} has no value in {layout.title(place)} ({int(missing.sum())} such "
            "values): set `missing` in [data] to the number that replaces them, on every board and the server, "
            "or leave those lines out"
        )
    return np.where(missing, np.float32(config.missing), x), config.missing


def _label_number(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise DataError(
            f"{where} has the label {text.strip()[:40]!r}, expected numbers; if labels are names, all "
            "must be texts, or listed in [data]: labels = [...]"
        ) from None
    if math.isnan(number):
        raise DataError(f"{where} has no label; leave the line out")
    return number


def _is_missing(text: str) -> bool:
    return text.strip().lower() in _MISSING


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False
