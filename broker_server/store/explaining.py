"""Explain the part of every device in one round: a flat row for each, for people and programs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from broker_server.store.machine import RoundState
from broker_server.store.queries import find_run
from broker_server.store.records import RoundRecord
from broker_server.store.repository import Store
from broker_server.store.task_records import Screening, TaskPhase, TaskRecord
from fleet_protocol.errors import ConfigError

_NOT_ASKED = "not asked"


@dataclass(frozen=True)
class DeviceInRound:
    """One device's part in a round; every row repeats the values of the round.

    Attributes:
        ending: the event that ended the collecting, None before, and for rounds of earlier
            versions.
        collect_seconds: from the offers to that event, or until the round was given up.
        wanted: updates with which nobody else was waited for.
        quorum: updates of the wanted ones that make a round.
        outcome: phase of its task, or ``not asked``.
        why: it was not asked, has not answered, or is not merged; empty where it is merged as it
            was sent.
        answered_seconds: from the offers to its answer.
        left_seconds: from the offers to its leaving, if it was away at the end.
        norm: of its update's difference to what it was sent.
        norm_bound: the largest that was allowed.
        scale: of the difference, below 1 where it was clipped.
        samples: it counted with, where the strategy weighs by samples.
        declared: samples that it said it has.
        version: from which it trained.
        weight: that its difference counted with, below 1 where that version was an earlier one.
        refusals: lines of the log about refusals of it in this round.
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
    """Return the devices of a round: those that were asked, then those that were not.

    Args:
        store: the store.
        number: number of the round.
        run: id of the run or its beginning, by default the newest.

    Raises:
        ConfigError: there is no such run or round.
    """
    run_id = find_run(store, run).id
    record = _find_round(store, run_id, number)
    refusals: Counter[str] = Counter()
    for event in store.events(run_id):
        if event.kind == "update-refused" and event.round == number:
            refusals[event.device or ""] += 1
    tasks = [*store.tasks(run_id, number, "train"), *store.late_tasks(run_id, number)]
    tasks.sort(key=lambda task: task.device)
    rows = [_asked_row(record, task, refusals[task.device]) for task in tasks]
    # A device whose update of an earlier round counts here was left out, and has a row already.
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
        # The round is not over, or a server was started again in it.
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
    if task.phase is TaskPhase.MISSED and not task.detail:
        return _reason_of_missed(record, task)
    screening = task.screening
    if screening is not None and screening.round not in {None, record.number}:
        return f"it went on, and its update is in the version of round {screening.round}"
    if task.phase is TaskPhase.OFFERED and record.state is RoundState.CLOSED:
        return "it goes on, and will count in a later round"
    if task.detail:
        return task.detail
    return _changes(screening) if screening is not None else ""


def _reason_of_missed(record: RoundRecord, task: TaskRecord) -> str:
    if task.timing is not None and task.timing.left is not None:
        return f"away since {task.timing.left:.1f} s"
    ending = record.ending.value if record.ending is not None else record.state.value
    return f"no answer when the collecting ended ({ending})"


def _changes(screening: Screening) -> str:
    """Return how a merged update was changed; empty if it counts as it was sent."""
    changes = []
    if screening.scale < 1:
        changes.append(f"clipped to {screening.scale:.3g} of its difference")
    if screening.samples < screening.declared:
        changes.append(
            f"counts with {screening.samples} of the {screening.declared} samples it claims"
        )
    return "; ".join(changes)
