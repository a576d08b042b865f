"""Logs the data findings of each board by name, before the board's first update counts."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from broker_server.rounds.advice import TEST_SET_EVENT
from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from fleet_protocol.data.terms import DataContract

_LOG = logging.getLogger(__name__)
_MOST_CHANGES = 20  # per board and run: a board whose findings keep changing must not fill the log

EVENT = "data-looks-wrong"
"""Kind of the log lines."""

_ADD_SAMPLES = "add the server's own samples as [evaluation.data] of fleet.toml"
_UNDESCRIBED = (
    "no contract defines a sample, so boards that read labels, columns or scale differently "
    f"go unnoticed: {_ADD_SAMPLES}, or names of labels and columns, and the range of values, "
    "as [contract]"
)
_UNSCALED = (
    "the contract does not define the scale of values, so boards that scale them differently go "
    f"unnoticed: {_ADD_SAMPLES}, or the lowest and the highest value in [contract]: range = "
    "[<lowest>, <highest>]"
)


def note_undescribed(contracts: Mapping[str, DataContract], reporter: Reporter) -> None:
    """Warn at the start of a run about what no contract defines, and say how to add it."""
    # A summary or a range is enough to compare what boards read.
    described = all(contract.summary or contract.range for contract in contracts.values())
    if contracts and described:
        return
    text = _UNSCALED if contracts else _UNDESCRIBED
    _LOG.warning(text)
    reporter.note("no-contract", text)


def note_test_set(findings: Sequence[str], reporter: Reporter) -> None:
    """Warn at the start of a run about what looks wrong in the server's own samples."""
    for finding in findings:
        _LOG.warning("the test set may be faulty: %s", finding)
        reporter.note(TEST_SET_EVENT, finding)


class DataFindings:
    """Logs the data findings of boards, once per board and change."""

    def __init__(self, fleet: Fleet, reporter: Reporter) -> None:
        """Start with no findings logged for a run."""
        self._fleet = fleet
        self._reporter = reporter
        self._noted: dict[str, tuple[str, ...]] = {}
        self._changes: Counter[str] = Counter()

    def log(self, device: str, number: int | None) -> None:
        """Log the findings that a device reports now, unless they are logged already.

        Args:
            device: id of the device.
            number: number of the round, if any.
        """
        findings = self._fleet.findings(device)
        noted = self._noted.get(device, ())
        if findings == noted or self._changes[device] >= _MOST_CHANGES:
            return
        self._noted[device] = findings
        self._changes[device] += 1
        for finding in findings:
            if finding not in noted:
                _LOG.warning("the data of %s may be faulty: %s", device, finding)
                self._reporter.note(EVENT, finding, number, device)
        if not findings:
            self._reporter.note(
                EVENT, "resolved: its data no longer has any findings", number, device
            )
