"""Looks up runs, and shows them individually, in a list, and side by side."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from broker_server.settings.fleet import FleetConfig
from broker_server.store.event_table import EVERY_LINE, LineFilter
from broker_server.store.privacy_spent import epsilon_by_round
from broker_server.store.promotion import marked_versions
from broker_server.store.queries.json_values import flat_settings
from broker_server.store.queries.views import (
    SIMULATED_FLEET,
    SIMULATION_SETTINGS,
    Comparison,
    RunView,
    StatusView,
)
from broker_server.store.records import EventRecord, RunRecord, VersionRecord
from broker_server.store.repository import Store
from broker_server.store.rows import config_json
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.errors import ConfigError
from fleet_protocol.locks import is_held
from fleet_protocol.run_names import NEWEST

_MOST_SHOWN = 5  # ids in an error message
_NEWEST_VERSIONS = 11  # of a run, from which the remaining time is estimated


def find_run(store: Store, run: str | None = None) -> RunRecord:
    """Return a run by its name, its id, or a unique beginning of its id.

    Args:
        store: the store.
        run: the name or id; None and ``newest`` mean the newest run.

    Raises:
        ConfigError: no run matches, or more than one.
    """
    records = store.runs()
    if run is None or run == NEWEST:
        if not records:
            raise ConfigError(
                f"the store {store.folder} contains no runs yet; `shoal run` starts one"
            )
        return records[0]
    matches = [record for record in records if record.is_meant_by(run)]
    for record in matches:
        # A name and a complete id are valid even if they are the beginning of another id.
        if run in {record.name, record.id}:
            return record
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(record.id for record in matches)
        raise ConfigError(f"{run} matches the beginning of {len(matches)} runs: {ids}")
    hint = "`shoal run` begins one"
    if records:
        shown_runs = ", ".join(record.shown for record in records[:_MOST_SHOWN])
        hint = f"its runs: {shown_runs}"
    raise ConfigError(f"the store {store.folder} has no run {run or 'yet'}; {hint}")


def status(store: Store, run: str | None = None) -> StatusView:
    """Return an overview of the store, with a run, by default the newest."""
    devices = store.devices()
    every_run = tuple(store.runs())
    # A store without runs has a status; a run that was named must exist.
    record = find_run(store, run) if every_run or run is not None else None
    view = StatusView(
        run=record,
        round=None,
        closed=0,
        rounds=0,
        version=None,
        evaluation=None,
        online=sum(device.online for device in devices),
        devices=len(devices),
        refusals=_refusals(store, record),
        insecure=False,
        epsilon=None,
        runs=every_run,
        as_of=time.time(),
        served=is_served(store),
    )
    if record is None:
        return view
    config = FleetConfig.stored(record.config)
    versions = store.versions(record.id)
    closed = count_closed_rounds(versions)
    # A run that was continued with fewer rounds has more closed ones.
    wanted = max(closed, config.round.rounds)
    seconds_left = None
    # Nobody works on a run without a server, so no time is left to estimate.
    if record.status == "running" and view.served is not False:
        seconds_left = _seconds_left(versions, wanted - closed)
    return replace(
        view,
        simulated=simulation_settings(record, store.folder) is not None,
        round=store.last_round(record.id),
        closed=closed,
        rounds=wanted,
        seconds_left=seconds_left,
        # Versions that no round made, besides version 0.
        repeated=versions[-1].number - closed if versions else 0,
        version=versions[-1].number if versions else None,
        evaluation=_newest_evaluation(versions),
        insecure=config.broker.insecure and config.broker.identity is None,
        epsilon=max(epsilon_by_round(store, record).values(), default=None),
    )


def simulation_settings(record: RunRecord, folder: Path) -> Path | None:
    """Return the settings of the simulation that a run is; None for a run of boards.

    Args:
        record: the run.
        folder: folder of its store.
    """
    # The results of a simulation are in the folder around its store.
    path = folder.resolve().parent / SIMULATION_SETTINGS
    return path if record.fleet == SIMULATED_FLEET and path.is_file() else None


def runs(store: Store, run: str | None = None) -> list[RunView]:
    """Return the runs of a store, newest first, or the run of an id, which may be cut short."""
    records = store.runs() if run is None else [find_run(store, run)]
    return [_run_view(store, record) for record in records]


def _run_view(store: Store, record: RunRecord) -> RunView:
    config_json(record)  # the error names a row that no server wrote by table and id
    config = FleetConfig.stored(record.config)
    versions = store.versions(record.id)
    closed = count_closed_rounds(versions)
    # A run in progress lasts until now.
    ended_at = record.ended_at or time.time()
    return RunView(
        run=record,
        strategy=config.strategy.name,
        closed=closed,
        rounds=max(closed, config.round.rounds),
        versions=marked_versions(store, record.id),
        evaluation=_newest_evaluation(versions),
        seconds=ended_at - record.created_at,
    )


def compare(store: Store, first: str, second: str) -> Comparison:
    """Return two runs of a store side by side; ids may be cut short."""
    first_run = find_run(store, first)
    second_run = find_run(store, second)
    first_settings = dict(flat_settings(config_json(first_run)))
    second_settings = dict(flat_settings(config_json(second_run)))
    first_judged = _accuracies(store, first_run)
    second_judged = _accuracies(store, second_run)
    settings: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*first_settings, *second_settings}):
        values = (first_settings.get(key), second_settings.get(key))
        if values[0] != values[1]:
            settings[key] = values
    accuracies: dict[int, tuple[float | None, float | None]] = {}
    for number in sorted({*first_judged, *second_judged}):
        accuracies[number] = (first_judged.get(number), second_judged.get(number))
    return Comparison((first_run.id, second_run.id), settings, accuracies)


def log(
    store: Store,
    run: str | None = None,
    *,
    last: int | None = None,
    after: int = 0,
    matching: LineFilter = EVERY_LINE,
) -> list[EventRecord]:
    """Return lines of the log as in `Store.events`; without a run also lines outside runs."""
    run_id = None if run is None else find_run(store, run).id
    return store.events(run_id, last=last, after=after, matching=matching)


def _refusals(store: Store, record: RunRecord | None) -> Mapping[str, int]:
    """Return how often messages were refused in a run, and outside runs, by reason."""
    # Refusals outside runs concern the fleet, and so every run.
    counted_runs = {""} if record is None else {"", record.id}
    counts: Counter[str] = Counter()
    for refusal in store.refusals():
        if refusal.run in counted_runs:
            counts[refusal.reason] += refusal.count
    return dict(sorted(counts.items()))


def is_served(store: Store) -> bool | None:
    """Return whether a server or a simulation is using the store; None if that is unknown.

    A server locks the folder of its store, a simulation the folder around it.
    """
    holders = [is_held(store.folder), is_held(store.folder.resolve().parent)]
    if True in holders:
        return True
    return None if None in holders else False


def _seconds_left(versions: Sequence[VersionRecord], rounds: int) -> float | None:
    """Return how long further rounds will take, judging by the newest; None before the second."""
    # Rounds get faster or slower, so only the newest count.
    newest = versions[-_NEWEST_VERSIONS:]
    if len(newest) < 2:
        return None
    seconds = newest[-1].created_at - newest[0].created_at
    # The number of intervals is one less than that of versions.
    return rounds * max(0.0, seconds) / (len(newest) - 1)


def count_closed_rounds(versions: Sequence[VersionRecord]) -> int:
    """Return how many rounds made versions.

    Version 0 has no round, and a version that repeats another has the round that made the other
    one.
    """
    return len({version.round for version in versions if version.round})


def _newest_evaluation(versions: Sequence[VersionRecord]) -> VersionEvaluation | None:
    for version in reversed(versions):
        if version.evaluation:
            return version.evaluation
    return None


def _accuracies(store: Store, record: RunRecord) -> dict[int, float | None]:
    """Return the displayed accuracy of every evaluated version of a run, by number."""
    accuracies: dict[int, float | None] = {}
    for version in store.versions(record.id):
        if version.evaluation:
            accuracies[version.number] = version.evaluation.shown
    return accuracies
