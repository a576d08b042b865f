"""Declines boards whose own labels are in a different order from those of the first board."""

import logging

from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.service.data_findings import EVENT

_LOG = logging.getLogger(__name__)
_DECLINED = "declined, data-mismatch: `labels` in [data] of its device.toml are not"


class LabelOrders:
    """Compares the own labels of boards in a run.

    The server cannot know which of two boards is right, so the order of the first board applies
    until that board reports another.

    Args:
        fleet: the boards.
        reporter: reports the run.
        compared: whether orders are compared; else no board is declined.
    """

    def __init__(self, fleet: Fleet, reporter: Reporter, *, compared: bool) -> None:
        self._fleet = fleet
        self._reporter = reporter
        self._compared = compared
        self._first = ""
        self._noted: dict[str, str] = {}
        for device in fleet.online:
            self.check(device)

    def check(self, device: str) -> None:
        """Decline a device, or accept it again, according to the labels that it reports now."""
        if not self._compared:
            return
        before = self._first
        if not self._order(before):
            self._first = device if self._order(device) else ""
        if device in {before, self._first}:  # the order that applies may have changed
            for online_device in self._fleet.online:
                self._judge(online_device)
        self._judge(device)

    def _order(self, device: str) -> str | None:
        return self._fleet.labels_digest(device)

    def _judge(self, device: str) -> None:
        # A board that names no order agrees with every order.
        orders = {self._order(device), self._order(self._first)} - {None}
        declined = self._fleet.declined
        if len(orders) < 2:
            if declined.get(device, "").startswith(_DECLINED):
                del declined[device]
            return
        text = (
            f"{_DECLINED} those of {self._first}, or are in another order, and no contract"
            " defines the right ones; list them for all boards as labels in [contract] of"
            " fleet.toml, or write the same line on both boards"
        )
        if declined.get(device) == text:
            return
        declined[device] = text
        # a device that connects repeatedly must not fill the log
        if self._noted.get(device) == text:
            return
        self._noted[device] = text
        _LOG.warning("%s is not selected: %s", device, text)
        self._reporter.note(EVENT, text, device=device)
