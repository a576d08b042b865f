"""Read-only views of a store for `shoal status`, `devices`, `rounds` and `log`, each with a plain
form for JSON.

A question about a run that is not there, or by a beginning that several ids have, is a ConfigError.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from broker_server.settings.combinations import Trait, keeps
from broker_server.settings.fleet import FleetConfig
from broker_server.store import (
    DeviceRecord,
    EventRecord,
    LeftOut,
    RoundRecord,
    RunRecord,
    Store,
    TaskPhase,
    TaskRecord,
)
from broker_server.store.privacy_spent import epsilon_by_round
from broker_server.store.promotion import marked_versions
from broker_server.store.remedies import SIMULATED, absence_reason, remedy
from broker_server.store.rows import config_json
from broker_server.store.task_records import DevicePart
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.errors import ConfigError
from fleet_protocol.messages import Evaluation
from fleet_protocol.metrics import join_metrics


def to_json_values(value: Any) -> Any:
    """A record, a view, or a list of them as JSON values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_values(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        made = {name: to_json_values(getattr(value, name)) for name in value.__dataclass_fields__}
        return {**made, "config": config_json(value)} if isinstance(value, RunRecord) else made
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True)
class StatusView:
    """The store at a glance.

    Attributes:
        run: the run shown, None if there was none yet.
        round: its newest round.
        rounds: rounds wanted.
        evaluation: newest evaluation of the global model.
        online: devices that are connected, as last stored.
        devices: that were ever seen.
        refusals: how often what was refused in the run, by reason.
        insecure: whether it went over a network although nothing was signed.
        epsilon: of a device's part in it so far, None where it is not known.
        runs: every run of the store, newest first.
    """

    run: RunRecord | None
    round: RoundRecord | None
    closed: int
    rounds: int
    version: int | None
    evaluation: VersionEvaluation | None
    online: int
    devices: int
    refusals: Mapping[str, int]
    insecure: bool
    epsilon: float | None
    runs: tuple[RunRecord, ...]


@dataclass(frozen=True)
class RunView:
    """A run in a list.

    Attributes:
        rounds: rounds wanted.
        versions: number of the newest, of the one it repeats, and of the one that was promoted.
        evaluation: newest evaluation of the global model.
        seconds: how long it took, or has taken.
    """

    run: RunRecord
    strategy: str
    closed: int
    rounds: int
    versions: Mapping[str, int]
    evaluation: VersionEvaluation | None
    seconds: float


@dataclass(frozen=True)
class DeviceView:
    """A device with its part in a run.

    Attributes:
        tier: of its newest training task.
        phase: of its newest training task.
        merged: updates of it that are in a global version.
        missed: rounds that closed or were abandoned without it.
        refused: how often something of it was refused, or it refused a task.
        train_seconds: mean over its updates.
        fetch_seconds: mean over its updates.
        resident_bytes: largest reported.
        examples: training samples, as last reported.
        evaluation: on its own held-out samples, if it keeps any, as in `TaskMetrics`.
        reason: why it takes no part, or took none in the newest round; empty where it does.
        remedy: what to do about that; empty where there is nothing to do, or the reason says it.
    """

    device: DeviceRecord
    tier: str | None
    phase: TaskPhase | None
    merged: int
    missed: int
    refused: int
    train_seconds: float | None
    fetch_seconds: float | None
    resident_bytes: int | None
    examples: int | None
    evaluation: Evaluation | None
    reason: str
    remedy: str


@dataclass(frozen=True)
class RoundView:
    """A round with its tasks.

    Attributes:
        phases: number of training tasks in each phase.
        seconds: from the first offers to its end.
        tasks: its training tasks, by device.
        device_accuracy: mean over devices of their accuracies on their own held-out samples; None
            if none reports one.
        device_range: the lowest and the highest of them.
        device_metrics: the recipe's metrics over the held-out samples of all devices together.
        sent_bytes: of the weights that its devices were offered; devices that share a plan are sent
            one copy.
        received_bytes: of the updates that came.
        epsilon: as in `StatusView`, up to here.
    """

    round: RoundRecord
    phases: Mapping[str, int]
    seconds: float | None
    tasks: tuple[TaskRecord, ...]
    device_accuracy: float | None
    device_range: tuple[float, float] | None = None
    device_metrics: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    epsilon: float | None = None


