"""What boards say looks wrong in their data, in the log of a run by name, before an update of theirs counts."""

import logging
from collections import Counter
from collections.abc import Mapping

from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from fleet_protocol.data.contract import DataContract

_LOG = logging.getLogger(__name__)
_MOST_CHANGES = 20  # of one board in a run: a board that says something else each time must not fill the log

EVENT = "data-looks-wrong"
"""Kind of the lines of the log."""

_ADD_SAMPLES = "add the server's own samples as [evaluation.data] of fleet.toml"
_UNDESCRIBED = (
    "nothing says what a sample is, so boards that read labels, columns or scale differently are not found: "
    f"{_ADD_SAMPLES}, or names of labels and columns, and the range of values, as [contract]"
)
_UNSCALED = (
    "nothing says how values look, so boards that scale them differently are not found: "
    f"{_ADD_SAMPLES}, or say the lowest and the highest value in [contract]: range = [<lowest>, <highest>]"
)


def note_undescribed(contracts: Mapping[str, DataContract], reporter: Reporter) -> None:
    """Say of a run that begins what no contract says of its samples, and how to add it."""
    described = all(contract.summary or contract.range for contract in contracts.values())
    if contracts and described:
        return
    text = _UNSCALED if contracts else _UNDESCRIBED
    _LOG.warning(text)
    reporter.note("no-contract", text)


class DataFindings:
    """Notes what boards say of their data, once per board and change."""

    def __init__(self, fleet: Fleet, reporter: Reporter) -> None:
        """Of a run, of which nothing is noted yet."""
        self._fleet = fleet
        self._reporter = reporter
        self._noted: dict[str, tuple[str, ...]] = {}
        self._changes: Counter[str] = Counter()

    def look(self, device: str, number: int | None) -> None:
        """Note what a device says now, in a round if there is one, unless that is noted already."""
        findings = self._fleet.findings(device)
        noted = self._noted.get(device, ())
        if findings == noted or self._changes[device] >= _MOST_CHANGES:
            return
        self._noted[device] = findings
        self._changes[device] += 1
        for finding in findings:
            if finding not in noted:
                _LOG.warning("the data of %s looks wrong: %s", device, finding)
                self._reporter.note(EVENT, finding, number, device)
        if not findings:
            self._reporter.note(EVENT, "no longer: nothing looks wrong in its data", number, device)
