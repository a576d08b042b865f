"""Records on disk which secure sums are being opened, so that a restarted server finishes them.

Boards reveal shares for only one sum of a version (`device_runtime.agent.opened_sums`). A server
that ends between the first share and the stored mean must finish that sum after its restart: the
boards would take part in no other sum of this version. The file contains public keys and names.
Shares and masked updates reveal no update, and masked updates are among the updates of the store.
"""

import contextlib
from pathlib import Path

from pydantic import ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import BlobError
from fleet_protocol.foreign_files import read_regular
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages.values import MemberKeys

_FILE = "begun-sums.json"


class BegunSum(FrozenModel):
    """One sum whose opening has begun.

    Attributes:
        devices: devices of its cohort, in order.
        keys: public keys of the devices that make shares.
        members: devices that share masks.
        sent: devices whose masked updates are in the sum.
    """

    devices: tuple[str, ...]
    keys: dict[str, MemberKeys]
    members: tuple[str, ...]
    sent: tuple[str, ...]


class _Record(FrozenModel):
    """The file's content.

    Attributes:
        run: run of the round.
        round: round of these sums.
        sums: the sums in the order in which their opening began.
    """

    run: str
    round: int
    sums: tuple[BegunSum, ...]


class BegunSums:
    """The file that lists the sums whose opening has begun.

    Args:
        folder: folder of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE

    def add(self, run: str, number: int, begun: BegunSum) -> None:
        """Record, before any share is requested, that the opening of a sum begins.

        Raises:
            StorageError: the disk is full.
        """
        record = _Record(run=run, round=number, sums=(*self.load(run, number), begun))
        write_atomically(self._path, record.model_dump_json().encode())

    def load(self, run: str, number: int) -> tuple[BegunSum, ...]:
        """Return the begun sums of a round; none if the file is of another round, or damaged."""
        # A damaged file costs this round, in which boards then take no further part.
        with contextlib.suppress(BlobError, ValidationError):
            record = _Record.model_validate_json(read_regular(self._path))
            # A sum of an earlier round must not be opened again.
            if (record.run, record.round) == (run, number):
                return record.sums
        return ()

    def clear(self) -> None:
        """Forget all sums: their round is over."""
        self._path.unlink(missing_ok=True)