def find_run(store: Store, run: str | None = None) -> RunRecord:
    """A run by id or unique beginning of an id; by default, and by ``newest``, the newest.

    Raises:
        ConfigError: there is none, or more than one.
    """
    known = store.runs()
    run = None if run == "newest" else run
    found = [record for record in known if run is None or record.id.startswith(run)]
    exact = [record for record in found if record.id == run]
    if exact or (found and (run is None or len(found) == 1)):
        return (exact or found)[0]
    if not found:
        shown = (
            f"its runs: {', '.join(record.id for record in known[:5])}"
            if known
            else "`shoal run` begins one"
        )
        raise ConfigError(f"the store {store.folder} has no run {run or 'yet'}; {shown}")
    raise ConfigError(
        f"{run} is the beginning of {len(found)} runs: {', '.join(record.id for record in found)}"
    )


def status(store: Store, run: str | None = None) -> StatusView:
    """The store at a glance, with a run, by default the newest."""
    runs = store.runs()
    known = store.devices()
    record = find_run(store, run) if runs or run is not None else None
    versions = store.versions(record.id) if record is not None else []
    refusals: Counter[str] = Counter()
    for item in store.refusals():
        if item.run in {
            "",
            record.id if record is not None else "",
        }:  # between runs they are of none
            refusals[item.reason] += item.count
    config = FleetConfig.stored(record.config) if record is not None else None
    return StatusView(
        run=record,
        round=store.last_round(record.id) if record is not None else None,
        closed=(closed := len({version.round for version in versions if version.round})),
        rounds=max(closed, config.round.rounds) if config is not None else 0,
        version=versions[-1].number if versions else None,
        evaluation=next((item.evaluation for item in reversed(versions) if item.evaluation), None),
        online=sum(device.online for device in known),
        devices=len(known),
        refusals=dict(sorted(refusals.items())),
        insecure=config is not None and config.broker.insecure and config.broker.identity is None,
        epsilon=max(epsilon_by_round(store, record).values(), default=None)
        if record is not None
        else None,
        runs=tuple(runs),
    )


def runs(store: Store, run: str | None = None) -> list[RunView]:
    """The runs of a store, newest first; or one of them, by its id or the beginning of that."""
    views = []
    for record in [find_run(store, run)] if run is not None else store.runs():
        config = FleetConfig.stored(record.config)
        versions = store.versions(record.id)
        views.append(
            RunView(
                run=record,
                strategy=config.strategy.name,
                closed=(closed := len({version.round for version in versions if version.round})),
                rounds=max(closed, config.round.rounds),
                versions=marked_versions(store, record.id),
                evaluation=next(
                    (item.evaluation for item in reversed(versions) if item.evaluation),
                    None,
                ),
                seconds=(record.ended_at or time.time()) - record.created_at,
            )
        )
    return views


@dataclass(frozen=True)
class Comparison:
    """Two runs by their ids, settings that differ by dotted key, and accuracies of each version
    where it was judged.
    """

    runs: tuple[str, str]
    settings: Mapping[str, tuple[Any, Any]]
    accuracies: Mapping[int, tuple[float | None, float | None]]


def compare(store: Store, one: str, other: str) -> Comparison:
    """Two runs of a store side by side; ids may be cut short."""
    found = find_run(store, one), find_run(store, other)
    settings = [dict(flat_settings(config_json(record))) for record in found]
    judged = [
        {
            item.number: item.evaluation.shown
            for item in store.versions(record.id)
            if item.evaluation
        }
        for record in found
    ]
    keys = sorted({*settings[0], *settings[1]})
    numbers = sorted({*judged[0], *judged[1]})
    return Comparison(
        runs=(found[0].id, found[1].id),
        settings={
            key: (a, b)
            for key in keys
            if (a := settings[0].get(key)) != (b := settings[1].get(key))
        },
        accuracies={number: (judged[0].get(number), judged[1].get(number)) for number in numbers},
    )


