"""What looks wrong in samples, seen by whoever has them: constant columns, an index, the answer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.data.summary import MOST_GROUPS, DataSummary, are_tokens, drawn_rows

MOST_LOOKED_AT = 4096
"""Samples that are looked at."""
NAMED = 3
"""Columns that a sentence names; of more it tells the number."""

_MOST_VALUES = 2**22
_LEAST_ROWS = 20  # of fewer samples a column may agree with the labels, or be constant, by chance
_LEAST_INDEX_ROWS = 5  # of a column whose name says already that it is an index
_INDEX_NAMES = frozenset({"", "index", "unnamed: 0"})
_SAME = 0.999  # correlation of two columns of numbers from which one is the other
_CHANCE = 20.0  # so many whole numbers drawn below n * n / 20 have no two alike once in e**10 times
_FILLER = 0.1  # share of the other columns' values from which a value is what stands for nothing

Kind = Literal["constant", "index", "answer", "shape", "dtype", "scale", "mean", "order"]


@dataclass(frozen=True)
class DataFinding:
    """Something in samples that looks wrong.

    Attributes:
        kind: what it is.
        text: the same in one sentence, with figures, and what to do.
    """

    kind: Kind
    text: str


@dataclass(frozen=True)
class _Table:
    """Flat samples, of which some are looked at.

    Attributes:
        x: values ``[rows, columns]`` as they came, float64.
        y: targets ``[rows, targets]``, float64; none where they are no answer to look for.
        rows: which samples these are, ascending.
        labels: whether the targets are whole numbers.
        names: of the columns.
    """

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    rows: NDArray[np.int64]
    labels: bool
    names: tuple[str, ...]


def inspect(data: DataSet, fleet: DataSummary | None = None) -> tuple[DataFinding, ...]:
    """Look for what is wrong in samples themselves; samples that are not flat have no such findings.

    Args:
        data: at most `MOST_LOOKED_AT` of its samples are looked at, evenly drawn.
        fleet: what the fleet says a sample is, where that is known: a column that is constant
            there, too, or says yes or no, is no finding.

    Returns:
        A finding for each kind: the answer, an index, constant columns.
    """
    table = _table(data)
    if table is None or len(table.rows) < _LEAST_INDEX_ROWS:
        return ()
    answers = _answers(table)
    counting = tuple(i for i in _counting(table) if i not in answers)
    constant = _constant(table, data, fleet)
    return tuple(_found(table, answers, counting, constant))


def _found(
    table: _Table, answers: Sequence[int], counting: Sequence[int], constant: Mapping[float, Sequence[int]]
) -> Iterator[DataFinding]:
    if answers:
        what = f"{named(answers, table.names)} {_s(answers, 'determines', 'determine')} the label"
        yield DataFinding(
            "answer",
            f"{what} in all {len(table.rows)} samples that were looked at: a model would read the answer; "
            "leave it out of `columns` in [data], or out of the file",
        )
    if counting:
        values = table.x[:, counting[0]]
        yield DataFinding(
            "index",
            f"{named(counting, table.names)} numbers the samples ({len(values)} different whole numbers from "
            f"{values.min():g} to {values.max():g}), as the index does that pandas writes; leave it out of "
            "`columns` in [data], or write the file with index=False",
        )
    for value, group in constant.items():
        yield DataFinding(
            "constant",
            f"{named(group, table.names)} {_s(group, 'is', 'are')} {value:g} in all {len(table.rows)} samples "
            "that were looked at: see what writes it, or leave it out of `columns` in [data] of the fleet",
        )


def named(columns: Sequence[int], names: Sequence[str], noun: str = "column") -> str:
    """Columns, or channels, for people, by name or number."""
    shown = [repr(names[i]) if i < len(names) else str(i) for i in columns[:NAMED]]
    more = len(columns) - len(shown)
    parts = [*shown[:-1], f"{shown[-1]}"] if not more else [*shown, f"{more} more"]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{noun}{'s' if len(columns) > 1 else ''} {listed}"


def _s(columns: Sequence[int], one: str, many: str) -> str:
    return one if len(columns) == 1 else many


def _table(data: DataSet) -> _Table | None:
    """The samples as a table, None where they are none."""
    columns = math.prod(data.x.shape[1:])
    if data.x.ndim > 2 or not 1 <= columns <= MOST_LOOKED_AT:
        return None
    rows = drawn_rows(len(data), min(MOST_LOOKED_AT, _MOST_VALUES // columns))
    targets: NDArray[Any] = data.y[rows].reshape(len(rows), -1)
    whole = data.y.dtype.kind != "f"
    if whole and data.y.ndim > 1 and data.x.dtype.kind in "biu":
        targets = targets[:, :0]  # tokens: a language model has its input as targets
    return _Table(
        data.x[rows].astype(np.float64).reshape(len(rows), columns),
        targets[:, :MOST_GROUPS].astype(np.float64),
        rows,
        whole,
        data.column_names if len(data.column_names) == columns else (),
    )


def _answers(table: _Table) -> tuple[int, ...]:
    """Columns that are a target, or determine it."""
    if len(table.rows) < _LEAST_ROWS:
        return ()
    answers: set[int] = set()
    for target in table.y.T:
        if target.min() < target.max():
            answers.update(np.flatnonzero(_correlation(table.x, target) > _SAME).tolist())
            if table.labels:
                answers.update(_one_to_one(table.x, target))
    return tuple(sorted(answers))


def _correlation(x: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each column with a target, without its sign; 0 for a constant column."""
    apart = x - x.mean(0)
    aim = target - target.mean()
    size = np.sqrt(np.square(apart).sum(0) * np.square(aim).sum())
    return np.asarray(np.abs(aim @ apart) / np.where(size > 0, size, np.inf))


