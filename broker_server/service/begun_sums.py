"""The secure sums whose opening has begun, on disk, so that a server that starts again ends it.

Boards reveal shares for one sum of a version only (`device_runtime.agent.opened_sums`). A server
that ends between the first share and the stored mean must finish that sum: the boards would take
part in no other from this version. The file holds public keys and names; shares and masked updates
do not show an update, and masked updates are among the updates of the store.
"""

import contextlib
from pathlib import Path

from pydantic import ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages.values import MemberKeys

_FILE = "begun-sums.json"


class BegunSum(FrozenModel):
    """One sum whose opening has begun.

    Attributes:
        devices: of its cohort, in order.
        keys: public keys of those that make shares.
        members: devices that share masks.
        sent: devices whose masked updates are in the sum.
    """

    devices: tuple[str, ...]
    keys: dict[str, MemberKeys]
    members: tuple[str, ...]
    sent: tuple[str, ...]


class _Record(FrozenModel):
    """The file.

    Attributes:
        run: of the round.
        round: whose sums these are.
        sums: in the order in which their opening began.
    """

    run: str
    round: int
    sums: tuple[BegunSum, ...]


class BegunSums:
    """The file of the sums whose opening has begun.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE

    def add(self, run: str, number: int, begun: BegunSum) -> None:
        """Write, before any share is asked for, that the opening of a sum begins.

        Raises:
            StorageError: the disk is full.
        """
        record = _Record(run=run, round=number, sums=(*self.load(run, number), begun))
        write_atomically(self._path, record.model_dump_json().encode())

    def load(self, run: str, number: int) -> tuple[BegunSum, ...]:
        """Return the begun sums of a round; none where the file is of another round, or damaged."""
        # A damaged file costs this round, which boards then take no further part in.
        with contextlib.suppress(OSError, ValidationError):
            record = _Record.model_validate_json(self._path.read_bytes())
            if (record.run, record.round) == (run, number):
                return record.sums
        return ()

    def clear(self) -> None:
        """Forget all sums: their round is over."""
        self._path.unlink(missing_ok=True)
