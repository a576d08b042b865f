"""Decides when a collection of updates ends, by pure functions of answers, absences and time.

Screens run later, when `broker_server.rounds.new_version` makes the version.

A round does not wait for devices that are gone. It closes at the first of these events: every
selected device has answered; the wanted number of updates has arrived, if more were requested
(over-selection: Bonawitz et al., 2019, "Towards Federated Learning at Scale: System Design",
https://arxiv.org/abs/1902.01046, section 2.2); a quorum exists and all other devices have been
offline for the grace period; the deadline. Refused updates do not count among the requested ones: a
device that sends invalid updates must not cost the others their round.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from broker_server.store import TaskPhase
from broker_server.store.machine import RoundEvent

GRACE_SHARE = 0.25  # share of the slowest answer's time, if no grace is configured


@dataclass(frozen=True)
class ClosingRule:
    """When a collection closes. Times are those of the dispatcher's clock, in seconds.

    Attributes:
        share: share of the wanted updates, rounded up, that makes a quorum.
        wanted: number of updates after which the collection does not wait for more.
        opened: when the offers were sent.
        deadline: when the collection ends.
        grace: how long to wait for an offline device to return; None for a quarter of the slowest
            answer's time.
        settling: the minimal grace when a server has just started and does not know yet which
            devices are online.
    """

    share: float
    wanted: int
    opened: float
    deadline: float
    grace: float | None = None
    settling: float = 0.0

    def needed(self, asked: int, refused: int) -> int:
        """Return the number of updates that make a quorum.

        Args:
            asked: number of selected devices.
            refused: number of devices whose updates were refused.
        """
        return quorum_size(self.share, min(self.wanted, asked - refused))


class TaskProgress(NamedTuple):
    """The progress of one task of a collection."""

    phase: TaskPhase
    answered: float | None = None  # when its answer came, None if it has not
    left: float | None = None  # since when its device is offline; None while it is online


@dataclass(frozen=True)
class Decision:
    """The decision about a collection."""

    event: RoundEvent | None = None  # the reason for its end; None to wait
    until: float = math.inf  # when to decide again at the latest
    reason: str = ""  # why it is given up


def quorum_size(share: float, asked: int) -> int:
    """Return the number of answers needed: a share of those requested, rounded up, at least one."""
    # Rounded first: 0.07 * 100 is a little more than 7, and must not need an eighth answer.
    return max(1, math.ceil(round(share * asked, 9)))


def decide(progress: Collection[TaskProgress], rule: ClosingRule, now: float) -> Decision:
    """Decide whether a collection is over.

    Without a quorum it is given up at the deadline, or as soon as a quorum is impossible. With a
    quorum it ends at the first of these: every device has answered, the wanted number has, the
    deadline, all others have been offline for the grace period.
    """
    waiting = []
    phases: Counter[TaskPhase] = Counter()
    received = 0
    for task in progress:
        phases[task.phase] += 1
        received += task.phase.arrived
        if not task.phase.answered:
            waiting.append(task)
    needed = rule.needed(len(progress), phases[TaskPhase.REFUSED])
    late = now >= rule.deadline
    if received < needed:
        reachable = received + len(waiting) >= needed
        if waiting and reachable and not late:
            return Decision(until=rule.deadline)
        reason = _shortage(phases, received, needed, late=late)
        return Decision(RoundEvent.GIVE_UP, now, reason)
    if not waiting:
        return Decision(RoundEvent.ANSWERED, now)
    if late:
        return Decision(RoundEvent.DEADLINE, now)
    if received >= rule.wanted:
        return Decision(RoundEvent.ENOUGH, now)
    patience = _end_of_patience(progress, waiting, rule)
    if now >= patience:
        return Decision(RoundEvent.REST_AWAY, now)
    return Decision(until=min(patience, rule.deadline))


def _end_of_patience(
    progress: Collection[TaskProgress], waiting: Sequence[TaskProgress], rule: ClosingRule
) -> float:
    """Return until when to wait for devices that have not answered.

    It is the end of the grace period of the last device to go offline; infinite while one of them
    is online.
    """
    last_left = -math.inf
    for task in waiting:
        if task.left is None:
            return math.inf
        last_left = max(last_left, task.left)
    return last_left + _grace(progress, rule)


def _grace(progress: Collection[TaskProgress], rule: ClosingRule) -> float:
    grace = rule.grace
    if grace is None:
        answers = []
        for task in progress:
            if task.answered is not None:
                answers.append(task.answered)
        slowest = max(answers, default=rule.opened)
        grace = GRACE_SHARE * (slowest - rule.opened)
    return max(grace, rule.settling)


def _shortage(phases: Counter[TaskPhase], received: int, needed: int, *, late: bool) -> str:
    """Describe a missing quorum, from the number of tasks in each phase."""
    silent = phases[TaskPhase.OFFERED] + phases[TaskPhase.MISSED]
    when = "at the deadline" if late else "with no more expected"
    return (
        f"{received} of {phases.total()} updates {when}, {needed} needed ({silent} silent,"
        f" {phases[TaskPhase.DECLINED]} declined, {phases[TaskPhase.REFUSED]} refused)"
    )
