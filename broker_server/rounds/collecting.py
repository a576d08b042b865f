"""One collection of updates: the tasks that were offered together, and the progress of each.

`broker_server.rounds.collection_end` decides when it ends; other modules send, store and wait.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from broker_server.rounds.collection_end import ClosingRule, TaskProgress
from broker_server.stages.update import Distance
from broker_server.store import TaskPhase, TaskRecord, Timing
from broker_server.updates.checks import size_limit
from broker_server.updates.values import ExpectedUpdate
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Done, Instructions
from fleet_protocol.messages.instructions import Summing
from fleet_protocol.messages.values import SUM_LIMIT
from fleet_protocol.secure_sum import Words, threshold

# A device may lower its choice more than once, but each change costs a write.
_MOST_TIER_CHANGES = 3


@dataclass
class OpenTask:
    """A task of the collection in progress.

    Attributes:
        record: the task in the store.
        manifest: manifest of its tier.
        instructions: the contents of its offers.
        heard: ``time.monotonic()`` of the last message from the device about this task.
        offered: ``time.monotonic()`` of the last offer.
        damaged: number of uploads whose digest was wrong.
        tier_changes: number of times that the device changed its tier.
        announced: the device's Done while chunks are still missing.
        manifests: manifests of every tier that the task offers, by id.
        answered: when the answer arrived, by the dispatcher's clock.
        left: since when the device is offline, by the same clock.
        sign: when the device last sent any message, by the same clock; infinite if silence has no
            meaning.
        distance: distance of the update to the sent weights, once that is checked.
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
    def expected(self) -> ExpectedUpdate:
        """Return the required form of the update."""
        return ExpectedUpdate(self.record, self.manifest, self.instructions)

    @cached_property
    def limit_bytes(self) -> int:
        """Return the most bytes that the update may have; it is checked for every chunk."""
        return size_limit(self.expected)

    def choose_tier(self, tier: str) -> bool:
        """Change the task to the tier that the device chose.

        A tier that was not offered is ignored, and so are changes beyond a limit: each waits for
        the disk.

        Returns:
            Whether the tier differs from the previous one.
        """
        # `with_tier` returns the same record for a tier that was not offered.
        record = self.record.with_tier(tier)
        if record is self.record or self.tier_changes >= _MOST_TIER_CHANGES:
            return False
        self.tier_changes += 1
        self.record = record
        self.manifest = self.manifests[tier]
        self.__dict__.pop("limit_bytes", None)  # that of the previous tier
        return True


@dataclass(frozen=True)
class Cohort:
    """Tasks whose updates go into one sum.

    Attributes:
        tasks: the tasks by device.
        summing: the instructions to their devices.
    """

    tasks: Mapping[str, OpenTask]
    summing: Summing

    @property
    def received(self) -> list[OpenTask]:
        """Return the tasks whose updates have arrived."""
        received = []
        for task in self.tasks.values():
            if task.record.phase is TaskPhase.RECEIVED:
                received.append(task)
        return received

    def require(self, count: int, members: int) -> None:
        """Check that enough devices, or updates, are left for a sum.

        Args:
            count: number that is left.
            members: number of devices that made shares.

        Raises:
            RefusedError: too few are left.
        """
        # As the devices compute it, or their shares would not open the sum.
        least = threshold(members, self.summing.least)
        if count < least:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"{count} are left for a secure sum, which needs at least {least}",
            )


@dataclass(frozen=True)
class CohortSum:
    """The sum of the updates of a cohort.

    Attributes:
        total: integers, see `fleet_protocol.secure_sum.fixed_point`.
        tasks: tasks that contributed updates.
    """

    total: Words
    tasks: Sequence[OpenTask]


@dataclass
class Collection:
    """Tasks that were offered together.

    Attributes:
        number: number of the round.
        kind: kind of the tasks.
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
        """Return when the collection ends, by the dispatcher's clock."""
        return self.rule.deadline

    def note_progress(self, now: float, is_online: Callable[[str], bool]) -> list[TaskProgress]:
        """Record which answers have arrived and which devices are offline.

        Args:
            now: by the dispatcher's clock.
            is_online: whether a device is online.

        Returns:
            The progress of every task.
        """
        progress = []
        for task in self.tasks.values():
            if task.record.phase.answered:
                # The first time counts: later calls see the same answer.
                task.answered = now if task.answered is None else task.answered
                task.left = None
            elif is_online(task.record.device):
                # A device that came back is waited for again.
                task.left = None
            elif task.left is None:
                task.left = now
            progress.append(TaskProgress(task.record.phase, task.answered, task.left))
        return progress

    def timings(self) -> dict[str, Timing]:
        """Return for each task when it was answered, or since when its device is offline."""
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
        # An answer is never withdrawn, so the list is searched only once for each new answer.
        self._unanswered = _without_answer(self._unanswered)
        return self._unanswered

    def cohorts(self) -> list[Cohort]:
        """Return the tasks whose updates go into sums, by plan, in even parts of `SUM_LIMIT`."""
        plans: dict[tuple[str, Summing], list[OpenTask]] = {}
        for task in self.tasks.values():
            summing = task.instructions.upload.summing
            if summing is not None:
                # One sum has one set of instructions, so they are part of the key.
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
    return [task for task in tasks if not task.record.phase.answered]
