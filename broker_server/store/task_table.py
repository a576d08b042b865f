"""The tasks of a store: what each device received in a round, and how it answered."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    Integer,
    Select,
    bindparam,
    cast,
    func,
    insert,
    select,
    update,
)

from broker_server.store import schema
from broker_server.store.database import Database
from broker_server.store.records import RoundRecord
from broker_server.store.rows import to_row, values_of
from broker_server.store.task_records import (
    DevicePart,
    MergedUpdate,
    Outcome,
    PlannedTask,
    TaskPhase,
    TaskRecord,
    Timing,
)

Answer = tuple[str, TaskPhase, str | None]
"""Device, phase and detail of a task."""

_TASKS = schema.tasks
# A round requests statistics with separate tasks, which are not counted below.
_IS_TRAINING = _TASKS.c.kind == "train"


def _update_of(*columns: str) -> Any:
    """Return the statement that sets some columns of one task."""
    statement = update(_TASKS).where(_TASKS.c.id == bindparam("task"))
    return statement.values({name: bindparam(name) for name in columns})


# Built once: a round of a thousand devices runs each of these statements a thousand times.
_RECEIVE = _update_of(
    "phase",
    "update_digest",
    "update_size",
    "metrics",
    "received_at",
)
_SETTLE = _update_of("phase", "detail")
_RECORD_OUTCOME = _update_of("phase", "detail", "screening")
_RECORD_TIMING = _update_of("timing")

# The columns for the sub-model that a device took.
_CHOICE = ("tier", "plan_key", "artifact_set", "weights", "others")


def _measurement(name: str, kind: type[Float[Any] | Integer]) -> ColumnElement[Any]:
    """Return a number of a task's measurements.

    SQLite would return text in its place; the cast counts it as 0.
    """
    return cast(func.json_extract(_TASKS.c.metrics, f"$.{name}"), kind)


# The totals of a device, as `DevicePart` describes them.
_TOTALS = {
    "merged": func.count().filter(_TASKS.c.phase == TaskPhase.MERGED.value),
    "missed": func.count().filter(_TASKS.c.phase == TaskPhase.MISSED.value),
    "train_seconds": func.avg(_measurement("train_seconds", Float)),
    "fetch_seconds": func.avg(_measurement("fetch_seconds", Float)),
    "resident_bytes": func.max(_measurement("resident_bytes", Integer)),
}

# Cast for the same reason as measurements: SQLite keeps whatever a column is given.
_NEWEST_UPDATE = func.max(cast(_TASKS.c.received_at, Float))


class TaskTable(Database):
    """The tasks of a store."""

    def add_tasks(self, tasks: Sequence[TaskRecord]) -> None:
        """Store further tasks of a round."""
        self._write(insert(_TASKS), [to_row(task) for task in tasks])

    def task(self, task: str) -> TaskRecord | None:
        """Return one task, of any run."""
        return self._first(TaskRecord, select(_TASKS).where(_TASKS.c.id == task))

    def tasks(
        self,
        run: str,
        number: int,
        kind: str | None = None,
    ) -> list[TaskRecord]:
        """Return the tasks of a round, by device; of one kind or of all."""
        query = select(_TASKS).where(_TASKS.c.run == run, _TASKS.c.round == number)
        if kind is not None:
            query = query.where(_TASKS.c.kind == kind)
        # The order of the devices' ids is the order of the sums, and so decides their bits.
        return self._all(TaskRecord, query.order_by(_TASKS.c.device))

    def device_tasks(
        self,
        run: str,
        device: str,
    ) -> list[TaskRecord]:
        """Return the training tasks of a device in a run, by round."""
        query = self._training_tasks(run).where(_TASKS.c.device == device)
        return self._all(TaskRecord, query.order_by(_TASKS.c.round))

    def late_tasks(
        self,
        run: str,
        number: int,
        *,
        waiting: bool = False,
    ) -> list[TaskRecord]:
        """Return training tasks of earlier rounds that count in a round, by device.

        Their updates are in the version of the round or, with `waiting`, may still be added to it.
        """
        # With a buffer, a screening names the round whose version its update is in.
        counts = func.json_extract(_TASKS.c.screening, "$.round") == number
        if waiting:
            counts |= _TASKS.c.phase.in_([TaskPhase.OFFERED.value, TaskPhase.RECEIVED.value])
        query = self._training_tasks(run).where(_TASKS.c.round < number, counts)
        return self._all(TaskRecord, query.order_by(_TASKS.c.device))

    def merged_updates(self, run: str, number: int) -> list[MergedUpdate]:
        """Return the updates of a round that were merged."""
        columns = [_TASKS.c[name] for name in MergedUpdate._fields]
        query = select(*columns).where(
            _TASKS.c.run == run,
            _TASKS.c.round == number,
            _IS_TRAINING,
            _TASKS.c.phase == TaskPhase.MERGED.value,
            _TASKS.c.screening.is_not(None),
        )
        rows = self._values(TaskRecord, MergedUpdate._fields, query)
        return [MergedUpdate._make(values) for values in rows]

    def planned_tasks(self, run: str) -> list[PlannedTask]:
        """Return every training task of a run, by round."""
        columns = [_TASKS.c[name] for name in PlannedTask._fields]
        query = select(*columns).where(_TASKS.c.run == run, _IS_TRAINING)
        rows = self._values(TaskRecord, PlannedTask._fields, query.order_by(_TASKS.c.round))
        return [PlannedTask._make([*values, phase.value]) for *values, phase in rows]

    def costly_devices(self, run: str, deadline_seconds: float) -> list[tuple[str, int, TaskPhase]]:
        """Return the training tasks of devices that have delayed or harmed rounds.

        The server refused an update of theirs, or a round waited for them until its deadline
        because they were connected.

        Args:
            run: id of the run.
            deadline_seconds: time of its rounds.

        Returns:
            Device, round and phase of each task, by round. Missed tasks are included only if
            a round waited for them until its deadline.
        """
        rounds = schema.rounds
        in_run = (_TASKS.c.run == run) & _IS_TRAINING
        is_of_round = (_TASKS.c.run == rounds.c.run) & (_TASKS.c.round == rounds.c.number)
        was_missed = _TASKS.c.phase == TaskPhase.MISSED.value
        was_refused = _TASKS.c.phase == TaskPhase.REFUSED.value
        # A device that left did not hold the round up: the round stops waiting for it after the
        # grace.
        was_connected = func.json_extract(_TASKS.c.timing, "$.left").is_(None)
        has_timing = _TASKS.c.timing.is_not(None)
        # A round that closed before its deadline lost no time to those that it missed.
        whole = rounds.c.collect_seconds >= deadline_seconds
        held_up = was_missed & _TASKS.c.detail.is_(None) & has_timing & was_connected & whole
        costly = select(_TASKS.c.device).join(rounds, is_of_round)
        costly = costly.where(in_run & (was_refused | held_up))
        query = select(_TASKS.c.device, _TASKS.c.round, _TASKS.c.phase).join(rounds, is_of_round)
        # All that these devices did is returned, good answers too: one of them ends a series of
        # refusals.
        query = query.where(in_run & _TASKS.c.device.in_(costly) & (~was_missed | held_up))
        rows = self._values(
            TaskRecord, ("device", "round", "phase"), query.order_by(_TASKS.c.round)
        )
        return [(device, number, phase) for device, number, phase in rows]

    def answered_since(self, since: Mapping[str, float]) -> list[Answer]:
        """Return the answers of devices in rounds that were planned after a given time for each.

        Args:
            since: the time by device, in seconds since the epoch; other devices are left out.
        """
        rounds = schema.rounds
        is_of_round = (_TASKS.c.run == rounds.c.run) & (_TASKS.c.round == rounds.c.number)
        query = select(
            _TASKS.c.device,
            _TASKS.c.phase,
            _TASKS.c.detail,
            rounds.c.planned_at,
            # The earliest time here, that of each device below: one query for all devices.
        ).where(is_of_round & _IS_TRAINING, rounds.c.planned_at > min(since.values()))
        answers = []
        for row in self._rows(query):
            device, phase, detail = values_of(TaskRecord, ("device", "phase", "detail"), row[:3])
            (planned_at,) = values_of(RoundRecord, ("planned_at",), row[3:])
            if planned_at > since.get(device, math.inf):
                answers.append((device, phase, detail))
        return answers

    def device_parts(self, run: str) -> dict[str, DevicePart]:
        """Return the part of every device in a run, by device.

        The database computes the totals, because there may be many tasks.
        """
        in_run = (_TASKS.c.run == run) & _IS_TRAINING
        totals = [value.label(name) for name, value in _TOTALS.items()]
        query = select(_TASKS.c.device, *totals).where(in_run).group_by(_TASKS.c.device)
        # Statistics arrive after the update of a round, and show that a device is online, too.
        updates = select(_TASKS.c.device, _NEWEST_UPDATE).where(_TASKS.c.run == run)
        received_at = {}
        for device, newest_at in self._rows(updates.group_by(_TASKS.c.device)):
            received_at[device] = newest_at
        newest = self._newest_tasks(in_run)
        measured = self._newest_tasks(in_run & _TASKS.c.metrics.is_not(None))
        device_parts = {}
        for device, *values in self._rows(query):
            device_totals = dict(zip(_TOTALS, values, strict=True))
            device_parts[device] = DevicePart(
                newest[device], measured.get(device), device_totals, received_at[device]
            )
        return device_parts

    def choose_tier(self, task: TaskRecord) -> None:
        """Commit which of its sub-models a device took."""
        row = to_row(task)
        chosen = {name: row[name] for name in _CHOICE}
        self._write(update(_TASKS).where(_TASKS.c.id == task.id).values(chosen))

    def receive(
        self,
        tasks: Sequence[TaskRecord],
        *,
        later: bool = False,
    ) -> None:
        """Commit that updates are on disk, all or none; they may be acknowledged only after that.

        Args:
            tasks: the tasks, as `TaskRecord.with_update` returns them.
            later: add them to the next commit, if no device waits for an answer.
        """
        now = time.time()
        rows = [_received_row(task, now) for task in tasks]
        if not later:
            self._write(_RECEIVE, rows)
            return
        # Under the task's id, so that a later state of the same task replaces one that still waits.
        for row in rows:
            self._later(_RECEIVE, row, row["task"])

    def settle(
        self,
        tasks: Iterable[str],
        phase: TaskPhase,
        detail: str | None = None,
    ) -> None:
        """Put tasks into a phase."""
        state = {"phase": phase.value, "detail": detail}
        self._write(_SETTLE, [{"task": task, **state} for task in tasks])

    def settle_outcomes(self, outcomes: Mapping[str, Outcome]) -> None:
        """Store the outcomes of updates in a round without a version, by task."""
        if outcomes:
            # In one transaction, so that nobody sees half of a round judged.
            with self._begin() as connection:
                self._write_outcomes(connection, outcomes)

    def record_timings(self, timings: Mapping[str, Timing]) -> None:
        """Record when tasks were answered, by id, with the commit of their round's end."""
        for task, timing in timings.items():
            row = {"task": task, "timing": timing.model_dump_json()}
            self._later(_RECORD_TIMING, row, task)

    @staticmethod
    def _write_outcomes(connection: Connection, outcomes: Mapping[str, Outcome]) -> None:
        """Write outcomes within an open transaction."""
        rows = []
        for task, outcome in outcomes.items():
            row = {
                "task": task,
                "phase": outcome.phase.value,
                "detail": outcome.detail,
                "screening": outcome.screening.model_dump_json(),
            }
            rows.append(row)
        if rows:
            connection.execute(_RECORD_OUTCOME, rows)

    def _newest_tasks(self, condition: ColumnElement[bool]) -> dict[str, TaskRecord]:
        """Return the task of the newest round that meets a condition, by device."""
        last_round = func.max(_TASKS.c.round).label("round")
        rounds = select(_TASKS.c.device, last_round).where(condition).group_by(_TASKS.c.device)
        newest = rounds.subquery()
        is_newest = (_TASKS.c.device == newest.c.device) & (_TASKS.c.round == newest.c.round)
        query = select(_TASKS).join(newest, is_newest).where(condition)
        return {task.device: task for task in self._all(TaskRecord, query)}

    @staticmethod
    def _training_tasks(run: str) -> Select[Any]:
        return select(_TASKS).where(_TASKS.c.run == run, _IS_TRAINING)


def _received_row(task: TaskRecord, received_at: float) -> dict[str, Any]:
    return {
        "task": task.id,
        "phase": task.phase.value,
        "update_digest": task.update_digest,
        "update_size": task.update_size,
        "metrics": None if task.metrics is None else task.metrics.model_dump_json(),
        "received_at": received_at,
    }
