"""The state of one secure sum in the server: its step, its members, and their answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from broker_server.rounds.collecting import Cohort
from fleet_protocol.messages import Shares
from fleet_protocol.messages.values import MemberKeys
from fleet_protocol.secure_sum.checks import Dealings
from fleet_protocol.secure_sum.opening import Revealed


class SumStep(IntEnum):
    """The steps of a cohort, in this order."""

    KEYS = 0
    SHARES = 1
    CHECKS = 2  # answers to a challenge
    OPENINGS = 3  # of shares that a member disputes; skipped if nobody does
    VECTORS = 4
    SECRETS = 5
    PAIR_KEYS = 6  # if shares restore the wrong key of an offline device


Answers = dict[str, Mapping[str, str]]
"""The answers in a step, by device."""


def content_by_step(message: Shares) -> dict[SumStep, Mapping[str, str]]:
    """Return the content of a message by the step that it answers."""
    return {
        SumStep.SHARES: message.sealed,
        SumStep.CHECKS: message.checks,
        SumStep.OPENINGS: message.openings,
        SumStep.SECRETS: message.revealed,
        SumStep.PAIR_KEYS: message.pair_keys,
    }


@dataclass
class SecureSum:
    """The secure sum of one cohort.

    Attributes:
        cohort: the tasks whose updates go into it.
        seconds: how long a step may take before the vectors are due.
        until: when the step ends, by the clock of the round.
        members: devices that take part from this step on.
        step: the answers that the cohort waits for.
        keys: keys of the devices that have sent theirs; from the second step on, of those that make
            shares.
        challenge: question to the members about each dealer.
        disputes: members whose shares a dealer must open, by dealer.
        sent: devices whose masked updates are in the sum.
        unmatched: devices whose shares restored a wrong mask key.
        answers: the answers by step and device.
    """

    cohort: Cohort
    seconds: float
    until: float
    members: tuple[str, ...]
    step: SumStep = SumStep.KEYS
    keys: dict[str, MemberKeys] = field(default_factory=dict)
    challenge: str = ""
    disputes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    sent: tuple[str, ...] = ()
    unmatched: frozenset[str] = frozenset()
    answers: dict[SumStep, Answers] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Return the digest of the weights that all members were sent."""
        return next(iter(self.cohort.tasks.values())).record.weights.digest

    def of_step(self, step: SumStep) -> Answers:
        """Return the answers in a step, by device."""
        return self.answers.setdefault(step, {})

    def content_for(self, device: str) -> dict[str, object]:
        """Return the message to a device in this step, as fields of `Sum`; empty if it waits."""
        match self.step:
            case SumStep.SHARES:
                return {"keys": self.keys}
            case SumStep.CHECKS:
                dealt = self.of_step(SumStep.SHARES)
                # Sealed for this device only: the server forwards what it cannot read.
                sealed = {dealer: dealt[dealer][device] for dealer in dealt}
                return {"dealt": sealed, "challenge": self.challenge}
            case SumStep.OPENINGS if device in self.disputes:
                return {"disputed": sorted(self.disputes[device])}
            case SumStep.VECTORS:
                return {"members": self.members}
            case SumStep.SECRETS if device in self.sent:
                return {"sent": self.sent}
            case SumStep.PAIR_KEYS if device in self.sent:
                return {"unmatched": sorted(self.unmatched)}
        return {}

    def expected_names(self, step: SumStep, device: str) -> frozenset[str]:
        """Return the names in a device's answer to a step; none if no answer is due."""
        if device not in self.members and device not in self.keys:
            return frozenset()
        if step >= SumStep.SECRETS and device not in self.sent:
            return frozenset()
        names = {
            SumStep.SHARES: self.keys.keys(),
            SumStep.CHECKS: self.of_step(SumStep.SHARES).keys(),
            SumStep.OPENINGS: self.disputes.get(device, ()),
            SumStep.SECRETS: self.members,
            SumStep.PAIR_KEYS: self.unmatched,
        }
        return frozenset(names[step])

    def awaited(self) -> list[str]:
        """Return the devices whose answer this step waits for."""
        answers = self.keys if self.step == SumStep.KEYS else self.of_step(self.step)
        devices = self.disputes if self.step == SumStep.OPENINGS else self.members
        awaited = []
        for device in devices:
            is_open = not self.cohort.tasks[device].record.phase.answered
            if is_open and device not in answers:
                awaited.append(device)
        return awaited

    def remaining(self) -> list[str]:
        """Return the members that have answered this step."""
        awaited = set(self.awaited())
        remaining = []
        for device in self.members:
            is_open = not self.cohort.tasks[device].record.phase.answered
            # A member that opens no share is found by the decision on the disputes.
            if is_open and (device not in awaited or self.step == SumStep.OPENINGS):
                remaining.append(device)
        return remaining

    def dealings(self) -> Dealings:
        """Return what the members have dealt and answered."""
        return Dealings(
            place=self.place,
            least=self.cohort.summing.least,
            cohort=self.keys,
            dealt=self.of_step(SumStep.SHARES),
            challenge=self.challenge,
            answers=self.of_step(SumStep.CHECKS),
        )

    def revealed(self) -> Revealed:
        """Return what is known of the sum once its vectors have arrived."""
        return Revealed(
            place=self.place,
            least=self.cohort.summing.least,
            cohort=self.keys,
            members=frozenset(self.members),
            sent=frozenset(self.sent),
            shares=self.of_step(SumStep.SECRETS),
            pair_keys=self.of_step(SumStep.PAIR_KEYS),
        )
