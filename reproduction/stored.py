"""Stores the figures and curves of a table's complete runs as comma-separated values.

The pages and plots of a table need only these files.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fleet_protocol.errors import DataError
from fleet_protocol.frozen import FrozenModel
from reproduction.experiment import Experiment, Scale, stated
from reproduction.published import Published
from reproduction.readings import Measure, Reading
from reproduction.running import ArmResult

EARLIER = "earlier-"
"""Prefix of a folder with figures of an earlier statement of a table; a number follows."""
_EVALUATED = ("accuracy", "local_accuracy", "matthews", "perplexity", "local_worst_tenth")
"""Columns of a point that an evaluation fills."""


_LATER = frozenset({"parameters", "flops", "local_worst_tenth"})
"""Columns of a `Row` or a `Point` that earlier versions did not write."""

Columns = dict[str, Any]
"""Some columns of a row, by name."""


class Row(FrozenModel):
    """One figure of one run; values that earlier versions did not store have defaults.

    Attributes:
        figure: name of the measure.
        simulated_seconds: seconds of all rounds.
        seconds: real time of all rounds.
        decides: mean of the last evaluations.
        engine: what computed it.
        machine: processor, cores and versions.
        stated: digest of the table's statement at the time of writing; empty if there was none yet.
        begun: the same at the end of the run; empty if not recorded.
        parameters: mean number of parameters of the trained sub-models, over all updates.
        flops: mean number of operations of a forward pass of one sample, likewise.
    """

    table: str
    scale: Scale
    arm: str
    figure: str
    unit: str = ""
    published: float | None = None
    published_spread: float | None = None
    seed: int
    best: float | None = None
    best_round: int | None = None
    last: float | None = None
    rounds: int
    simulated_seconds: float
    seconds: float
    decides: float | None = None
    engine: str = ""
    machine: str = ""
    stated: str = ""
    begun: str = ""
    parameters: float | None = None
    flops: float | None = None

    @property
    def reading(self) -> Reading:
        """The figure as a measure reads it."""
        return Reading(self.best, self.best_round, self.last, self.decides)


class Point(FrozenModel):
    """The values of one round of a run for a plot.

    It exists if the round was evaluated or the devices chose their widths.

    Attributes:
        payload_bytes: bytes of weights and updates, both ways, since the row before.
        widths: widths that every device trained, where the devices choose; ``-`` for those that did
            not take part.
    """

    arm: str
    seed: int
    round: int
    accuracy: float | None = None
    local_accuracy: float | None = None
    matthews: float | None = None
    perplexity: float | None = None
    simulated_total: float
    payload_bytes: int
    widths: str = ""
    local_worst_tenth: float | None = None

    @property
    def by_device(self) -> tuple[float | None, ...]:
        """The widths, None for devices that did not take part."""
        widths: list[float | None] = []
        for width in self.widths.split():
            widths.append(None if width == "-" else float(width))
        return tuple(widths)


RowT = TypeVar("RowT", Row, Point)


def rows_of(
    experiment: Experiment,
    scale: Scale,
    results: Sequence[ArmResult],
) -> tuple[Row, ...]:
    """Return the figures of complete runs at a scale."""
    statement: Columns = {
        "table": experiment.table,
        "scale": scale,
        "stated": stated(experiment, scale),
    }
    rows: list[Row] = []
    for result in results:
        for measure in result.arm.measures:
            reading = measure.read(result.rows, experiment.decides[scale])
            if reading is None:
                continue
            published = result.arm.published.get(measure.name)
            figure = _figure(measure, reading, published)
            rows.append(Row(**statement, **_run(result), **figure))
    return tuple(rows)


def _run(result: ArmResult) -> Columns:
    """Return the columns of a row about its run."""
    table = result.config.engine
    engine: list[str] = [table.kind, table.backend]
    if result.trained:
        engine.append(f"trained as {result.trained}")
    versions = [" ".join(package) for package in result.versions.items()]
    sizes = result.sizes
    return {
        "arm": result.arm.name,
        "seed": result.seed,
        "rounds": len(result.rows),
        # Rounded, because digits beyond the precision of a figure would only make stored files
        # differ.
        "simulated_seconds": round(result.rows[-1].simulated_total, 6),
        "seconds": round(result.seconds, 6),
        # Commas separate the parts within a cell, and semicolons groups of parts.
        "engine": ", ".join(filter(None, engine)),
        "machine": f"{result.machine}; {', '.join(versions)}",
        "begun": result.stated,
        "parameters": None if sizes is None else round(sizes.parameters, 1),
        "flops": None if sizes is None else round(sizes.flops, 1),
    }


def _figure(
    measure: Measure,
    reading: Reading,
    published: Published | None,
) -> Columns:
    """Return the columns of a row with its figure and the published one."""
    return {
        "figure": measure.name,
        "unit": measure.unit,
        "published": None if published is None else published.value,
        "published_spread": None if published is None else published.spread,
        "best": _rounded(reading.best),
        "best_round": reading.best_round,
        "last": _rounded(reading.last),
        "decides": _rounded(reading.decides),
    }


def statement_of(rows: Iterable[Row]) -> str:
    """Return the digest of the statement when rows were written.

    It is empty if all of them are older than any statement.
    """
    for row in rows:
        # The rows of one file have the same statement or none: `write_table` sets other rows aside.
        if row.stated:
            return row.stated
    return ""


def points_of(results: Sequence[ArmResult]) -> tuple[Point, ...]:
    """Return the curves of complete runs."""
    points: list[Point] = []
    for result in results:
        points += _curve(result)
    return tuple(points)


def _curve(result: ArmResult) -> Iterator[Point]:
    """Yield the points of a run; bytes of rounds without a point count in the next one."""
    payload_bytes = 0
    for row in result.rows:
        # Before the round may be skipped, so that the bytes of all points add up to those of the
        # run.
        payload_bytes += row.payload_bytes
        widths = result.widths.get(row.round, ())
        evaluated = {}
        for name in _EVALUATED:
            value = getattr(row, name)
            if value is not None:
                evaluated[name] = _rounded(value)
        if not widths and not evaluated:
            continue
        yield Point(
            arm=result.arm.name,
            seed=result.seed,
            round=row.round,
            # Milliseconds are enough for a plot, and a curve has a row for each evaluated round.
            simulated_total=round(row.simulated_total, 3),
            payload_bytes=payload_bytes,
            widths=" ".join(map(_width_text, widths)),
            **evaluated,
        )
        payload_bytes = 0


def _width_text(width: float | None) -> str:
    return "-" if width is None else f"{width:g}"


def as_csv(rows: Iterable[Row | Point], kind: type[Row | Point] = Row) -> str:
    """Return rows of a kind as text, one line each.

    Later columns are left out if no row has a value, so that earlier files stay as they are.
    """
    listed = list(rows)
    columns: list[str] = []
    for name in kind.model_fields:
        is_used = any(getattr(row, name) is not None for row in listed)
        if is_used or name not in _LATER:
            columns.append(name)
    buffer = io.StringIO()
    # The default of the module is CRLF, which would make files differ from those in the repository.
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    for row in listed:
        writer.writerow(row.model_dump(include=set(columns)))
    return buffer.getvalue()


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read figures from a file; return none if there is no file.

    Raises:
        DataError: it is damaged.
    """
    return _read(path, Row)


def read_points(path: Path) -> tuple[Point, ...]:
    """Read curves from a file; return none if there is no file.

    Raises:
        DataError: it is damaged.
    """
    return _read(path, Point)


def _read(path: Path, kind: type[RowT]) -> tuple[RowT, ...]:
    rows: list[RowT] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                # An empty cell has the default, for example if an earlier version did not store it.
                for column in list(line):
                    if line[column] == "":
                        del line[column]
                rows.append(kind.model_validate(line))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise DataError(
            f"cannot read {path}: {error}; remove it, and write the table again"
        ) from error
    return tuple(rows)


def _rounded(value: float | None) -> float | None:
    # A run that diverged has no figure, and an empty cell says so.
    if value is None or not math.isfinite(value):
        return None
    return round(value, 6)
