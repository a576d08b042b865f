"""What became of every device in one round, and why: a flat row for each, for people and for
programs.
"""

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
    """One device's part in a round; what the round has in common stands in every row.

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
    """The devices of a round of a run, by default the newest: those that were asked, then those
    that were not.

    No such run or round is a ConfigError.
    """
    found = find_run(store, run)
    known = store.rounds(found.id)
    record = next((item for item in known if item.number == number), None)
    if record is None:
        there = f"1 to {known[-1].number}" if known else "none yet"
        raise ConfigError(f"run {found.id} has no round {number}; its rounds: {there}")
    refused = Counter(
        event.device or ""
        for event in store.events(found.id)
        if event.kind == "update-refused" and event.round == number
    )
    tasks = [*store.tasks(found.id, number, "train"), *store.late_tasks(found.id, number)]
    rows = [
        _asked(record, task, refused[task.device])
        for task in sorted(tasks, key=lambda task: task.device)
    ]
    asked = {row.device for row in rows}
    return [*rows, *(row for row in _not_asked(record) if row.device not in asked)]


def _asked(record: RoundRecord, task: TaskRecord, refusals: int) -> DeviceInRound:
    timing = task.timing
    screening = task.screening
    answered = timing.answered if timing is not None else None
    if answered is None and task.received_at is not None and record.opened_at is not None:
        answered = (
            task.received_at - record.opened_at
        )  # the round is not over, or a server was started again in it
    return DeviceInRound(
        **_common(record),
        device=task.device,
        outcome=task.phase.value,
        why=_why(record, task),
        tier=task.tier,
        answered_seconds=answered,
        left_seconds=timing.left if timing is not None else None,
        norm_bound=screening.bound if screening is not None else None,
        version=task.version,
        **(screening.model_dump(exclude={"bound", "round"}) if screening is not None else {}),
        refusals=refusals,
    )


def _not_asked(record: RoundRecord) -> Iterator[DeviceInRound]:
    if record.left_out is not None:
        for device, reason in record.left_out.reasons.items():
            yield DeviceInRound(**_common(record), device=device, outcome=_NOT_ASKED, why=reason)


def _common(record: RoundRecord) -> dict[str, Any]:
    return {
        "run": record.run,
        "round": record.number,
        "state": record.state.value,
        "ending": record.ending.value if record.ending is not None else None,
        "collect_seconds": record.collect_seconds,
        "wanted": record.wanted,
        "quorum": record.quorum,
    }


def _why(record: RoundRecord, task: TaskRecord) -> str:
    if task.phase is TaskPhase.MISSED and not task.detail:
        if task.timing is not None and task.timing.left is not None:
            return f"away since {task.timing.left:.1f} s"
        ending = record.ending.value if record.ending is not None else record.state.value
        return f"no answer when the collecting ended ({ending})"
    if task.screening is not None and task.screening.round not in {None, record.number}:
        return f"it went on, and its update is in the version of round {task.screening.round}"
    if task.phase is TaskPhase.OFFERED and record.state is RoundState.CLOSED:
        return "it goes on, and will count in a later round"
    return task.detail or (_clipped(task.screening) if task.screening is not None else "")


def _clipped(screening: Screening) -> str:
    found = []
    if screening.scale < 1:
        found.append(f"clipped to {screening.scale:.3g} of its difference")
    if screening.samples < screening.declared:
        found.append(
            f"counts with {screening.samples} of the {screening.declared} samples it claims"
        )
    return "; ".join(found)
