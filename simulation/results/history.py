"""The history of a simulation: a row for each closed round, and for each device in it.

Rounds are in ``metrics.parquet``. The per-device rows are in the folder ``devices.parquet``, in
parts of some thousand rows; pyarrow, pandas and polars read the folder as one table. Every file is
replaced atomically, so a reader finds complete rounds even after a crash.
"""

import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import pyarrow as pa
from pyarrow import parquet
from typing_extensions import Self

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.disk import disk_errors
from fleet_protocol.errors import DataError

METRICS = "metrics.parquet"
"""Name of the file of rounds."""
DEVICES = "devices.parquet"
"""Name of the folder of devices' parts."""

_PART_ROWS = 4096  # rows of devices per part: about 10 ms to write and 200 kB in memory
_SHARE = 0.01  # largest share of the time for writing

RowT = TypeVar("RowT", "RoundRow", "DeviceRow")


@dataclass(frozen=True)
class RoundRow:
    """One closed round.

    Attributes:
        round: its number, from 1; abandoned rounds count.
        version: its global version.
        accuracy: accuracy of that version on the server's test set, if evaluated.
        loss: the same for the loss.
        train_loss: mean over the devices that took part; None if none reported it.
        devices: number of participating devices.
        tiers: number of devices by trained tier.
        simulated_seconds: emulated time of this round, and of the abandoned ones before it.
        simulated_total: emulated time since the start of the run, to the end of this round.
        seconds: real time of this round.
        payload_bytes: bytes of weights and updates in both directions, including abandoned rounds
            before it.
        local_accuracy: mean over the devices' own held-out samples, weighted by their number.
        matthews: correlation of its predictions with two labels, if it was requested.
        perplexity: perplexity of that version on the server's test set, if it was requested.
        epsilon: epsilon of a device's part in the run so far; None without noise.
        metrics: metrics of that version on the server's test set, by name, as the recipe asks for
            them; None if it was not evaluated.
        clipped: updates that were scaled down to the bound on their norm.
        too_far: updates that were refused because of that bound.
        tier_metrics: accuracy and metrics of further tiers of that version, by names such as
            ``w1.00-d2 accuracy``; None if none were evaluated.
        local_worst_tenth: mean of the tenth of the devices with the lowest accuracy on their own
            held-out samples; the newest accuracy of each device counts.
    """

    round: int
    version: int
    accuracy: float | None
    loss: float | None
    train_loss: float | None
    devices: int
    tiers: Mapping[str, int]
    simulated_seconds: float
    simulated_total: float
    seconds: float
    payload_bytes: int
    local_accuracy: float | None
    matthews: float | None = None
    perplexity: float | None = None
    epsilon: float | None = None
    metrics: Mapping[str, float] | None = None
    clipped: int = 0
    too_far: int = 0
    tier_metrics: Mapping[str, float] | None = None
    local_worst_tenth: float | None = None


@dataclass(frozen=True)
class DeviceRow:
    """The part of one device in a closed round.

    Attributes:
        examples: number of its training samples.
        train_loss: its reported training loss.
        local_accuracy: accuracy of the trained sub-model on its held-out samples, if any.
        simulated_seconds: emulated time of its work.
        seconds: real time of its training.
        payload_bytes: size of its update.
    """

    round: int
    device: str
    tier: str
    examples: int
    train_loss: float | None
    local_accuracy: float | None
    simulated_seconds: float
    seconds: float
    payload_bytes: int


