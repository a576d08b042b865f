"""Reads tables with one sample per line: columns by name, and a rule for missing values."""

import contextlib
import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.facts import SourceFacts, plain_name
from fleet_protocol.data.files import need, table_rows
from fleet_protocol.data.sources import CsvData
from fleet_protocol.data.table_labels import LabelColumn, parse_label_number, parse_number
from fleet_protocol.data.table_layout import TableLayout, is_missing, read_layout
from fleet_protocol.errors import DataError

_SHOWN_CHARACTERS = 40  # of a field in a message
_FIRST_LINES = 2  # the header and the first sample
_NUMBER_LIKE = re.compile(r"[-+€$£]?\s?\d[\d_.,' \u00a0]*\s?[%€$£°]?")


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
    rows = table_rows(config.path, config.bounds, config.delimiter)
    layout, lines = read_layout(config, rows, labelled=labelled)
    inputs = _Inputs(config)
    target_numbers = array("d")
    listed = None if config.labels is None else tuple(map(plain_name, config.labels))
    labels = LabelColumn(listed)
    for line, row in lines:
        where = f"line {line} of {config.path}"
        if len(row) != layout.width:
            raise DataError(
                f"{where} has {len(row)} fields instead of {layout.width}; correct the line, and"
                " quote values that contain the delimiter"
            )
        inputs.add(line, _read_inputs(layout, line, row))
        if not labelled:
            continue
        if config.label_columns is None:
            # One column may hold names.
            labels.add(row[layout.targets[0]], where)
            continue
        # Several columns are numbers.
        for place in layout.targets:
            target_numbers.append(parse_label_number(row[place], where))
    if not inputs.values:
        raise DataError(f"{config.path} is empty: it contains no data lines")
    # The buffer is used without a copy.
    x = np.frombuffer(inputs.values, np.float32).reshape(-1, len(layout.inputs))
    x, filled = _fill_missing(
        config,
        layout,
        x,
        inputs.lines,
    )
    facts = SourceFacts(columns=layout.input_names, columns_left_out=layout.left_out, filled=filled)
    if not labelled:
        return x, np.zeros(len(x)), facts
    if config.label_columns is not None:
        return x, np.frombuffer(target_numbers, np.float64).reshape(len(x), -1), facts
    y, label_names = labels.finish()
    facts = replace(
        facts,
        labels=label_names,
        # Only an order that the user has set counts as one.
        labels_said=listed is not None,
        labels_nameable=not label_names,
    )
    return x, y, facts


class _Inputs:
    """The inputs of the lines that were read, within the bound of bytes.

    Args:
        config: configuration of the table.

    Attributes:
        values: values of all lines, one line after the other.
        lines: the number of each line.
    """

    def __init__(self, config: CsvData) -> None:
        # Arrays of numbers, because lists of a large table would not fit into a board's memory.
        self.values = array("f")
        self.lines = array("q")
        self._config = config
        self._most_values = config.bounds.most_bytes() // self.values.itemsize

    def add(self, line: int, numbers: Sequence[float]) -> None:
        """Add the inputs of a line; raise a DataError beyond the bound."""
        self.values.extend(numbers)
        self.lines.append(line)
        # Checked after each line, so that the bound is exceeded by one line at most.
        if len(self.values) > self._most_values:
            size = len(self.values) * self.values.itemsize
            self._config.bounds.check_bytes(self._config.path, size)


def _read_inputs(
    layout: TableLayout,
    line: int,
    row: Sequence[str],
) -> list[float]:
    """Return a line's inputs for the model, with NaN for a missing value."""
    fields = [row[place] for place in layout.inputs]
    # Nearly all lines have only numbers, which one call converts much faster. Its digits may have
    # underscores between them, which are not part of a number here.
    if "_" not in "".join(fields):
        with contextlib.suppress(ValueError):
            return [*map(float, fields)]
    return [_read_number(layout, line, place, row[place]) for place in layout.inputs]


def _read_number(
    layout: TableLayout,
    line: int,
    place: int,
    text: str,
) -> float:
    if is_missing(text):
        return math.nan
    try:
        return parse_number(text)
    except ValueError:
        raise DataError(
            f"line {line} of {layout.path}: {layout.title(place)} contains "
            f"{text.strip()[:_SHOWN_CHARACTERS]!r}, expected numbers; "
            f"{_remedy(layout, line, text)}"
        ) from None


def _remedy(layout: TableLayout, line: int, text: str) -> str:
    """Return what to do about a field that is not a number."""
    # Digits with signs of other countries, or of a unit.
    if _NUMBER_LIKE.fullmatch(text.strip()):
        return (
            "write numbers with digits and a point, such as 1043.5, or leave the column out "
            "of `columns` in [data]"
        )
    remedy = "leave the column out of `columns` in [data], or turn its words into numbers"
    if layout.names is None:
        return f"{remedy}; if the line has the names of the columns, set header = true"
    # Below the header and the first sample, other lines of the column have numbers.
    if line > _FIRST_LINES:
        return f"correct or remove this line if it is not a sample; otherwise, {remedy}"
    return remedy


def _fill_missing(
    config: CsvData, layout: TableLayout, x: NDArray[np.float32], lines: Sequence[int]
) -> tuple[NDArray[np.float32], float | None]:
    """Replace missing values by the number of the rule.

    Returns:
        The samples, and that number; None if no value is missing.
    """
    # NaN marks a missing value until here.
    missing = np.isnan(x)
    if not missing.any():
        return x, None
    if config.missing is None:
        row, column = np.argwhere(missing)[0]
        place = layout.inputs[int(column)]
        if missing[:, int(column)].all():
            raise DataError(
                f"{config.path} has no value in {layout.title(place)} in any line: remove the "
                "column from the file (a comma at the end of each line makes one), or leave it out "
                "of `columns` in [data]"
            )
        raise DataError(
            f"line {lines[int(row)]} of {config.path} has no value in {layout.title(place)} "
            f"({int(missing.sum())} such values): set `missing` in [data] to the number that "
            "replaces them, on every board and the server, or leave those lines out"
        )
    # The type of the samples stays float32.
    return np.where(missing, np.float32(config.missing), x), config.missing