def _one_to_one(x: NDArray[np.float64], labels: NDArray[np.float64]) -> Iterator[int]:
    """Columns with a value for each label and a label for each value; few values, each often."""
    known, label = np.unique(labels, return_inverse=True)
    if len(known) * 2 > len(labels):
        return
    for i, column in enumerate(x.T):
        values, value = np.unique(column, return_inverse=True)
        pairs = len(np.unique(value * len(known) + label)) if len(values) == len(known) else 0
        if pairs == len(known):
            yield i


def _counting(table: _Table) -> tuple[int, ...]:
    """Columns of whole numbers that are all different, and too close together for that to be chance."""
    found = []
    for i, column in enumerate(table.x.T):
        if not (column == np.floor(column)).all() or len(np.unique(column)) < len(column):
            continue
        name = table.names[i].strip().lower() if table.names else None
        span = column.max() - column.min()
        dense = len(column) >= _LEAST_ROWS and span <= max(len(column), len(column) ** 2 / _CHANCE)
        follows = len(column) >= _LEAST_ROWS and bool((column - column[0] == table.rows - table.rows[0]).all())
        if name in _INDEX_NAMES or dense or follows:
            found.append(i)
    return tuple(found)


def _constant(table: _Table, data: DataSet, fleet: DataSummary | None) -> dict[float, list[int]]:
    """Columns of one value each, by that value.

    A value that is common in the other columns stands for nothing there, as 0 does in pictures and
    in columns of yes and no. Whole numbers of an integer type may be tokens, of which the first is
    often the same.
    """
    maybe_tokens = data.x.dtype.kind != "f" if fleet is None else are_tokens(fleet)
    if len(table.rows) < _LEAST_ROWS or maybe_tokens or table.x.shape[1] > MOST_GROUPS:
        return {}
    lowest = table.x.min(0)
    constant = lowest == table.x.max(0)
    varied = table.x[:, ~constant]
    seen = data.batch(table.rows[:1], "float32")[0].reshape(-1)  # as the fleet's figures are
    groups: dict[float, list[int]] = {}
    for i in np.flatnonzero(constant).tolist():
        value = float(lowest[i])
        filler = varied.size > 0 and (varied == value).mean() >= _FILLER
        if not filler and not (fleet is not None and _usual(float(seen[i]), fleet, i)):
            groups.setdefault(value, []).append(i)
    return groups


def _usual(value: float, fleet: DataSummary, i: int) -> bool:
    """Whether a column may well be constant: it is that in the fleet, or has two values there.

    All values lie at the ends where the variance is (mean - lowest) * (highest - mean), and only
    there (Bhatia, Davis: "A better bound on the variance", 2000).
    """
    if fleet.groups != "columns" or i >= len(fleet.mean):
        return False
    lowest, highest, mean = fleet.lowest[i], fleet.highest[i], fleet.mean[i]
    two = math.isclose(fleet.deviation[i] ** 2, (mean - lowest) * (highest - mean), rel_tol=1e-3)
    return two and any(math.isclose(value, end, rel_tol=1e-5) for end in (lowest, highest))
