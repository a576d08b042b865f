"""Decides when a collection of answers is over: pure functions of answers, absences and the time.

A round does not wait for devices that are gone. It closes when every device that was asked has
answered; when as many updates as were wanted are there, where more were asked for (over-selection:
Bonawitz et al., 2019, "Towards Federated Learning at Scale: System Design",
https://arxiv.org/abs/1902.01046, section 2.2); when there is a quorum and the other devices have
been away for the grace; and at its deadline. Updates that the server refused do not count among
those asked for: a device that sends nonsense must not cost the others their round.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from broker_server.store import TaskPhase
from broker_server.store.machine import RoundEvent

GRACE_SHARE = 0.25  # of the time of the slowest that answered, where no grace is configured


@dataclass(frozen=True)
class ClosingRule:
    """When a collection closes. Times are those of the dispatcher's clock, in seconds.

    Attributes:
        share: of the wanted updates, rounded up, that makes a quorum.
        wanted: updates with which no further ones are waited for.
        opened: when the offers were sent.
        deadline: when the collection ends.
        grace: how long a device that left may take to come back; None for a quarter of the time
            that the slowest of those that answered took.
        settling: the least grace, where a server has just started and does not know yet which
            devices are online.
    """

    share: float
    wanted: int
    opened: float
    deadline: float
    grace: float | None = None
    settling: float = 0.0

    def needed(self, asked: int, refused: int) -> int:
        """Return how many updates make a quorum.

        Args:
            asked: devices that were asked.
            refused: devices whose updates were refused.
        """
        return quorum_size(self.share, min(self.wanted, asked - refused))


class TaskProgress(NamedTuple):
    """How far one task of a collection is."""

    phase: TaskPhase
    answered: float | None = None  # when its answer came, None if it has not
    left: float | None = None  # since when its device is away, None while it is online


@dataclass(frozen=True)
class Decision:
    """What to do with a collection."""

    event: RoundEvent | None = None  # what ends it, None to wait
    until: float = math.inf  # when to decide again at the latest
    reason: str = ""  # why it is given up


def quorum_size(share: float, asked: int) -> int:
    """Return how many answers are needed: a share of those asked for, rounded up, at least one."""
    # Rounded first: 0.07 * 100 is a little more than 7, and must not need an eighth answer.
    return max(1, math.ceil(round(share * asked, 9)))


def decide(progress: Collection[TaskProgress], rule: ClosingRule, now: float) -> Decision:
    """Decide whether a collection is over.

    Without a quorum it is given up at the deadline, and as soon as the quorum is out of reach. With
    one it ends at the first of these: every device has answered, as many as wanted have, the
    deadline, all others have been away for the grace.
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
    """Return until when the devices that have not answered are waited for.

    It is the end of the grace of the device that left last; infinite while one of them is online.
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
    when = "at the deadline" if late else "with no more to come"
    return (
        f"{received} of {phases.total()} updates {when}, {needed} needed ({silent} silent,"
        f" {phases[TaskPhase.DECLINED]} declined, {phases[TaskPhase.REFUSED]} refused)"
    )
