"""The history of a simulation: a row for each closed round, and for each device in it.

Rounds are in ``metrics.parquet``. The per-device rows are in the folder ``devices.parquet``, in
parts of some thousand rows; pyarrow, pandas and polars read the folder as one table. Every file is
replaced atomically, so a reader finds complete rounds even after a crash.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from typing_extensions import Self

from fleet_protocol.disk import disk_errors
from fleet_protocol.errors import DataError
from simulation.results.rounds import DeviceRow, RoundRow
from simulation.results.row_files import read_rows, write_rows

METRICS = "metrics.parquet"
"""Name of the file of rounds."""
DEVICES = "devices.parquet"
"""Name of the folder of devices' parts."""

_PART_ROWS = 4096  # rows of devices per part: about 10 ms to write and 200 kB in memory
_SHARE = 0.01  # largest share of the time for writing


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
    return tuple(read_rows(path, RoundRow))


def write_history(folder: Path, rows: Sequence[RoundRow]) -> None:
    """Replace the rounds of a simulation; the folder is created if necessary.

    Raises:
        StorageError: the folder cannot be written.
    """
    write_rows(folder / METRICS, RoundRow, rows)


def read_devices(folder: Path) -> tuple[DeviceRow, ...]:
    """Read the work of each device in each round, by round and in order of insertion.

    The result is empty if nothing was written.

    Raises:
        DataError: a part is damaged or of another version.
    """
    rows: list[DeviceRow] = []
    for path in _parts(folder):
        rows += read_rows(path, DeviceRow)
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
            write_rows(path, DeviceRow, self._pending)
            if len(self._pending) >= _PART_ROWS:
                self._pending = []
        # Devices first: the next writer drops device rows without their round, but would keep a
        # round without device rows.
        write_history(self.folder, self._rows)
        self._unwritten = False


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / DEVICES).glob("from-*.parquet"))


def _drop_devices_after(folder: Path, last: int) -> None:
    """Remove the devices' rows of rounds after the last one."""
    for path in reversed(_parts(folder)):
        rows = read_rows(path, DeviceRow)
        kept = [row for row in rows if row.round <= last]
        if len(kept) == len(rows):
            return
        if kept:
            write_rows(path, DeviceRow, kept)
            return
        with disk_errors("remove", path):
            path.unlink()
