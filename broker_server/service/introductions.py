"""Asks devices for their profile and status if the server lacks them.

A profile may be lost on its way although the broker has acknowledged it, and anyone who may write a
broker's topics can replace the retained status of a device. So the server asks

- each member, or in a fleet without identities each known device, that is not online, once when the
  server connects, and once whenever such a device goes offline: a connected device answers, and its
  answer replaces what somebody else has retained;
- each device that is online and has no profile, repeatedly, with growing intervals.

A disconnected device does not answer; its broker keeps the question if it keeps the session.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from broker_server.rounds.fleet import Fleet

SETTLING_SECONDS = 3.0  # after a connection, in which retained messages arrive
FIRST_PAUSE_SECONDS = 2.0  # between a status and the first question for a profile
LONGEST_PAUSE_SECONDS = 600.0
GROWTH = 4.0
LOOK_SECONDS = 1.0  # between two checks of the devices


@dataclass
class _ProfileQuestion:
    """The time of the next question for a profile, and the interval to the following one."""

    due: float
    pause: float = FIRST_PAUSE_SECONDS


@dataclass
class Introductions:
    """Decides which devices to ask, and when.

    Attributes:
        devices: devices of the fleet.
        members: returns the ids of the devices that are enrolled; None in a fleet without
            identities.
        ask: sends the question to a device.
    """

    devices: Fleet
    members: Callable[[], Collection[str] | None]
    ask: Callable[[str], None]
    _settled_at: float | None = None
    _asked: set[str] = field(default_factory=set)  # since they were last online
    _questions: dict[str, _ProfileQuestion] = field(default_factory=dict)
    _look_at: float = 0.0

    def follow(self, now: float, *, connected: bool) -> None:
        """Ask the devices that are due at a ``time.monotonic()``; called repeatedly."""
        if not connected:
            # The broker's retained messages may have changed when it is reachable again.
            self._settled_at = None
            self._asked.clear()
            return
        if self._settled_at is None:
            self._settled_at = now + SETTLING_SECONDS
        if now >= max(self._settled_at, self._look_at):
            self._look_at = now + LOOK_SECONDS
            self._ask_absent()
            self._ask_for_profiles(now)

    def _ask_absent(self) -> None:
        self._asked.difference_update(self.devices.online)
        members = self.members()
        candidates = self.devices.absent if members is None else set(members)
        for device in sorted(candidates):
            if device not in self._asked and not self.devices.is_online(device):
                self._asked.add(device)
                self.ask(device)

    def _ask_for_profiles(self, now: float) -> None:
        lacking = self.devices.without_profile
        for device in self._questions.keys() - lacking:
            del self._questions[device]
        for device in sorted(lacking):
            question = self._questions.setdefault(
                device, _ProfileQuestion(now + FIRST_PAUSE_SECONDS)
            )
            if now >= question.due:
                question.pause = min(LONGEST_PAUSE_SECONDS, GROWTH * question.pause)
                question.due = now + question.pause
                self.ask(device)
