"""Brings the board's data into the form of the fleet's contract, and saves the contract for use without a server."""

import contextlib
from dataclasses import replace
from pathlib import Path

from device_runtime.training.task import Bench
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.data import DataSet
from fleet_protocol.data.contract import CONTRACT_FILE, DataContract, read_contract, reconciled
from fleet_protocol.errors import StorageError
from fleet_protocol.messages import Instructions


class Agreement:
    """Brings a board's data into the form of each offer's contract; caches the last result, since offers repeat it."""

    def __init__(self, folder: Path) -> None:
        """Create an agreement whose contract is saved in the agent's state folder."""
        self._folder = folder
        self._asked: tuple[DataSet, DataContract | None, bool] | None = None
        self._agreed: DataSet | None = None

    def bench(self, bench: Bench, offer: Instructions) -> Bench:
        """Return the bench with its data in the form of an offer's contract.

        If a part of the model stays on the board, the board may define its own labels.

        Raises:
            MismatchError: the data does not fit; the message says what to change.
        """
        contract = offer.contract
        own_labels = bool(offer.stays)
        if own_labels and contract is not None:
            contract = contract.model_copy(update={"labels": ()})
        if self._agreed is None or not self._is_answered(bench.data, contract, own_labels=own_labels):
            self._agreed = None
            self._keep(offer.contract)
            self._agreed = reconciled(bench.data, contract, own_labels=own_labels)
            self._asked = (bench.data, contract, own_labels)
        return replace(bench, data=self._agreed)

    def _is_answered(self, data: DataSet, contract: DataContract | None, *, own_labels: bool) -> bool:
        if self._asked is None:
            return False
        asked_data, asked_contract, asked_labels = self._asked
        return asked_data is data and asked_contract == contract and asked_labels == own_labels

    def _keep(self, contract: DataContract | None) -> None:
        """Save the contract, even after a refusal, so that `shoal device doctor` can check the corrected data."""
        if contract is None or contract == read_contract(self._folder):
            return
        with contextlib.suppress(StorageError):  # if the disk is full, the doctor compares with an earlier one
            write_atomically(self._folder / CONTRACT_FILE, contract.to_bytes())
