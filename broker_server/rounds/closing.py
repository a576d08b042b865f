"""When a collection of answers is over: pure functions of who has answered, who is away, and the
time.

A round waits for nobody who is gone. It closes when everybody who was asked has answered; when as
many have as were wanted, where more were asked (over-selection: Bonawitz et al., 2019, "Towards
Federated Learning at Scale: System Design", https://arxiv.org/abs/1902.01046, section 2.2); when
there is a quorum and the rest has been away for the grace; and at its deadline. Updates that the
server refused are not counted among those asked: a device that sends nonsense must not cost the
others their round.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from broker_server.store import TaskPhase
from broker_server.store.machine import RoundEvent

GRACE_SHARE = 0.25  # of the time of the slowest that answered, where no grace is configured


@dataclass(frozen=True)
class ClosingRule:
    """When a collection closes. Times are those of the dispatcher's clock, in seconds."""

    share: float  # of the devices that are wanted, rounded up, whose updates make a quorum
    wanted: int  # updates with which nobody else is waited for
    opened: float  # when the offers went out
    deadline: float  # when it ends
    # how long a device that left may take to come back; None for a quarter of the time that the
    # slowest of those that answered took
    grace: float | None = None
    # in any case so long, where a server has just started and does not know yet who is there
    settling: float = 0.0

    def needed(self, asked: int, refused: int) -> int:
        """Updates that make a quorum where so many devices were asked, and the updates of so many
        of them refused.
        """
        return quorum_size(self.share, min(self.wanted, asked - refused))


class TaskProgress(NamedTuple):
    """How one task of a collection stands."""

    phase: TaskPhase  # where it is
    answered: float | None = None  # when its answer came, None if it has not
    left: float | None = None  # since when its device is away, None while it is there


@dataclass(frozen=True)
class Decision:
    """What to do with a collection."""

    event: RoundEvent | None = None  # what ends it, None to wait
    until: float = math.inf  # when to decide again at the latest
    reason: str = ""  # why it is given up


def quorum_size(share: float, asked: int) -> int:
    """Answers needed: a share of those asked, rounded up, at least one."""
    return max(1, math.ceil(round(share * asked, 9)))


def decide(standings: Collection[TaskProgress], rule: ClosingRule, now: float) -> Decision:
    """Whether a collection is over.

    Returns:
        The first of these that holds: everybody answered, as many as wanted did, the deadline, a
            quorum whose rest is away. Where a quorum is lacking and out of reach, or the time is
            over, it is given up.
    """
    received = sum(item.phase.arrived for item in standings)
    waiting = [item for item in standings if not item.phase.answered]
    needed = rule.needed(len(standings), sum(item.phase is TaskPhase.REFUSED for item in standings))
    over = not waiting or now >= rule.deadline
    if received < needed:
        # Where the quorum is out of reach there is nothing to gain by waiting for the deadline.
        if over or received + len(waiting) < needed:
            return Decision(
                RoundEvent.GIVE_UP,
                now,
                _shortage(standings, received, needed, late=now >= rule.deadline),
            )
        return Decision(until=rule.deadline)
    if over:
        return Decision(RoundEvent.DEADLINE if waiting else RoundEvent.ANSWERED, now)
    if received >= rule.wanted:
        return Decision(RoundEvent.ENOUGH, now)
    away = [item.left for item in waiting if item.left is not None]
    if len(away) < len(waiting):
        return Decision(until=rule.deadline)
    last = max(away) + _grace(standings, rule)
    return (
        Decision(RoundEvent.REST_AWAY, now)
        if now >= last
        else Decision(until=min(last, rule.deadline))
    )


def _grace(standings: Collection[TaskProgress], rule: ClosingRule) -> float:
    grace = rule.grace
    if grace is None:
        slowest = max(
            (item.answered for item in standings if item.answered is not None),
            default=rule.opened,
        )
        grace = GRACE_SHARE * (slowest - rule.opened)
    return max(grace, rule.settling)


def _shortage(
    standings: Collection[TaskProgress], received: int, needed: int, *, late: bool
) -> str:
    counts = {phase: sum(item.phase is phase for item in standings) for phase in TaskPhase}
    silent = counts[TaskPhase.OFFERED] + counts[TaskPhase.MISSED]
    return (
        f"{received} of {len(standings)} updates {'at the deadline' if late else 'with no more to come'}, {needed} "
        f"needed ({silent} silent, {counts[TaskPhase.DECLINED]} declined, {counts[TaskPhase.REFUSED]} refused)"
    )
