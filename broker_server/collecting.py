"""One collection of answers: the tasks that were offered together, and whether enough of them have been answered.

Decisions are pure functions of phases and times; sending, storing and waiting are done by others (`desk`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from broker_server.store import TaskPhase, TaskRecord
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Done, TrainSettings

__all__ = [
    "Collection",
    "Decision",
    "OpenTask",
    "Verdict",
    "decide",
    "due_for_nudge",
    "folded_prefix",
    "quorum_of",
]


class Verdict(Enum):
    """What to do with a collection."""

    WAIT = "wait"
    ENOUGH = "enough"
    SHORT = "short"


@dataclass(frozen=True)
class Decision:
    """A verdict with its reason.

    Attributes:
        verdict: what to do.
        reason: why, when it is SHORT.
    """

    verdict: Verdict
    reason: str = ""


@dataclass
class OpenTask:
    """A task of the collection in progress.

    Attributes:
        record: as in the store.
        manifest: of its tier.
        manifests: of every tier it was offered, by id.
        heard: ``time.monotonic()`` of the last sign of the device about this task.
        offered: the same of the last offer.
        damaged: uploads whose digest was wrong.
        announced: the device's Done while chunks are still missing.
        quiet: ``time.monotonic()`` from which on they count as lost if none has come.
        stays: parameters that stay on the device, so that its update must not have them.
    """

    record: TaskRecord
    manifest: Manifest
    heard: float = -math.inf
    offered: float = -math.inf
    damaged: int = 0
    announced: Done | None = None
    quiet: float = math.inf
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    stays: frozenset[str] = frozenset()

    def take(self, tier: str) -> bool:
        """Follow the device to the tier it took.

        Args:
            tier: its id; one that was not offered changes nothing.

        Returns:
            Whether it is another tier than before.
        """
        changed = self.record.taking(tier)
        if changed is self.record:
            return False
        self.record, self.manifest = changed, self.manifests[tier]
        return True


@dataclass
class Collection:
    """Tasks that were offered together.

    Attributes:
        number: of the round.
        kind: of the tasks.
        tasks: by id, ordered by device.
        train: settings that go into the offers.
        quorum: answers needed.
        deadline: ``time.monotonic()`` when it ends.
        strangers: tasks for which a stray chunk was reported, so that each is reported once.
    """

    number: int
    kind: Literal["train", "statistics"]
    tasks: dict[str, OpenTask]
    train: TrainSettings
    quorum: int
    deadline: float
    strangers: set[str] = field(default_factory=set)

    def phases(self) -> dict[str, TaskPhase]:
        """Where each task is, by id in the order of the devices."""
        return {key: task.record.phase for key, task in self.tasks.items()}

    def of_device(self, device: str) -> list[OpenTask]:
        """Tasks of a device that are not answered yet."""
        return [task for task in self.tasks.values() if task.record.device == device and not task.record.phase.answered]

    @property
    def unanswered(self) -> list[OpenTask]:
        """Tasks that are not answered yet."""
        return [task for task in self.tasks.values() if not task.record.phase.answered]


def quorum_of(share: float, asked: int) -> int:
    """Answers needed: a share of those asked, rounded up, at least one."""
    return max(1, math.ceil(round(share * asked, 9)))


def decide(phases: Sequence[TaskPhase], *, quorum: int, now: float, deadline: float) -> Decision:
    """Whether a collection is over.

    Args:
        phases: of its tasks.
        quorum: answers needed.
        now: the clock.
        deadline: on the same clock.

    Returns:
        WAIT while devices may still answer, the deadline has not come and the quorum is within reach; else ENOUGH
        if the quorum is reached.
    """
    received = sum(phase in {TaskPhase.RECEIVED, TaskPhase.MERGED} for phase in phases)
    open_tasks = sum(not phase.answered for phase in phases)
    # Where the quorum is out of reach there is nothing to gain by waiting for the deadline.
    if open_tasks and now < deadline and received + open_tasks >= quorum:
        return Decision(Verdict.WAIT)
    if received >= quorum:
        return Decision(Verdict.ENOUGH)
    when = "at the deadline" if now >= deadline else "with no more to come"
    counts = {phase: sum(other is phase for other in phases) for phase in TaskPhase}
    silent = counts[TaskPhase.OFFERED] + counts[TaskPhase.MISSED]
    return Decision(
        Verdict.SHORT,
        f"{received} of {len(phases)} updates {when}, {quorum} needed "
        f"({silent} silent, {counts[TaskPhase.DECLINED]} declined, {counts[TaskPhase.REFUSED]} refused)",
    )


def due_for_nudge(task: OpenTask, now: float, nudge_seconds: float) -> bool:
    """Whether a device has been silent for so long that it gets its offer again."""
    return not task.record.phase.answered and now - max(task.heard, task.offered) >= nudge_seconds


def folded_prefix(order: Sequence[str], phases: Mapping[str, TaskPhase], done: int) -> list[str]:
    """The tasks that may be folded now without leaving the order of the devices.

    Args:
        order: ids of all tasks, by device.
        phases: of them.
        done: how many of the order were passed before.

    Returns:
        The next ids up to the first that is not answered, those without an update included.
    """
    ready = []
    for task in order[done:]:
        if not phases[task].answered:
            break
        ready.append(task)
    return ready
