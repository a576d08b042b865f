"""Examines a board's data for faults, once per load and contract, and keeps the findings."""

from pathlib import Path

from device_runtime.agent.journal import Journal
from fleet_protocol.data import DataSet
from fleet_protocol.data.column_order import order_columns
from fleet_protocol.data.comparison import find_problems
from fleet_protocol.data.terms import DataContract, read_contract
from fleet_protocol.errors import MismatchError, ShoalError
from fleet_protocol.messages.bounds import FINDING_CHARACTERS, MOST_FINDINGS


def sentences(data: DataSet, contract: DataContract | None) -> tuple[str, ...]:
    """Return faults in the samples, and differences from the fleet's contract.

    Data that does not fit the contract is examined without it, because training on it is refused
    anyway.
    """
    summary = None if contract is None else contract.summary
    try:
        fitting = data if contract is None else order_columns(data, contract)
    except MismatchError:
        fitting = data
        summary = None
    try:
        data_findings = find_problems(fitting, summary)
    except ShoalError:  # a missing value, or a file that changes meanwhile: training reports that
        return ()
    return tuple(finding.text[:FINDING_CHARACTERS] for finding in data_findings[:MOST_FINDINGS])


class DataFindings:
    """The findings in the agent's current data, compared with the last contract it received."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        """Compare with the contract in the state folder until another one arrives."""
        self._contract = read_contract(folder)
        self._journal = journal
        self._examined: tuple[DataSet, DataContract | None] | None = None
        self._sentences: tuple[str, ...] = ()

    def compare_with(self, contract: DataContract | None) -> None:
        """Compare with another contract from now on; None for a fleet without a contract."""
        self._contract = contract

    def find(self, data: DataSet) -> tuple[str, ...]:
        """Return one sentence for each finding; log new findings."""
        if self._is_examined(data):
            return self._sentences
        before = self._sentences
        self._sentences = sentences(data, self._contract)
        self._examined = (data, self._contract)
        for sentence in self._sentences:
            if sentence not in before:
                self._journal.warning(f"possible fault in the data: {sentence}")
        return self._sentences

    def _is_examined(self, data: DataSet) -> bool:
        if self._examined is None:
            return False
        examined_data, contract = self._examined
        return examined_data is data and contract == self._contract
