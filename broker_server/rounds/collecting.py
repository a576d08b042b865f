"""One collection of answers: the tasks that were offered together, and the progress of each.

When it is over is decided in `broker_server.rounds.closing`; sending, storing and waiting are done
elsewhere.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from fleet_protocol.secure_sum import Words, threshold

_MOST_TIER_CHANGES = 3


@dataclass
class OpenTask:
    """A task of the collection in progress.

    Attributes:
        record: the task as the store has it.
        manifest: of its tier.
        instructions: what its offers ask of the device.
        heard: ``time.monotonic()`` of the last sign of the device about this task.
        offered: the same of the last offer.
        damaged: uploads whose digest was wrong.
        tier_changes: how often the device changed its tier.
        announced: the device's Done while chunks are still missing.
        manifests: of every tier that the task was offered as, by id.
        answered: when the answer came, on the dispatcher's clock.
        left: since when the device is away, on the same clock.
        sign: the last sign of any kind that the device gave, on the same clock; infinite where
            silence means nothing.
        distance: of the update to what was sent, once that is checked.
    """

    record: TaskRecord
    manifest: Manifest
    instructions: Instructions
    heard: float = -math.inf
    offered: float = -math.inf
    damaged: int = 0
    tier_changes: int = 0
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
        """Return the most bytes that the update may have; it is asked for with every chunk."""
        return size_limit(self.expected)

    def choose_tier(self, tier: str) -> bool:
        """Follow the device to the tier that it chose.

        A tier that was not offered changes nothing, nor does one change too many: each waits for
        the disk.

        Returns:
            Whether the tier is another one than before.
        """
        record = self.record.with_tier(tier)
        if record is self.record or self.tier_changes >= _MOST_TIER_CHANGES:
            return False
        self.tier_changes += 1
        self.record = record
        self.manifest = self.manifests[tier]
        self.__dict__.pop("limit_bytes", None)  # that of the tier before
        return True


@dataclass(frozen=True)
class Cohort:
    """Tasks whose updates go into one sum.

    Attributes:
        tasks: by device.
        summing: what their devices were asked.
    """

    tasks: Mapping[str, OpenTask]
    summing: Summing

    @property
    def received(self) -> list[OpenTask]:
        """Return the tasks whose updates are here."""
        received = []
        for task in self.tasks.values():
            if task.record.phase is TaskPhase.RECEIVED:
                received.append(task)
        return received

    def require(self, count: int, members: int) -> None:
        """Check that enough devices, or updates, are left for a sum.

        Args:
            count: how many are left.
            members: how many made shares.

        Raises:
            RefusedError: they are too few.
        """
        least = threshold(members, self.summing.least)
        if count < least:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"{count} are left for a secure sum of {least} at least",
            )


@dataclass(frozen=True)
class CohortSum:
    """The sum of the updates of a cohort.

    Attributes:
        total: whole numbers, see `fleet_protocol.secure_sum.fixed_point`.
        tasks: whose updates are in it.
    """

    total: Words
    tasks: Sequence[OpenTask]


@dataclass
class Collection:
    """Tasks that were offered together.

    Attributes:
        number: of the round.
        kind: of the tasks.
        tasks: by id, in the order of their devices.
        rule: when the collection closes.
    """

    number: int
    kind: Literal["train", "statistics"]
    tasks: dict[str, OpenTask]
    rule: ClosingRule
    _by_device: dict[str, list[OpenTask]] = field(init=False, default_factory=dict)
    _unanswered: list[OpenTask] = field(init=False)

    def __post_init__(self) -> None:
        self._unanswered = list(self.tasks.values())
        for task in self.tasks.values():
            self._by_device.setdefault(task.record.device, []).append(task)

    @property
    def deadline(self) -> float:
        """Return when the collection ends, on the dispatcher's clock."""
        return self.rule.deadline

    def note_progress(self, now: float, is_online: Callable[[str], bool]) -> list[TaskProgress]:
        """Note which answers have come and which devices are away.

        Args:
            now: on the dispatcher's clock.
            is_online: whether a device is there.

        Returns:
            The progress of every task.
        """
        progress = []
        for task in self.tasks.values():
            if task.record.phase.answered:
                task.answered = now if task.answered is None else task.answered
                task.left = None
            elif is_online(task.record.device):
                task.left = None
            elif task.left is None:
                task.left = now
            progress.append(TaskProgress(task.record.phase, task.answered, task.left))
        return progress

    def timings(self) -> dict[str, Timing]:
        """Return when each task was answered, or since when its device is away, by task."""
        timings = {}
        for key, task in self.tasks.items():
            answered = self._since_opening(task.answered)
            left = self._since_opening(task.left)
            timings[key] = Timing(answered=answered, left=left)
        return timings

    def _since_opening(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.rule.opened

    def phases(self) -> dict[str, TaskPhase]:
        """Return the phase of each task, by id in the order of the devices."""
        return {key: task.record.phase for key, task in self.tasks.items()}

    def unanswered_of(self, device: str) -> list[OpenTask]:
        """Return the tasks of a device that are not answered yet."""
        return _without_answer(self._by_device.get(device, ()))

    @property
    def unanswered(self) -> list[OpenTask]:
        """Return the tasks that are not answered yet."""
        # No answer is taken back, so the list is searched only once for each that comes.
        self._unanswered = _without_answer(self._unanswered)
        return self._unanswered

    def cohorts(self) -> list[Cohort]:
        """Return the tasks whose updates go into sums, by plan, in even parts of `SUM_LIMIT`."""
        plans: dict[tuple[str, Summing], list[OpenTask]] = {}
        for task in self.tasks.values():
            summing = task.instructions.upload.summing
            if summing is not None:
                plans.setdefault((task.record.plan_key, summing), []).append(task)
        cohorts = []
        for (_, summing), tasks in plans.items():
            count = math.ceil(len(tasks) / SUM_LIMIT)
            # Every count-th task, so that the parts differ by one member at most.
            for first in range(count):
                members = {task.record.device: task for task in tasks[first::count]}
                cohorts.append(Cohort(members, summing))
        return cohorts


def _without_answer(tasks: Iterable[OpenTask]) -> list[OpenTask]:
    unanswered = []
    for task in tasks:
        if not task.record.phase.answered:
            unanswered.append(task)
    return unanswered
