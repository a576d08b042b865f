"""Explains the part of every device in one round: a flat row for each, for people and programs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from broker_server.stages.screening import Screening
from broker_server.store.machine import RoundState
from broker_server.store.queries import find_run
from broker_server.store.records import RoundRecord
from broker_server.store.repository import Store
from broker_server.store.task_records import TaskPhase, TaskRecord
from fleet_protocol.errors import ConfigError

_NOT_ASKED = "not asked"


@dataclass(frozen=True)
class DeviceInRound:
    """One device's part in a round; every row repeats the values of the round.

    Attributes:
        run: id of the run.
        round: number of the round.
        state: state of the round.
        ending: event that ended the collection of updates; None while the collection continues, and
            for rounds from earlier versions of Shoal.
        collect_seconds: seconds from the offers until the collection of updates ended or the round
            was abandoned.
        wanted: number of updates after which the round stopped waiting for more.
        quorum: number of updates that the round needs before it can close.
        device: id of the device.
        outcome: phase of the device's task, or ``not asked``.
        why: why the device was not selected, did not answer, or was not merged; empty if its update
            was merged without a change.
        tier: tier that the device was offered or chose.
        answered_seconds: seconds from the offers to the device's answer.
        left_seconds: seconds from the offers until the device went offline, if it was offline at
            the end of the round.
        norm: norm of the difference between the device's update and the weights that were sent to
            the device.
        norm_bound: maximum norm that the server allowed.
        scale: factor by which the server scaled the update, below 1 if it clipped the update.
        samples: number of samples by which the server weighted the update, if the strategy weights
            by samples.
        declared: number of samples that the device reported.
        version: number of the global version from which the device trained.
        weight: weight of the device's update, below 1 if it was trained from an earlier version.
        refusals: number of log lines about refused messages from the device in this round.
    """

    run: str
    round: int
    state: str
    ending: str | None
    collect_seconds: float | None
    wanted: int | None
    quorum: int
    device: str
    outcome: str
    why: str
    tier: str | None = None
    answered_seconds: float | None = None
    left_seconds: float | None = None
    norm: float | None = None
    norm_bound: float | None = None
    scale: float | None = None
    samples: int | None = None
    declared: int | None = None
    version: int | None = None
    weight: float | None = None
    refusals: int = 0


def explain_round(store: Store, number: int, run: str | None = None) -> list[DeviceInRound]:
    """Return the devices of a round: those that were selected, then those that were not.

    Args:
        store: the store.
        number: number of the round.
        run: id of the run or its beginning, by default the newest.

    Raises:
        ConfigError: the run or the round does not exist.
    """
    run_id = find_run(store, run).id
    record = _find_round(store, run_id, number)
    # Refusals are log lines, which have no column for a task.
    refusals: Counter[str] = Counter()
    for event in store.events(run_id):
        if event.kind == "update-refused" and event.round == number:
            refusals[event.device or ""] += 1
    # Tasks of earlier rounds whose updates count in this one.
    tasks = [*store.tasks(run_id, number, "train"), *store.late_tasks(run_id, number)]
    tasks.sort(key=lambda task: task.device)
    rows = [_asked_row(record, task, refusals[task.device]) for task in tasks]
    # A device whose update from an earlier round counts here was left out, and has a row already.
    asked = {row.device for row in rows}
    rows.extend(row for row in _left_out_rows(record) if row.device not in asked)
    return rows


def _find_round(store: Store, run: str, number: int) -> RoundRecord:
    rounds = store.rounds(run)
    for record in rounds:
        if record.number == number:
            return record
    range_words = f"1 to {rounds[-1].number}" if rounds else "none yet"
    raise ConfigError(f"run {run} has no round {number}; its rounds: {range_words}")


def _asked_row(record: RoundRecord, task: TaskRecord, refusals: int) -> DeviceInRound:
    timing = task.timing
    answered_seconds = timing.answered if timing is not None else None
    if answered_seconds is None and task.received_at is not None and record.opened_at is not None:
        # The round is not over, or a server was restarted during it.
        answered_seconds = task.received_at - record.opened_at
    screening: dict[str, Any] = {}
    if task.screening is not None:
        screening = task.screening.model_dump(exclude={"bound", "round"})
        screening["norm_bound"] = task.screening.bound
    return DeviceInRound(
        **_round_values(record),
        device=task.device,
        outcome=task.phase.value,
        why=_reason(record, task),
        tier=task.tier,
        answered_seconds=answered_seconds,
        left_seconds=timing.left if timing is not None else None,
        version=task.version,
        **screening,
        refusals=refusals,
    )


def _left_out_rows(record: RoundRecord) -> Iterator[DeviceInRound]:
    if record.left_out is None:
        return
    for device, reason in record.left_out.reasons.items():
        yield DeviceInRound(
            **_round_values(record),
            device=device,
            outcome=_NOT_ASKED,
            why=reason,
        )


def _round_values(record: RoundRecord) -> dict[str, Any]:
    return {
        "run": record.run,
        "round": record.number,
        "state": record.state.value,
        "ending": record.ending.value if record.ending is not None else None,
        "collect_seconds": record.collect_seconds,
        "wanted": record.wanted,
        "quorum": record.quorum,
    }


def _reason(record: RoundRecord, task: TaskRecord) -> str:
    """Return why a device's update is not merged, or not as it was sent; empty otherwise."""
    # A task that was missed without words has a reason by its timing.
    if task.phase is TaskPhase.MISSED and not task.detail:
        return _reason_of_missed(record, task)
    screening = task.screening
    # A buffer counted the update in a later round.
    if screening is not None and screening.round not in {None, record.number}:
        return f"it continued, and its update is in the version of round {screening.round}"
    if task.phase is TaskPhase.OFFERED and record.state is RoundState.CLOSED:
        return "it continues, and will count in a later round"
    if task.detail:
        return task.detail
    return _changes(screening) if screening is not None else ""


def _reason_of_missed(record: RoundRecord, task: TaskRecord) -> str:
    if task.timing is not None and task.timing.left is not None:
        return f"offline since {task.timing.left:.1f} s"
    ending = record.ending.value if record.ending is not None else record.state.value
    return f"no answer when the collection ended ({ending})"


def _changes(screening: Screening) -> str:
    """Return how a merged update was changed; empty if it counts as it was sent."""
    changes = []
    if screening.scale < 1:
        changes.append(f"clipped to {screening.scale:.3g} of its difference")
    if screening.samples < screening.declared:
        changes.append(
            f"counts with {screening.samples} of the {screening.declared} samples that it reports"
        )
    return "; ".join(changes)