def flat_settings(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """What stands in tables within tables, by dotted key."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from flat_settings(item, f"{key}.{name}" if key else name)
    else:
        yield key, value


def devices(store: Store, run: str | None = None) -> list[DeviceView]:
    """Every device that was ever seen, with its part in a run, by default the newest."""
    record = find_run(store, run) if store.runs() or run is not None else None
    parts: Mapping[str, DevicePart] = store.device_parts(record.id) if record is not None else {}
    last = store.last_round(record.id) if record is not None else None
    left_out = dict(last.left_out.reasons) if last is not None and last.left_out is not None else {}
    for line in store.events(record.id, last=200) if record is not None else []:
        if (
            line.kind == "unfit"
            and line.device
            and (line.round or 0) > (last.number if last is not None else 0)
        ):
            left_out[line.device] = line.detail  # of who is waited for
    refused: Counter[str] = Counter()
    for count in store.refusals(record.id) if record is not None else []:
        refused[count.device] += count.count
    known = store.devices()
    if (
        record is not None and not known
    ):  # a simulation has tasks, and nobody who says that it is there
        times = record.created_at, record.ended_at or record.created_at
        known = [
            DeviceRecord(record.fleet, name, True, SIMULATED, None, *times)
            for name in sorted(parts)
        ]
    return [_device(device, parts.get(device.id), refused[device.id], left_out) for device in known]


def _device(
    device: DeviceRecord,
    part: DevicePart | None,
    refused: int,
    left_out: Mapping[str, str],
) -> DeviceView:
    reason = absence_reason(device, part.newest if part is not None else None, left_out)
    said = part.measured.metrics if part is not None and part.measured is not None else None
    nothing = {
        "merged": 0,
        "missed": 0,
        "train_seconds": None,
        "fetch_seconds": None,
        "resident_bytes": None,
    }
    return DeviceView(
        device=device,
        tier=part.newest.tier if part is not None else None,
        phase=part.newest.phase if part is not None else None,
        **(part.totals if part is not None else nothing),
        refused=refused,
        examples=said.examples
        if said is not None
        else device.profile.examples
        if device.profile
        else None,
        evaluation=said.evaluation if said is not None else None,
        reason=reason,
        remedy=remedy(device.id, reason),
    )


def rounds(
    store: Store,
    run: str | None = None,
    *,
    first: int = 1,
    last: int | None = None,
    tasks: bool = True,
) -> list[RoundView]:
    """The rounds of a run, by default the newest, in order from a first to a last.

    Without `tasks` they lack them, and the names of those that were left out, which are most of the
    bytes.
    """
    if run is None and not store.runs():
        return []
    views = []
    record = find_run(store, run)
    spent = epsilon_by_round(store, record)
    buffered = not keeps(FleetConfig.stored(record.config), Trait.ONE_VERSION)
    for item in store.rounds(record.id):
        if not first <= item.number <= (item.number if last is None else last):
            continue
        found = store.tasks(item.run, item.number, "train")
        counted = [
            task
            for task in found
            if not task.screening or task.screening.round in {None, item.number}
        ]
        counted += store.late_tasks(item.run, item.number) if buffered else []
        own = [
            task.metrics.evaluation for task in found if task.metrics and task.metrics.evaluation
        ]
        accuracies = [judged.accuracy for judged in own if judged.accuracy is not None]
        if (left := item.left_out) is not None and not tasks:
            item = replace(item, left_out=LeftOut(reasons={}, more=left.more + len(left.reasons)))  # noqa: PLW2901
        views.append(
            RoundView(
                round=item,
                phases=dict(sorted(Counter(task.phase.value for task in counted).items())),
                seconds=item.ended_at - item.opened_at
                if item.ended_at and item.opened_at
                else None,
                tasks=tuple(found) if tasks else (),
                device_accuracy=sum(accuracies) / len(accuracies) if accuracies else None,
                device_range=(min(accuracies), max(accuracies)) if accuracies else None,
                device_metrics=join_metrics(own),
                sent_bytes=sum({task.weights.digest: task.weights.size for task in found}.values()),
                received_bytes=sum(task.update_size or 0 for task in found),
                epsilon=spent.get(item.number),
            )
        )
    return views


def log(
    store: Store, run: str | None = None, *, last: int | None = None, after: int = 0
) -> list[EventRecord]:
    """Lines of the log as of `Store.events`; without a run also of what happened outside runs."""
    return store.events(
        find_run(store, run).id if run is not None else None, last=last, after=after
    )
