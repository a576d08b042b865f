"""Finds faults in samples without comparison: an index, the answer, missing values as numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.coarse import coarse_columns, steps_of_float32
from fleet_protocol.data.dataset import DataSet
from fleet_protocol.data.far_values import find_far_values
from fleet_protocol.data.label_names import describe_label_names
from fleet_protocol.data.repeated import describe_repeated
from fleet_protocol.data.summary import MOST_GROUPS, DataSummary, are_tokens, drawn_rows

MOST_LOOKED_AT = 4096
"""Greatest number of samples that are examined."""
NAMED = 3
"""Columns that a sentence names; further ones are counted."""

_MOST_VALUES = 2**22
_LEAST_ROWS = 20  # in fewer samples a column may match the labels, or be constant, by chance
_LEAST_INDEX_ROWS = 5  # for a column whose name already marks it as an index
_INDEX_NAMES = frozenset({"", "index", "unnamed: 0"})
_SAME = 0.999  # correlation above which two columns of numbers count as equal
_CHANCE = 20.0  # n random whole numbers below n * n / 20 are all different once in e**10 times
_FILLER = 0.1  # share of the other columns' values above which a value means nothing

Kind = Literal[
    "constant",
    "index",
    "answer",
    "missing",
    "labels",
    "repeated",
    "shape",
    "dtype",
    "scale",
    "mean",
    "order",
    "inverted",
    "coarse",
]


@dataclass(frozen=True)
class DataFinding:
    """A possible fault in samples.

    Attributes:
        kind: the kind of finding.
        text: one sentence with the finding, its figures, and what to do.
    """

    kind: Kind
    text: str


@dataclass(frozen=True)
class _Table:
    """Flat samples, of which a selection is examined.

    Attributes:
        x: values ``[rows, columns]`` as read, float64.
        y: targets ``[rows, targets]``, float64; empty if the inputs cannot contain them.
        rows: numbers of these samples, ascending.
        labels: whether the targets are whole numbers.
        names: names of the columns.
    """

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    rows: NDArray[np.int64]
    labels: bool
    names: tuple[str, ...]


def inspect(data: DataSet, fleet: DataSummary | None = None) -> tuple[DataFinding, ...]:
    """Find what looks wrong in samples by themselves.

    Only flat samples can have findings about columns, and only others a finding about repetition.

    Args:
        data: at most `MOST_LOOKED_AT` of its samples are examined, evenly drawn.
        fleet: the fleet's contract, if known: a column that is also constant there, or has two
            values, is not a finding.

    Returns:
        A finding for each kind: names of labels, repeated samples, the answer, an index, missing
        values as numbers, constant columns, columns too far from zero for float32.
    """
    about_all = []
    names = describe_label_names(data.label_names)
    if names:
        about_all.append(DataFinding("labels", names))
    repeated = describe_repeated(data)
    if repeated:
        about_all.append(DataFinding("repeated", repeated))
    table = _table(data)
    if table is None or len(table.rows) < _LEAST_INDEX_ROWS:
        return tuple(about_all)
    answers = _answers(table)
    # A column that gives the answer away is one finding, not two.
    counting = [column for column in _counting(table) if column not in answers]
    constant = _constant(table, data, fleet)
    findings = _describe(
        table,
        answers,
        counting,
        constant,
    )
    return (*about_all, *findings, *_missing(table, data, fleet), *_coarse(table, data))


def _describe(
    table: _Table,
    answers: Sequence[int],
    counting: Sequence[int],
    constant: Mapping[float, Sequence[int]],
) -> Iterator[DataFinding]:
    """Yield a finding for each group of columns that look wrong."""
    sample_count = len(table.rows)
    if answers:
        columns = list_columns(answers, table.names)
        verb = "determines" if len(answers) == 1 else "determine"
        yield DataFinding(
            "answer",
            f"{columns} {verb} the label in all {sample_count} examined samples: a model would "
            "read the answer; leave it out of `columns` in [data], or out of the file",
        )
    if counting:
        values = table.x[:, counting[0]]
        yield DataFinding(
            "index",
            f"{list_columns(counting, table.names)} numbers the samples ({len(values)} different "
            f"whole numbers from {values.min():g} to {values.max():g}), like the index that pandas "
            "writes; leave it out of `columns` in [data], or write the file with index=False",
        )
    for value, group in constant.items():
        verb = "is" if len(group) == 1 else "are"
        yield DataFinding(
            "constant",
            f"{list_columns(group, table.names)} {verb} {value:g} in all {sample_count} examined "
            "samples: check the program that writes it, or leave it out of `columns` in [data] of "
            "the fleet",
        )


def _missing(
    table: _Table,
    data: DataSet,
    fleet: DataSummary | None,
) -> Iterator[DataFinding]:
    """Yield a finding for inputs and one for targets in which a number marks a missing value."""
    count = len(table.rows)
    # The user has chosen the number that replaces missing values.
    usual = () if data.facts.filled is None else (data.facts.filled,)
    inputs = {} if _may_be_tokens(table, data, fleet) else find_far_values(table.x, usual)
    if inputs:
        first = next(iter(inputs))
        others = f"; so do {len(inputs) - 1} more columns" if len(inputs) > 1 else ""
        yield DataFinding(
            "missing",
            f"{list_columns([first], table.names)} {inputs[first].describe(count)}, as if this "
            f"number marked missing values{others}: leave such fields empty and set `missing` in "
            "[data], or leave such samples out",
        )
    targets = {} if table.labels else find_far_values(table.y)
    if targets:
        first = next(iter(targets))
        noun = f"target {first}" if table.y.shape[1] > 1 else "the target"
        yield DataFinding(
            "missing",
            f"{noun} {targets[first].describe(count)}, as if this number marked missing values: "
            "leave such samples out",
        )


def _coarse(table: _Table, data: DataSet) -> Iterator[DataFinding]:
    """Yield a finding about columns that have lost their differences when they were read."""
    # Other types become float32 only after `mean` in [data] has been subtracted.
    if data.x.dtype != np.float32 or not table.x.shape[1]:
        return
    columns = coarse_columns(table.x)
    if not columns:
        return
    first = columns[0]
    step = steps_of_float32(table.x[:, [first]])[0]
    verb = "has" if len(columns) == 1 else "have"
    yield DataFinding(
        "coarse",
        f"{list_columns(columns, table.names)} {verb} values of up to"
        f" {np.abs(table.x[:, first]).max():.6g} that differ by few units; samples are float32,"
        f" which has only every {step:g}th number there: subtract the first value in the program"
        " that writes them, or leave the column out of `columns` in [data]",
    )


def _may_be_tokens(table: _Table, data: DataSet, fleet: DataSummary | None) -> bool:
    """Return whether inputs may be tokens, which have no scale."""
    if data.x.dtype.kind == "f" or not table.x.size or table.x.min() < 0:
        return False
    return fleet is None or are_tokens(fleet)


def list_columns(
    columns: Sequence[int],
    names: Sequence[str],
    noun: str = "column",
) -> str:
    """List columns, or channels, for messages, by name or number."""
    listed = []
    for column in columns[:NAMED]:
        listed.append(repr(names[column]) if column < len(names) else str(column))
    more = len(columns) - len(listed)
    if more:
        listed.append(f"{more} more")
    *first, last = listed
    text = f"{', '.join(first)} and {last}" if first else last
    return f"{noun}{'s' if len(columns) > 1 else ''} {text}"


def _table(data: DataSet) -> _Table | None:
    """Return the samples as a table, or None if they are not flat."""
    columns = math.prod(data.x.shape[1:])
    if data.x.ndim > 2 or not 1 <= columns <= MOST_LOOKED_AT:
        return None
    # A bounded number of values, however wide the samples are.
    rows = drawn_rows(len(data), min(MOST_LOOKED_AT, _MOST_VALUES // columns))
    targets: NDArray[Any] = data.y[rows].reshape(len(rows), -1)
    are_labels = data.y.dtype.kind != "f"
    if are_labels and data.y.ndim > 1 and data.x.dtype.kind in "biu":
        targets = targets[:, :0]  # a language model has its input tokens as targets
    return _Table(
        x=data.x[rows].astype(np.float64).reshape(len(rows), columns),
        # More targets than groups would not be compared either.
        y=targets[:, :MOST_GROUPS].astype(np.float64),
        rows=rows,
        labels=are_labels,
        names=data.column_names if len(data.column_names) == columns else (),
    )


def _answers(table: _Table) -> tuple[int, ...]:
    """Return the columns that equal a target, or determine it."""
    if len(table.rows) < _LEAST_ROWS:
        return ()
    answers: set[int] = set()
    # Each target of a sample by itself.
    for target in table.y.T:
        # A constant target determines nothing.
        if target.min() == target.max():
            continue
        equal = _correlation(table.x, target) > _SAME
        answers.update(np.flatnonzero(equal).tolist())
        if table.labels:
            answers.update(_one_to_one(table.x, target))
    return tuple(sorted(answers))


def _correlation(x: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Correlate each column with a target, without sign; 0 for a constant column."""
    x_offsets = x - x.mean(0)
    target_offsets = target - target.mean()
    norms = np.sqrt(np.square(x_offsets).sum(0) * np.square(target_offsets).sum())
    products = np.abs(target_offsets @ x_offsets)
    # Divided by infinity, a constant column gets 0.
    return np.asarray(products / np.where(norms > 0, norms, np.inf))


