"""The figures and curves of a table's complete runs as comma-separated values: all that its pages
and plots need.
"""

import csv
import io
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from fleet_protocol.configuration import read_toml
from fleet_protocol.errors import DataError
from fleet_protocol.frozen import FrozenModel
from reproduction.experiment import Experiment, Scale, stated
from reproduction.measures import Reading
from reproduction.running import ArmResult

EARLIER = "stated-"
"""Begins the name of a folder with what was written when the table's file stated something else."""


class Row(FrozenModel):
    """One figure of one run; what earlier versions did not store has a default.

    Attributes:
        figure: name of the measure.
        simulated_seconds: of all rounds.
        seconds: real time of all rounds.
        decides: mean of the last evaluations.
        engine: what computed it.
        machine: processor, cores and versions.
        stated: digest of what the table's file stated when this was written; empty where nothing
            was stated yet.
        begun: the same when the run ended; empty where that was not kept.
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

    @property
    def reading(self) -> Reading:
        """The figure."""
        return Reading(self.best, self.best_round, self.last, self.decides)


class Point(FrozenModel):
    """What a plot shows of one round of a run, where it was evaluated or the devices chose their
    widths.

    Attributes:
        payload_bytes: of weights and updates, both ways, since the row before.
        widths: that every device trained, where the devices choose; ``-`` for those that did not
            take part.
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

    @property
    def by_device(self) -> tuple[float | None, ...]:
        """The widths."""
        return tuple(None if width == "-" else float(width) for width in self.widths.split())


RowT = TypeVar("RowT", Row, Point)


def rows_of(experiment: Experiment, scale: Scale, results: Sequence[ArmResult]) -> tuple[Row, ...]:
    """The figures of complete runs at a scale."""
    digest = stated(experiment, scale)
    found = []
    for result in results:
        trained = f"trained as {result.trained}" if result.trained else ""
        for measure in result.arm.measures:
            reading = measure.read(result.rows, experiment.decides[scale])
            if reading is None:
                continue
            published = result.arm.published.get(measure.name)
            row = Row(
                table=experiment.table,
                scale=scale,
                arm=result.arm.name,
                figure=measure.name,
                unit=measure.unit,
                published=None if published is None else published.value,
                published_spread=None if published is None else published.spread,
                seed=result.seed,
                rounds=len(result.rows),
                simulated_seconds=round(result.rows[-1].simulated_total, 6),
                seconds=round(result.seconds, 6),
                engine=", ".join(
                    filter(
                        None,
                        (
                            result.config.engine.kind,
                            result.config.engine.backend,
                            trained,
                        ),
                    )
                ),
                machine=f"{result.machine}; " + ", ".join(map(" ".join, result.versions.items())),
                stated=digest,
                begun=result.stated,
                best=_rounded(reading.best),
                best_round=reading.best_round,
                last=_rounded(reading.last),
                decides=_rounded(reading.decides),
            )
            found.append(row)
    return tuple(found)


def statement_of(rows: Iterable[Row]) -> str:
    """Digest of what was stated when rows were written.

    Empty where all of them are older than any statement.
    """
    return next((row.stated for row in rows if row.stated), "")


def points_of(results: Sequence[ArmResult]) -> tuple[Point, ...]:
    """The curves of complete runs."""
    found = []
    for result in results:
        since = 0
        for row in result.rows:
            judged = {
                name: getattr(row, name)
                for name in ("accuracy", "local_accuracy", "matthews", "perplexity")
            }
            widths = result.widths.get(row.round, ())
            since += row.payload_bytes
            if widths or any(value is not None for value in judged.values()):
                point = Point(
                    arm=result.arm.name,
                    seed=result.seed,
                    round=row.round,
                    simulated_total=round(row.simulated_total, 3),
                    payload_bytes=since,
                    widths=" ".join("-" if width is None else f"{width:g}" for width in widths),
                    **{name: _rounded(value) for name, value in judged.items()},
                )
                found.append(point)
                since = 0
    return tuple(found)


def as_csv(rows: Iterable[Row | Point], kind: type[Row | Point] = Row) -> str:
    """Rows of a kind as text, one line each."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(kind.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.model_dump() for row in rows)
    return buffer.getvalue()


def read_rows(path: Path) -> tuple[Row, ...]:
    """Figures from a file; none where there is no file.

    Raises:
        DataError: it is damaged.
    """
    return _read(path, Row)


def read_points(path: Path) -> tuple[Point, ...]:
    """Curves from a file; none where there is no file.

    Raises:
        DataError: it is damaged.
    """
    return _read(path, Point)


def _read(path: Path, kind: type[RowT]) -> tuple[RowT, ...]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return tuple(
                kind.model_validate({k: v for k, v in line.items() if v != ""})
                for line in csv.DictReader(file)
            )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise DataError(
            f"cannot read {path}: {error}; remove it, and write the table again"
        ) from error


def seconds_of_runs(out: Path, experiment: Experiment, scale: Scale) -> dict[str, float]:
    """Mean real time of a run of each arm that has stored results anywhere below the table's
    folder.
    """
    paths = sorted((out / experiment.table).glob(f"**/{experiment.table}.csv"))
    now = [path for path in paths if not path.parent.name.startswith(EARLIER)]
    rows = [row for path in now for row in read_rows(path) if row.scale == scale]
    runs = {(row.arm, row.seed): row.seconds for row in rows}
    return {
        arm: fmean(seconds for (name, _), seconds in runs.items() if name == arm) for arm, _ in runs
    }


def estimated_seconds(experiment: Experiment, scale: Scale) -> dict[str, float]:
    """Real time that a run of each arm would take on all cores of this machine, for those that
    ``costs.toml`` has.
    """
    costs = (
        read_toml(Path(__file__).with_name("costs.toml")).get(experiment.table, {})
        if scale == "small"
        else {}
    )
    rounds = {
        arm.name: arm.settings(scale)["round"]["rounds"]
        for arm in experiment.arms
        if arm.name in costs
    }
    return {name: each * rounds[name] / (os.cpu_count() or 1) for name, each in costs.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)
