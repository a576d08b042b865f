"""The history of a simulation: a row for each closed round, and for each device in it.

Rounds are in ``metrics.parquet``. The per-device rows are in the folder ``devices.parquet``, in
parts of some thousand rows; pyarrow, pandas and polars read the folder as one table. Every file is
replaced atomically, so a reader finds whole rounds, also after a crash.
"""

import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
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

_PART_ROWS = 4096  # of devices; some 10 ms to write and 200 kB to keep in memory
_SHARE = 0.01  # of the time may go into writing

RowT = TypeVar("RowT", "RoundRow", "DeviceRow")


@dataclass(frozen=True)
class RoundRow:
    """One closed round.

    Attributes:
        round: its number, from 1; abandoned rounds count.
        version: the global version it made.
        accuracy: of that version on the server's test set, if it was evaluated.
        loss: likewise.
        train_loss: mean over the devices that took part; None if none reported it.
        devices: how many took part.
        tiers: how many of them trained each tier.
        simulated_seconds: emulated time of this round, and of the abandoned ones before it.
        simulated_total: emulated time since the start of the run, to the end of this round.
        seconds: real time of this round.
        payload_bytes: of weights and updates, both ways, with those of the abandoned rounds before
            it.
        local_accuracy: mean over the devices' own held-out samples, weighted by their number.
        matthews: correlation of its predictions with two labels, if that was asked for.
        perplexity: of that version on the server's test set, if that was asked for.
        epsilon: of a device's part in the run so far; None where nothing hides it.
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


@dataclass(frozen=True)
class DeviceRow:
    """The part of one device in a closed round.

    Attributes:
        examples: training samples it holds.
        train_loss: as it reported.
        local_accuracy: of the trained sub-model on its own held-out samples, if it keeps any.
        simulated_seconds: emulated time of its part.
        seconds: real time of its training.
        payload_bytes: of its update.
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
    """What a plot needs of a round, or of several; ``payload_bytes`` are since the row before."""

    @property
    def round(self) -> int: ...  # noqa: D102
    @property
    def accuracy(self) -> float | None: ...  # noqa: D102
    @property
    def local_accuracy(self) -> float | None: ...  # noqa: D102
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
    """What a plot shows on its vertical axis, and a measure is read from."""

    name: str  # part of a file's name
    label: str
    value: Callable[[Judged], float | None]  # finds it in a round; None where it was not evaluated
    share: bool = False  # whether it is a share, in [0, 1], to be shown in %


ACCURACY = Quantity("accuracy", "test accuracy", lambda row: row.accuracy, share=True)
"""Of the merged model on the whole test set."""


_TYPES: Mapping[Any, Any] = MappingProxyType(
    {
        int: pa.int64(),
        float: pa.float64(),
        float | None: pa.float64(),
        str: pa.string(),
        Mapping[str, int]: pa.map_(pa.string(), pa.int64()),
    }
)
"""Column types by annotation."""


def read_history(folder: Path) -> tuple[RoundRow, ...]:
    """Read the rounds of a simulation, in order.

    Raises:
        DataError: there is no history, or it is damaged or of another version.
    """
    path = folder / METRICS
    if not path.is_file():
        raise DataError(
            f"there is no {METRICS} in {folder}; give the folder that a simulation wrote to"
        )
    return tuple(_read(path, RoundRow))


def write_history(folder: Path, rows: Sequence[RoundRow]) -> None:
    """Replace the rounds of a simulation, in a folder that is made.

    Raises:
        StorageError: the folder cannot be written.
    """
    _write(folder / METRICS, RoundRow, rows)


def read_devices(folder: Path) -> tuple[DeviceRow, ...]:
    """Read what each device did in each round, by round and then as it was added.

    There are no rows if nothing was written.

    Raises:
        DataError: a part is damaged or of another version.
    """
    rows: list[DeviceRow] = []
    for path in _parts(folder):
        rows += _read(path, DeviceRow)
    return tuple(rows)


class HistoryWriter:
    """Writes the history while a simulation goes on, so seldom that it takes about 1 % of the time.

    A file is replaced once a hundred times as long has passed as writing it took the last time;
    leaving the context writes the rest. A process that is killed may so miss the last rounds here
    that the run's store has: `rows` says which ones are here, and those after them can be added
    again.
    """

    def __init__(
        self,
        folder: Path,
        *,
        until: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue the history in a folder, or begin one.

        Args:
            folder: where to write; it is made. Rounds that are there already are kept.
            until: last round to keep; the later ones are dropped, as are rows of devices without
                their round.
            clock: seconds, for tests.

        Raises:
            DataError: what is there is damaged or of another version.
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
        """Add a round, later than those that are here, and what each device did in it.

        Raises:
            DataError: this round, or a later one, is here already; or a device's row is of another
                round.
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
        """Write what is not written yet.

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
        # Devices first: their rows without the round are dropped by the next writer, a round
        # without them would stay.
        write_history(self.folder, self._rows)
        self._unwritten = False


def first_reaching(rows: Iterable[RoundRow], target: float) -> RoundRow | None:
    """Return the first round whose model reaches an accuracy, whether or not it stays there.

    None if no evaluated one does.
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
        raise DataError(
            f"cannot read {path}: {error}; remove it, or take another folder"
        ) from error
    # Columns that came later have a default for files that were written before.
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