def _one_to_one(x: NDArray[np.float64], labels: NDArray[np.float64]) -> Iterator[int]:
    """Yield columns with one value per label and one label per value, if each label is frequent."""
    classes, label_places = np.unique(labels, return_inverse=True)
    # With nearly as many labels as samples, any column would match.
    if len(classes) * 2 > len(labels):
        return
    for place, column in enumerate(x.T):
        values, value_places = np.unique(column, return_inverse=True)
        if len(values) != len(classes):
            continue
        # There must be as many pairs as labels: each value belongs to only one label.
        # Every pair of value and label has one number.
        pairs = np.unique(value_places * len(classes) + label_places)
        if len(pairs) == len(classes):
            yield place


def _counting(table: _Table) -> tuple[int, ...]:
    """Return columns of whole numbers that are all different, and too close together for chance."""
    places = []
    for place, column in enumerate(table.x.T):
        is_whole = (column == np.floor(column)).all()
        if not is_whole or len(np.unique(column)) < len(column):
            continue
        name = table.names[place].strip().lower() if table.names else None
        if name in _INDEX_NAMES or _counts_rows(column, table.rows):
            places.append(place)
    return tuple(places)


def _counts_rows(column: NDArray[np.float64], rows: NDArray[np.int64]) -> bool:
    """Return whether different whole numbers are dense, or follow the numbers of the rows."""
    count = len(column)
    if count < _LEAST_ROWS:
        return False
    span = column.max() - column.min()
    # Random numbers below this span would have collisions.
    if span <= max(count, count**2 / _CHANCE):
        return True
    # The numbers of an index grow like those of the drawn rows.
    return bool((column - column[0] == rows - rows[0]).all())