class Judged(Protocol):
    """Values of rounds for a plot; ``payload_bytes`` counts from the previous row."""

    @property
    def round(self) -> int: ...  # noqa: D102
    @property
    def accuracy(self) -> float | None: ...  # noqa: D102
    @property
    def local_accuracy(self) -> float | None: ...  # noqa: D102
    @property
    def local_worst_tenth(self) -> float | None: ...  # noqa: D102
    @property
    def matthews(self) -> float | None: ...  # noqa: D102
    @property
    def perplexity(self) -> float | None: ...  # noqa: D102
    @property
    def simulated_total(self) -> float: ...  # noqa: D102
    @property
    def payload_bytes(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Quantity:
    """A quantity of a round: the vertical axis of a plot, and the source of a measure."""

    name: str  # part of a file's name
    label: str
    value: Callable[[Judged], float | None]  # reads it from a round; None if it was not evaluated
    share: bool = False  # whether it is a share in [0, 1], shown in %


ACCURACY = Quantity("accuracy", "test accuracy", lambda row: row.accuracy, share=True)
"""The accuracy of the merged model on the whole test set."""


def shown_quantities(rows: Sequence[RoundRow]) -> tuple[Quantity, ...]:
    """Return what the plots of a simulation show: the score of its versions, and each metric.

    The score is the accuracy, or the loss if there is none, for example when the targets are
    numbers. Without an evaluated round, the result is empty.
    """
    quantities = []
    if any(row.accuracy is not None for row in rows):
        quantities.append(ACCURACY)
    elif any(row.loss is not None for row in rows):
        quantities.append(Quantity("loss", "test loss", _loss_of))
    names: set[str] = set()
    for row in rows:
        names.update(row.metrics or ())
    for name in sorted(names):
        quantities.append(Quantity(name, f"test {name}", partial(_metric_of, name)))
    return tuple(quantities)


def _loss_of(row: Judged) -> float | None:
    return row.loss if isinstance(row, RoundRow) else None


def _metric_of(name: str, row: Judged) -> float | None:
    if not isinstance(row, RoundRow) or row.metrics is None:
        return None
    return row.metrics.get(name)


_TYPES: Mapping[Any, Any] = MappingProxyType(
    {
        int: pa.int64(),
        float: pa.float64(),
        float | None: pa.float64(),
        str: pa.string(),
        Mapping[str, int]: pa.map_(pa.string(), pa.int64()),
        Mapping[str, float] | None: pa.map_(pa.string(), pa.float64()),
    }
)
"""Column types by annotation."""


def read_history(folder: Path) -> tuple[RoundRow, ...]:
    """Read the rounds of a simulation, in order.

    Raises:
        DataError: the history is missing or damaged, or has another version.
    """
    path = folder / METRICS
    if not path.is_file():
        raise DataError(
            f"cannot find {METRICS} in {folder}; give the output folder of a simulation"
        )
    return tuple(_read(path, RoundRow))


def write_history(folder: Path, rows: Sequence[RoundRow]) -> None:
    """Replace the rounds of a simulation; the folder is created if necessary.

    Raises:
        StorageError: the folder cannot be written.
    """
    _write(folder / METRICS, RoundRow, rows)


def read_devices(folder: Path) -> tuple[DeviceRow, ...]:
    """Read the work of each device in each round, by round and in order of insertion.

    The result is empty if nothing was written.

    Raises:
        DataError: a part is damaged or of another version.
    """
    rows: list[DeviceRow] = []
    for path in _parts(folder):
        rows += _read(path, DeviceRow)
    return tuple(rows)


class HistoryWriter:
    """Writes the history during a simulation, so rarely that it takes about 1 % of the time.

    A file is replaced when a hundred times the duration of its last write has passed; leaving the
    context writes the remaining rows. If the process is killed, the last rounds may be missing
    here, but they are in the run's store: `rows` returns the written ones, and later ones can be
    added again.
    """

    def __init__(
        self,
        folder: Path,
        *,
        until: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue the history in a folder, or start a new one.

        Args:
            folder: the output folder, created if necessary. Existing rounds are kept.
            until: last round to keep; later rounds are dropped, and so are rows of devices without
                their round.
            clock: seconds, for tests.

        Raises:
            DataError: existing files are damaged or have another version.
            StorageError: the folder cannot be written.
        """
        self.folder = folder
        self._clock = clock
        stored = read_history(folder) if (folder / METRICS).is_file() else ()
        self._rows: list[RoundRow] = []
        for row in stored:
            if until is None or row.round <= until:
                self._rows.append(row)
        self._pending: list[DeviceRow] = []
        _drop_devices_after(folder, self._rows[-1].round if self._rows else 0)
        if len(self._rows) != len(stored):
            write_history(folder, self._rows)
        self._unwritten = False
        self._due_at = clock()

    @property
    def rows(self) -> tuple[RoundRow, ...]:
        """Return the rounds so far."""
        return tuple(self._rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def add(self, row: RoundRow, devices: Iterable[DeviceRow] = ()) -> None:
        """Add a round that is later than the existing ones, with the rows of its devices.

        Raises:
            DataError: this round or a later one exists already, or a device's row belongs to
                another round.
            StorageError: the folder cannot be written.
        """
        added = list(devices)
        if self._rows and row.round <= self._rows[-1].round:
            raise DataError(
                f"round {row.round} cannot follow round {self._rows[-1].round} in the history"
            )
        if any(device.round != row.round for device in added):
            raise DataError(f"a device's row of another round was added to round {row.round}")
        self._rows.append(row)
        self._pending += added
        self._unwritten = True
        began = self._clock()
        if began >= self._due_at or len(self._pending) >= _PART_ROWS:
            self.flush()
            ended = self._clock()
            self._due_at = ended + (ended - began) / _SHARE

    def flush(self) -> None:
        """Write the pending rows.

        Raises:
            StorageError: the folder cannot be written.
        """
        if not self._unwritten:
            return
        if self._pending:
            path = self.folder / DEVICES / f"from-{self._pending[0].round:09d}.parquet"
            _write(path, DeviceRow, self._pending)
            if len(self._pending) >= _PART_ROWS:
                self._pending = []
        # Devices first: the next writer drops device rows without their round, but would keep a
        # round without device rows.
        write_history(self.folder, self._rows)
        self._unwritten = False


def first_reaching(rows: Iterable[RoundRow], target: float) -> RoundRow | None:
    """Return the first round whose model reaches an accuracy, whether or not it stays there.

    None if no evaluated round does.
    """
    for row in rows:
        if row.accuracy is not None and row.accuracy >= target:
            return row
    return None


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / DEVICES).glob("from-*.parquet"))


def _drop_devices_after(folder: Path, last: int) -> None:
    """Remove the devices' rows of rounds after the last one."""
    for path in reversed(_parts(folder)):
        rows = _read(path, DeviceRow)
        kept = [row for row in rows if row.round <= last]
        if len(kept) == len(rows):
            return
        if kept:
            _write(path, DeviceRow, kept)
            return
        with disk_errors("remove", path):
            path.unlink()


def _schema(kind: type[RowT]) -> Any:
    return pa.schema([(field.name, _TYPES[field.type]) for field in fields(kind)])


def _write(path: Path, kind: type[RowT], rows: Sequence[RowT]) -> None:
    columns = {field.name: _column(field.name, rows) for field in fields(kind)}
    buffer = io.BytesIO()
    parquet.write_table(pa.table(columns, schema=_schema(kind)), buffer)
    write_atomically(path, buffer.getbuffer())


def _column(name: str, rows: Sequence[RowT]) -> list[Any]:
    values = []
    for row in rows:
        value = getattr(row, name)
        # pyarrow takes a map as pairs.
        values.append(tuple(value.items()) if isinstance(value, Mapping) else value)
    return values


def _read(path: Path, kind: type[RowT]) -> list[RowT]:
    try:
        # ParquetFile and not read_table, which looks for partitions in the names of folders.
        with parquet.ParquetFile(path) as file:
            table = file.read()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {path}: {error}; remove it, or use another folder") from error
    # Newer columns have defaults for older files.
    for field in fields(kind):
        if field.default is not MISSING and field.name not in table.column_names:
            column_type = _TYPES[field.type]
            defaults = pa.array([field.default] * len(table), column_type)
            table = table.append_column(pa.field(field.name, column_type), defaults)
    if sorted(table.column_names) == sorted(_schema(kind).names):
        table = table.select(_schema(kind).names)
    if table.schema != _schema(kind):
        raise DataError(
            f"{path} was written by another version of Shoal: its columns are {table.schema.names}"
        )
    return [kind(**record) for record in table.to_pylist(maps_as_pydicts="strict")]
