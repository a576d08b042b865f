"""One collection of answers: the tasks that were offered together, and how each of them stands.

When it is over is decided in `broker_server.rounds.closing`; sending, storing and waiting are done
by others.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from broker_server.rounds.closing import ClosingRule, TaskProgress
from broker_server.store import TaskPhase, TaskRecord, Timing
from broker_server.updates.checks import size_limit
from broker_server.updates.values import Distance, Expected
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Done, Instructions
from fleet_protocol.messages.instructions import Summing
from fleet_protocol.messages.values import SUM_LIMIT
from fleet_protocol.secure_sum import majority

_MOST_TAKEN = 3


@dataclass
class OpenTask:
    """A task of the collection in progress.

    Attributes:
        manifest: of its tier.
        manifests: of every tier it was offered, by id.
        heard: ``time.monotonic()`` of the last sign of the device about this task.
        offered: the same of the last offer.
        damaged: uploads whose digest was wrong.
        taken: times that the device changed its tier.
        announced: the device's Done while chunks are still missing.
        instructions: what its offers ask of the device.
        answered: when its answer came, on the dispatcher's clock.
        left: since when its device is away, on the same clock.
        sign: the last sign of any kind that its device gave, on the same clock; infinite where
            silence means nothing.
        distance: of its update to what was sent, once that is checked.
    """

    record: TaskRecord
    manifest: Manifest
    instructions: Instructions
    heard: float = -math.inf
    offered: float = -math.inf
    damaged: int = 0
    taken: int = 0
    announced: Done | None = None
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    answered: float | None = None
    left: float | None = None
    sign: float = math.inf
    distance: Distance | None = None

    @property
    def expected(self) -> Expected:
        """Return what the update must be."""
        return Expected(self.record, self.manifest, self.instructions)

    @cached_property
    def limit_bytes(self) -> int:
        """The most bytes that its update may have: asked for with every chunk."""
        return size_limit(self.expected)

    def take(self, tier: str) -> bool:
        """Follow the device to the tier it took; True if it is another one than before.

        One that was not offered changes nothing, nor does a change of mind that is one too many:
        each waits for the disk.
        """
        changed = self.record.with_tier(tier)
        if changed is self.record or self.taken >= _MOST_TAKEN:
            return False
        self.taken += 1
        self.record, self.manifest = changed, self.manifests[tier]
        self.__dict__.pop("limit_bytes", None)
        return True


@dataclass(frozen=True)
class Cohort:
    """Tasks whose updates go into one sum."""

    tasks: Mapping[str, OpenTask]  # by device
    summing: Summing  # what they were told of it

    @property
    def came(self) -> list[OpenTask]:
        """Those whose updates are here."""
        return [task for task in self.tasks.values() if task.record.phase is TaskPhase.RECEIVED]

    def require(self, count: int, members: int) -> None:
        """See that so many devices, or updates, are enough for a sum of which so many members made
        shares.

        Raises:
            RefusedError: they are too few.
        """
        least = max(self.summing.least, majority(members))
        if count < least:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"{count} are left for a secure sum of {least} at least",
            )


@dataclass
class Collection:
    """Tasks that were offered together."""

    number: int
    kind: Literal["train", "statistics"]
    tasks: dict[str, OpenTask]  # by id, ordered by device
    rule: ClosingRule  # when it closes
    _by_device: dict[str, list[OpenTask]] = field(init=False, default_factory=dict)
    _unanswered: list[OpenTask] = field(init=False)

    def __post_init__(self) -> None:
        self._unanswered = list(self.tasks.values())
        for task in self.tasks.values():
            self._by_device.setdefault(task.record.device, []).append(task)

    @property
    def deadline(self) -> float:
        """When it ends, on the dispatcher's clock."""
        return self.rule.deadline

    def look(self, now: float, is_online: Callable[[str], bool]) -> list[TaskProgress]:
        """Note, by the dispatcher's clock, whose answer has come and who is away, and say how every
        task stands.
        """
        for task in self.tasks.values():
            if task.record.phase.answered:
                task.answered = now if task.answered is None else task.answered
                task.left = None
            elif is_online(task.record.device):
                task.left = None
            elif task.left is None:
                task.left = now
        return [
            TaskProgress(task.record.phase, task.answered, task.left)
            for task in self.tasks.values()
        ]

    def timings(self) -> dict[str, Timing]:
        """When each task was answered, and since when the device of one that was not is away."""
        opened = self.rule.opened
        return {
            key: Timing(
                answered=None if task.answered is None else task.answered - opened,
                left=None if task.left is None else task.left - opened,
            )
            for key, task in self.tasks.items()
        }

    def phases(self) -> dict[str, TaskPhase]:
        """Where each task is, by id in the order of the devices."""
        return {key: task.record.phase for key, task in self.tasks.items()}

    def of_device(self, device: str) -> list[OpenTask]:
        """Tasks of a device that are not answered yet."""
        return [task for task in self._by_device.get(device, ()) if not task.record.phase.answered]

    @property
    def unanswered(self) -> list[OpenTask]:
        """Tasks that are not answered yet."""
        self._unanswered = [task for task in self._unanswered if not task.record.phase.answered]
        return self._unanswered

    def cohorts(self) -> list[Cohort]:
        """The tasks whose updates go into sums: those of one plan, in even parts of `SUM_LIMIT` at
        most.
        """
        plans: dict[tuple[str, Summing], list[OpenTask]] = {}
        for task in self.tasks.values():
            summing = task.instructions.upload.summing
            if summing is not None:
                plans.setdefault((task.record.plan_key, summing), []).append(task)
        return [
            Cohort({task.record.device: task for task in items[at::parts]}, summing)
            for (_, summing), items in plans.items()
            for parts in [math.ceil(len(items) / SUM_LIMIT)]
            for at in range(parts)
        ]
