"""Finds the meaning of the columns of a table: targets, inputs, or neither."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fleet_protocol.data.facts import plain_name
from fleet_protocol.data.sources import CsvData
from fleet_protocol.data.table_labels import is_number
from fleet_protocol.errors import DataError
from fleet_protocol.spelling import did_you_mean

# Texts that programs write for a missing value, in lower case.
_MISSING = frozenset(
    {"", "nan", "na", "n/a", "<na>", "#n/a", "null", "none", "nil", "?", "-", "missing"}
)
_DELIMITERS = (";", "\t", "|", ",")  # that programs write between fields
_SHOWN = 12  # names in a message

Row = tuple[int, list[str]]
"""Number and fields of a line."""


@dataclass(frozen=True)
class TableLayout:
    """The meaning of the fields of a line.

    Attributes:
        path: path of the table.
        names: names of all columns, empty for a column without a name; None without a header.
        width: number of fields in a line.
        targets: positions of the targets.
        inputs: positions of the inputs.
    """

    path: Path
    names: tuple[str, ...] | None
    width: int
    targets: tuple[int, ...]
    inputs: tuple[int, ...]

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs; empty without a header."""
        if self.names is None:
            return ()
        return tuple(self.names[place] for place in self.inputs)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of columns that are neither target nor input."""
        used = {*self.targets, *self.inputs}
        names = enumerate(self.names or ())
        return tuple(name for place, name in names if place not in used)

    def title(self, place: int) -> str:
        """Return the name of a column for messages."""
        if self.names is None:
            return f"column {place}"
        if not self.names[place]:
            return f"column {place}, which has no name,"
        return f"column {self.names[place]!r}"


def read_layout(
    config: CsvData, rows: Iterator[Row], *, labelled: bool
) -> tuple[TableLayout, Iterator[Row]]:
    """Return the layout of the columns, and the lines of data.

    Raises:
        DataError: a column is missing, ambiguous, or both target and input; or the header is a
            sample.
    """
    first = next(rows, None)
    if first is None:
        raise DataError(f"{config.path} is empty: it contains no data lines")
    _, fields = first
    if not config.header:
        layout = _make_layout(
            config,
            None,
            len(fields),
            labelled=labelled,
        )
        # The line was read to look at it, and is a sample.
        return layout, chain([first], rows)
    names = tuple(map(plain_name, fields))
    # The second line shows whether the first one is a header.
    second = next(rows, None)
    _check_header(config, names, None if second is None else second[1])
    layout = _make_layout(
        config,
        names,
        len(names),
        labelled=labelled,
    )
    return layout, rows if second is None else chain([second], rows)


def is_missing(text: str) -> bool:
    """Return whether a field stands for a missing value."""
    return text.strip().lower() in _MISSING


def _make_layout(
    config: CsvData, names: tuple[str, ...] | None, width: int, *, labelled: bool
) -> TableLayout:
    targets = _target_places(
        config,
        names,
        width,
        labelled=labelled,
    )
    columns = config.columns or tuple(place for place in range(width) if place not in targets)
    inputs = tuple(
        _find_place(
            config,
            column,
            names,
            width,
        )
        for column in columns
    )
    for place in inputs:
        if place in targets:
            raise DataError(
                f"{config.path}: column {names[place] if names else place} is a label and is "
                "listed in `columns`, so a model would read the answer; remove it from `columns`"
            )
    for place, count in Counter(inputs).items():
        if count > 1:
            raise DataError(
                f"{config.path}: `columns` in [data] lists column "
                f"{names[place] if names else place} {count} times; list it once"
            )
    # Unused columns may share a name.
    if names is not None:
        _check_repeated(config, [names[place] for place in {*targets, *inputs}])
    return TableLayout(
        config.path,
        names,
        width,
        targets,
        inputs,
    )


def _target_places(
    config: CsvData, names: tuple[str, ...] | None, width: int, *, labelled: bool
) -> tuple[int, ...]:
    """Return the positions of the targets; without `labelled` they may be absent."""
    columns = config.label_columns or (config.label_column,)
    if not labelled:
        # A table for predictions may have no labels.
        # Columns may be named or numbered.
        existing = (*(names or ()), *range(width))
        columns = tuple(column for column in columns if column in existing)
    return tuple(
        _find_place(
            config,
            column,
            names,
            width,
        )
        for column in columns
    )


def _check_repeated(config: CsvData, names: Sequence[str]) -> None:
    """Check that no two columns in use have the same name."""
    for name, count in Counter(names).items():
        if name and count > 1:
            raise DataError(
                f"{config.path} has {count} columns with the name {name!r}: rename or remove all "
                "but one, or list the columns to use as `columns` in [data]"
            )


def _find_place(
    config: CsvData,
    column: str | int,
    names: Sequence[str] | None,
    width: int,
) -> int:
    """Return the position of a column that the configuration names or numbers."""
    if isinstance(column, int):
        if not -width <= column < width:
            raise DataError(f"{config.path} has {width} columns, so column {column} does not exist")
        # Negative numbers count from the last column.
        return column % width
    name = plain_name(column)
    if names is None or name not in names:
        existing = ", ".join(names[:_SHOWN]) if names else "no header"
        remedy = "check `label_column`, `columns`, `delimiter`, `header`"
        delimiter = _other_delimiter(names or ())
        if delimiter is not None:
            remedy = f"set delimiter = {json.dumps(delimiter)} in [data]"
        guess = did_you_mean(str(name), names or ())
        raise DataError(
            f"{config.path} has no column {column!r}{guess} (it has {existing}); {remedy}"
        )
    return list(names).index(name)


def _other_delimiter(names: Sequence[str]) -> str | None:
    """Return what seems to separate the names of a header that was read as a single name."""
    if len(names) != 1:
        return None
    for delimiter in _DELIMITERS:
        if delimiter in names[0]:
            return delimiter
    return None


def _check_header(
    config: CsvData,
    names: tuple[str, ...],
    second: Sequence[str] | None,
) -> None:
    """Check that the first line is a header and not a sample, which would be lost.

    The line is a header if it has the name of a configured column, if it has no number, if its
    numbers count the columns (0, 1, 2, ... as pandas writes them), or if the next line has a number
    below one of its texts.

    Raises:
        DataError: it looks like a sample.
    """
    if _has_configured_name(config, names):
        return
    numbers = [name for name in names if is_number(name)]
    # As pandas writes a table whose columns have no names.
    if numbers == [str(place) for place in range(len(numbers))]:
        return
    # A next line of another length says nothing about the columns.
    following = second if second is not None and len(second) == len(names) else names
    has_text = False
    for name, field_below in zip(names, following, strict=True):
        if is_number(name) or is_missing(name):
            continue
        has_text = True
        if is_number(field_below):
            return
    raise DataError(
        f"the first line of {config.path} contains {'a sample' if has_text else 'numbers only'} "
        f"({', '.join(names[:4])}, ...), which would be lost as a header: set header = false in "
        "[data]; if it is a header, set label_column to the label's name in it"
    )


def _has_configured_name(config: CsvData, names: tuple[str, ...]) -> bool:
    labels = config.label_columns or (config.label_column,)
    configured = {*labels, *(config.columns or ())}
    configured_names = {plain_name(column) for column in configured if isinstance(column, str)}
    return not configured_names.isdisjoint(names)
