"""Asks devices to say again who they are, where the server lacks what they said.

A profile may be lost on its way although the broker has acknowledged it, and whoever may write a
broker's topics can replace the retained status of a device. So the server asks

- each member, or in a fleet without identities each device that it knows, which is not online, once
  when it connects, and once whenever such a device goes: one that is there answers, and its answer
  replaces what somebody else has retained;
- each device that is online and has no profile, again and again, less and less often.

A device that is gone does not answer; its broker keeps the question, if it keeps its session.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from broker_server.rounds.fleet import Fleet

SETTLING_SECONDS = 3.0  # after a connection, in which retained messages come
FIRST_PAUSE_SECONDS = 2.0  # between a status and the first question for a profile
LONGEST_PAUSE_SECONDS = 600.0
GROWTH = 4.0
LOOK_SECONDS = 1.0  # between two looks at the devices


@dataclass
class _Question:
    """The next question for a profile: when, and how long after it the one after that."""

    due: float
    pause: float = FIRST_PAUSE_SECONDS


@dataclass
class Introductions:
    """Decides whom to ask, and when.

    Attributes:
        devices: of the fleet.
        members: returns the ids of the devices that are enrolled; None in a fleet without
            identities.
        ask: asks a device.
    """

    devices: Fleet
    members: Callable[[], Collection[str] | None]
    ask: Callable[[str], None]
    _settled_at: float | None = None
    _asked: set[str] = field(default_factory=set)  # since they were online last
    _questions: dict[str, _Question] = field(default_factory=dict)
    _look_at: float = 0.0

    def follow(self, now: float, *, connected: bool) -> None:
        """Ask whom there is to ask at a ``time.monotonic()``; called again and again."""
        if not connected:
            # What the broker knows may be another thing when it is back.
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
            question = self._questions.setdefault(device, _Question(now + FIRST_PAUSE_SECONDS))
            if now >= question.due:
                question.pause = min(LONGEST_PAUSE_SECONDS, GROWTH * question.pause)
                question.due = now + question.pause
                self.ask(device)
