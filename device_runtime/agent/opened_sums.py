"""The secure sums for which this board has revealed shares, so that it joins no second one.

The difference between two sums of one version would be the update of the boards in which they
differ. So a board that has revealed shares for a sum takes part in no other sum of the same version
of the same run (`fleet_protocol.secure_sum`), whatever the server requests. The record is on disk
before the shares are sent, so that a restart does not lose it.
"""

from pathlib import Path

from pydantic import ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Offer

_FILE = "opened-sums.json"
_MOST_SUMS = 4096
"""Number of versions that are remembered; longer than any run that we know of."""


class _OpenedSum(FrozenModel):
    """A secure sum.

    Attributes:
        run: id of the server's run.
        weights: digest of the weights that the members received, which differs for every version
            and tier.
    """

    run: str
    weights: str


class _Record(FrozenModel):
    """The file's content: the oldest sum first."""

    sums: tuple[_OpenedSum, ...] = ()


class OpenedSums:
    """The sums for which this board has revealed shares.

    Args:
        folder: the agent's state folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE

    def require_new(self, offer: Offer) -> None:
        """Refuse an offer whose update would go into a second sum of one version.

        Raises:
            RefusedError: it would, or the file that records the sums cannot be read.
        """
        if offer.upload.summing is None:
            return
        opened = self._load().sums
        for choice in offer.choices:
            if _OpenedSum(run=offer.run, weights=choice.weights.digest) in opened:
                raise RefusedError(
                    RefusalReason.SUM_OPENED,
                    f"this board has revealed shares for a secure sum of version {offer.version}"
                    f" of run {offer.run} before; a second sum could reveal single updates. The"
                    " board takes part again from the next version",
                )

    def record(self, offer: Offer, weights: str) -> None:
        """Record, on disk, that the board reveals shares for a sum now.

        Args:
            offer: offer of the task.
            weights: digest of the weights that the board received.

        Raises:
            RefusedError: the file cannot be read.
            StorageError: the disk is full.
        """
        opened = _OpenedSum(run=offer.run, weights=weights)
        sums = self._load().sums
        if opened in sums:
            return
        newest = (*sums, opened)[-_MOST_SUMS:]
        write_atomically(self._path, _Record(sums=newest).model_dump_json().encode())

    def _load(self) -> _Record:
        try:
            return _Record.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return _Record()
        except (OSError, ValidationError) as error:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"cannot read {self._path}, which lists the secure sums for which this board "
                "has revealed shares. If you remove the file, the board takes part in sums "
                f"again, possibly in a second sum of one version: {error}",
            ) from error
