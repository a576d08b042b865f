"""Declines boards whose own labels stand in another order than those of the first board."""

import logging

from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.service.data_findings import EVENT

_LOG = logging.getLogger(__name__)
_DECLINED = "declined, data-mismatch: `labels` in [data] of its device.toml are not"


class LabelOrders:
    """Compares what boards say of their own labels in a run.

    The server cannot know which of two boards is right, so the order of the first board that is
    there holds until that board says another.

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
        """Decline a device, or no longer, by what it says of its labels now."""
        if not self._compared:
            return
        before = self._first
        if not self._order(before):
            self._first = device if self._order(device) else ""
        if device in {before, self._first}:  # the order that holds may be another now
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
            f"{_DECLINED} those of {self._first}, or stand in another order, and no contract says "
            "which are right; say them for all boards as labels in [contract] of fleet.toml, or "
            "write the same line on both boards"
        )
        if declined.get(device) == text:
            return
        declined[device] = text
        if self._noted.get(device) == text:  # a device that comes and goes must not fill the log
            return
        self._noted[device] = text
        _LOG.warning("%s is not asked: %s", device, text)
        self._reporter.note(EVENT, text, device=device)