def _constant(
    table: _Table,
    data: DataSet,
    fleet: DataSummary | None,
) -> dict[float, list[int]]:
    """Group constant columns by their value.

    A value that is common in the other columns is a filler, such as 0 in pictures and in columns of
    yes and no. Whole numbers of an integer type may be tokens, and the first token is often the
    same.
    """
    maybe_tokens = data.x.dtype.kind != "f" if fleet is None else are_tokens(fleet)
    if len(table.rows) < _LEAST_ROWS or maybe_tokens or table.x.shape[1] > MOST_GROUPS:
        return {}
    lowest = table.x.min(0)
    constant = lowest == table.x.max(0)
    varied = table.x[:, ~constant]
    # In the form of the fleet's figures.
    first_sample, _ = data.batch(table.rows[:1], "float32")
    as_seen = first_sample.reshape(-1)
    groups: dict[float, list[int]] = {}
    for place in np.flatnonzero(constant).tolist():
        value = float(lowest[place])
        is_filler = varied.size > 0 and (varied == value).mean() >= _FILLER
        is_usual = fleet is not None and _usual(float(as_seen[place]), fleet, place)
        if not is_filler and not is_usual:
            groups.setdefault(value, []).append(place)
    return groups


def _usual(
    value: float,
    fleet: DataSummary,
    column: int,
) -> bool:
    """Return whether a column may be constant: it is so in the fleet, or has two values there.

    All values are at the ends of the range exactly if the variance is (mean - lowest) * (highest -
    mean) (Bhatia, Davis: "A better bound on the variance", 2000).
    """
    if fleet.groups != "columns" or column >= len(fleet.mean):
        return False
    lowest = fleet.lowest[column]
    highest = fleet.highest[column]
    mean = fleet.mean[column]
    variance = fleet.deviation[column] ** 2
    has_two_values = math.isclose(variance, (mean - lowest) * (highest - mean), rel_tol=1e-3)
    return has_two_values and any(
        math.isclose(value, end, rel_tol=1e-5) for end in (lowest, highest)
    )
