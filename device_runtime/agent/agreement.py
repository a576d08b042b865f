"""Brings the board's data into the form of the fleet's contract, and saves the contract.

`shoal device doctor` uses the saved contract without a server.
"""

import contextlib
from pathlib import Path

from device_runtime.training.agreed_data import AgreedData, terms_of
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.data import DataSet
from fleet_protocol.data.terms import CONTRACT_FILE, DataContract, read_contract
from fleet_protocol.errors import StorageError
from fleet_protocol.messages import Instructions


class Agreement:
    """Brings a board's data into the form of each offer's contract.

    It caches the last result, because the server repeats offers.
    """

    def __init__(self, folder: Path) -> None:
        """Create an agreement whose contract is saved in the agent's state folder."""
        self._folder = folder
        self._last: AgreedData | None = None

    def apply(self, raw: DataSet, offer: Instructions) -> AgreedData:
        """Return the samples in the form of an offer's contract.

        If a part of the model stays on the board, the board may define its own labels.

        Args:
            raw: the samples from the reader.
            offer: offer with the contract.

        Raises:
            MismatchError: the data does not fit; the message says what to change.
            DataError: a file that holds the samples can no longer be read.
        """
        terms = terms_of(offer)
        last = self._last
        if last is not None and last.raw is raw and last.terms == terms:
            return last
        # So that two copies of the samples are not in memory at the same time.
        self._last = None
        del last
        self._save_contract(offer.contract)
        agreed = terms.apply(raw)
        self._last = agreed
        return agreed

    def renew(self, agreed: AgreedData) -> None:
        """Use samples that a task has read again, and release the previous ones."""
        self._last = agreed

    def _save_contract(self, contract: DataContract | None) -> None:
        """Save the contract, even where the data does not fit.

        `shoal device doctor` can then check the corrected data.
        """
        if contract is None or contract == read_contract(self._folder):
            return
        # If the disk is full, the doctor compares with the contract saved before.
        with contextlib.suppress(StorageError):
            write_atomically(self._folder / CONTRACT_FILE, contract.to_bytes())
