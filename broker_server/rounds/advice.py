"""Rules that say what to do next about a run, each with its evidence and its remedy."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from broker_server.rounds.best import VersionView, read_versions, shown_score
from broker_server.settings.fleet import FleetConfig
from broker_server.store import RunRecord, Store, queries
from broker_server.store.event_table import LineFilter
from broker_server.store.machine import RoundState
from broker_server.store.queries import DeviceView, RoundView
from broker_server.store.task_records import TaskRecord
from broker_server.strategies.registry import STRATEGIES
from models.tier import Tier

_NEWEST_ROUNDS = 5  # rounds that the rules examine
_SPARE_SECONDS = 60.0  # beyond the longest time of a round, before a run counts as stalled
_MANY_MISSED = 0.2  # share of the tasks
_MUCH_WORSE = 0.1  # share of the best score
_LONG_UNCHANGED = 5  # evaluations
_UNFAIR = 0.2  # difference in accuracy between the devices with the best and the worst one
_FEWEST_COMPARED = 3  # devices with an accuracy for the best and the worst to be meaningful
_SHOWN_BOARDS = 3  # devices that are listed by name
_SHOWN_FINDINGS = 3  # sentences about the test set

TEST_SET_EVENT = "test-set-looks-wrong"
"""Kind of the log lines about the server's own samples."""


@dataclass(frozen=True)
class Advice:
    """A finding about a run, and what to do about it.

    Attributes:
        kind: ``bad`` for a problem with the run, ``info`` otherwise.
        title: the finding, as a sentence.
        evidence: the figures behind the finding.
        remedy: what to do, with commands in backquotes.
    """

    kind: Literal["bad", "info"]
    title: str
    evidence: str
    remedy: str


def find_advice(store: Store, run: str | None = None, now: float | None = None) -> list[Advice]:
    """Apply the rules to a run, by default the newest; findings that are ``bad`` come first.

    A store without a run has no advice.

    Args:
        store: to read.
        run: its id.
        now: seconds since the epoch; None for the present.

    Raises:
        ConfigError: as in `broker_server.store.queries`.
    """
    if run is None and not store.runs():
        return []
    record = queries.find_run(store, run)
    rounds = _newest_rounds(store, record)
    devices = queries.devices(store, record.id)
    advice = [
        *_end(record),
        *_interruption(store, record, rounds, time.time() if now is None else now),
        *_abandoned_rounds(rounds),
        *_missed_tasks(rounds, devices),
        *_scores(store, record),
        *_wrong_test_set(store, record),
        *_wrong_data(devices),
        *_unfair(devices),
        *_unmoved(store, record, rounds),
        *_away(record, devices),
    ]
    return sorted(advice, key=lambda entry: entry.kind != "bad")


def _newest_rounds(store: Store, run: RunRecord) -> list[RoundView]:
    last = store.last_round(run.id)
    if last is None:
        return []
    return queries.rounds(store, run.id, first=last.number - _NEWEST_ROUNDS, tasks=False)


def _ended(rounds: Sequence[RoundView]) -> Sequence[RoundView]:
    ended = []
    for view in rounds:
        if view.round.ended_at:
            ended.append(view)
    return ended[-_NEWEST_ROUNDS:]


def _end(run: RunRecord) -> Iterator[Advice]:
    """Report that a run ended before its last round, and why."""
    reason = run.detail or "No reason was stored."
    if run.status == "failed":
        yield Advice(
            "bad",
            "The run failed",
            reason,
            "Remove the cause; then `shoal run` starts a new run, and `shoal simulate` continues"
            " a simulation.",
        )
    elif run.status == "stopped":
        yield Advice(
            "info",
            "The run was stopped before its last round",
            reason,
            "If this was intended, do nothing; `shoal run` starts a new run.",
        )


def _interruption(
    store: Store, run: RunRecord, rounds: Sequence[RoundView], now: float
) -> Iterator[Advice]:
    """Report that an unfinished run has no server, or that its rounds do not progress."""
    if run.ended_at is not None:
        return
    if queries.is_served(store) is not False:
        yield from _standstill(run, rounds, now)
        return
    newest = f"Round {rounds[-1].round.number} is the newest" if rounds else "It has no round yet"
    yield Advice(
        "bad",
        "The run has not ended, but no server is running it",
        f"{newest}; no process is using the store {store.folder}.",
        "To continue it, start it again with the same configuration: `shoal up` or `shoal run`"
        " for a fleet, `shoal simulate` for a simulation.",
    )


def _standstill(run: RunRecord, rounds: Sequence[RoundView], now: float) -> Iterator[Advice]:
    config = FleetConfig.stored(run.config).round
    longest = config.deadline_seconds + config.wait_seconds + _SPARE_SECONDS
    moved = run.created_at
    if rounds:
        newest = rounds[-1].round
        moved = max(moved, newest.ended_at or newest.planned_at)
    still = now - moved
    if run.status == "running" and still > longest:
        yield Advice(
            "bad",
            "The run is in progress, but does not advance",
            f"No round has advanced for {still:.0f} s; a round may take up to {longest:.0f} s.",
            "Check whether its server is running; `shoal run` with the same configuration "
            "continues the run.",
        )


def _abandoned_rounds(rounds: Sequence[RoundView]) -> Iterator[Advice]:
    abandoned = []
    for view in _ended(rounds):
        if view.round.state is RoundState.ABANDONED:
            abandoned.append(view.round)
    if abandoned:
        newest = abandoned[-1]
        yield Advice(
            "bad",
            "Rounds are abandoned",
            f"Round {newest.number}: {newest.reason or 'no reason was stored'}.",
            f"Look at `shoal rounds show {newest.number}`; round.quorum sets how many updates a"
            " round needs.",
        )


def _missed_tasks(rounds: Sequence[RoundView], devices: Sequence[DeviceView]) -> Iterator[Advice]:
    ended = _ended(rounds)
    missed = 0
    tasks = 0
    for view in ended:
        missed += view.phases.get("missed", 0)
        tasks += sum(view.phases.values())
    if not missed or missed < _MANY_MISSED * tasks:
        return
    names = _most_missing(devices)
    yield Advice(
        "bad",
        "Many devices do not answer in time",
        f"{missed} of {tasks} tasks of the last {len(ended)} rounds were missed; over all rounds,"
        f" {names} missed the most.",
        "Raise round.deadline_seconds, ask more devices with round.over_selection, or give "
        "these devices a smaller tier.",
    )


def _most_missing(devices: Sequence[DeviceView]) -> str:
    """Return the devices that missed most tasks of the run, with their counts."""
    names = []
    # The sort is stable: of equal counts the devices stay in the order of their ids.
    worst_first = sorted(devices, key=lambda view: -view.missed)
    for view in worst_first[:_SHOWN_BOARDS]:
        if view.missed:
            names.append(f"{view.device.id} ({view.missed})")
    return ", ".join(names)


def _scores(store: Store, run: RunRecord) -> Iterator[Advice]:
    """Compare the newest evaluated version with the best one."""
    judged: list[tuple[float, VersionView]] = []
    for view in read_versions(store, run.id):
        if view.score is not None:
            judged.append((view.score, view))
    if len(judged) < 2:
        return
    # The newest of versions with equal scores is the best, as in `best_version`.
    best_score, best = max(judged, key=lambda entry: (entry[0], entry[1].version.number))
    newest_score, _ = judged[-1]
    since = len(judged) - 1 - judged.index((best_score, best))
    config = FleetConfig.stored(run.config).evaluation
    number = best.version.number
    best_value = shown_score(config, best_score)
    newest_value = shown_score(config, newest_score)
    best_text = f"version {number} has {best_value:.4f}"
    newest_text = f"{newest_value:.4f}"
    remedy = _take_version(store, run, best)
    if best_score - newest_score > _MUCH_WORSE * abs(best_score):
        title = "The newest version is much worse than an earlier one"
        yield Advice("bad", title, f"The newest has {newest_text}; {best_text}.", remedy)
    elif since >= _LONG_UNCHANGED:
        evidence = (
            f"There have been {since} evaluations since the best one ({best_text}); the newest"
            f" has {newest_text}."
        )
        yield Advice("info", "The model has stopped improving", evidence, remedy)
    elif run.ended_at:
        evidence = f"The best of {len(judged)} evaluated versions: {best_text}."
        yield Advice("info", f"Use version {number}", evidence, remedy)


def _take_version(store: Store, run: RunRecord, view: VersionView) -> str:
    """Return the command that exports a version, if its weights are stored."""
    if not view.kept:
        return "Its weights were deleted; keep_versions sets how many versions keep their weights."
    return (
        f"Export it: `shoal export-weights --store {quote(str(store.folder))} --run "
        f"{quote(run.id)} --version {view.version.number}`."
    )


def _wrong_data(devices: Sequence[DeviceView]) -> Iterator[Advice]:
    findings: dict[str, tuple[str, ...]] = {}
    for view in devices:
        profile = view.device.profile
        if profile and profile.findings:
            findings[view.device.id] = profile.findings
    if not findings:
        return
    evidence = []
    for device in list(findings)[:_SHOWN_BOARDS]:
        sentences = "; ".join(findings[device])
        evidence.append(f"{device}: {sentences}")
    more = len(findings) - len(evidence)
    if more:
        evidence.append(f"{more} more, see `shoal devices`")
    yield Advice(
        "bad",
        f"The data of {len(findings)} of {len(devices)} devices may be faulty",
        f"{'. '.join(evidence)}.",
        "Change [data] in their device.toml, and run `shoal device doctor`; if most boards "
        "report the same, check [evaluation.data] of fleet.toml.",
    )


def _wrong_test_set(store: Store, run: RunRecord) -> Iterator[Advice]:
    """Report what looks wrong in the server's own samples, which define the contract."""
    lines = store.events(run.id, matching=LineFilter(kinds=(TEST_SET_EVENT,)))
    # A run that is continued examines its test set again.
    findings = list(dict.fromkeys(line.detail for line in lines))
    if findings:
        yield Advice(
            "bad",
            "The server's own samples may be faulty",
            f"{'; '.join(findings[:_SHOWN_FINDINGS])}.",
            "Correct [evaluation.data] of fleet.toml, and the data of the devices in the same way; "
            "then start a new run with `shoal run`.",
        )


def _unfair(devices: Sequence[DeviceView]) -> Iterator[Advice]:
    """Compare the accuracies that devices report on their own samples."""
    accuracies: list[tuple[float, DeviceView]] = []
    for view in devices:
        evaluation = view.evaluation
        # A regression has a loss without labels, and so no accuracy to compare.
        if evaluation and evaluation.accuracy is not None:
            accuracies.append((evaluation.accuracy, view))
    accuracies.sort(key=lambda entry: entry[0])
    if len(accuracies) < _FEWEST_COMPARED:
        return
    low, worst = accuracies[0]
    high, best = accuracies[-1]
    if high - low > _UNFAIR:
        yield Advice(
            "info",
            "The model is much worse on some devices than on others",
            f"On its own samples, {worst.device.id} ({worst.tier}) reaches {low:.4f}, while"
            f" {best.device.id} ({best.tier}) reaches {high:.4f}.",
            "The page shows under Coverage which units its tier never trains; the table shows how"
            " many samples it has.",
        )


def _unmoved(store: Store, run: RunRecord, rounds: Sequence[RoundView]) -> Iterator[Advice]:
    """Report that the devices of a run choose their tiers, and all choose alike in every round."""
    method = STRATEGIES.get(FleetConfig.stored(run.config).strategy.name)
    if method is None or method.choice_remedy is None:
        return
    ended = _ended(rounds)
    if len(ended) < _NEWEST_ROUNDS:
        return
    ends: set[str] = set()
    count = 0
    efficiencies = []
    for view in ended:
        for task in store.tasks(view.round.run, view.round.number, "train"):
            if len(task.choices) < 2 or not task.phase.answered:
                continue
            count += 1
            ends.add(_end_taken(task))
            if task.metrics is not None and task.metrics.efficiency is not None:
                efficiencies.append(task.metrics.efficiency)
    if len(ends) != 1 or "" in ends:
        return
    end = ends.pop()
    yield Advice(
        "bad",
        f"Every device trains its {end} sub-model in every round",
        f"In the last {len(ended)} rounds, devices chose the {end} offered sub-model in all"
        f" {count} cases.",
        method.choice_remedy(efficiencies),
    )


def _end_taken(task: TaskRecord) -> str:
    """Return whether a task has the widest or narrowest of its choices; nothing for another."""
    tiers = sorted(Tier.parse(choice.tier) for choice in task.choices)
    taken = Tier.parse(task.tier)
    if taken == tiers[0]:
        return "narrowest"
    return "widest" if taken == tiers[-1] else ""


def _away(run: RunRecord, devices: Sequence[DeviceView]) -> Iterator[Advice]:
    away = []
    for view in devices:
        # A device that was not drawn has no problem: it may be drawn for the next round.
        if view.reason and view.reason != "not drawn":
            away.append(view)
    if away and not run.ended_at:
        remedy = away[0].remedy or "the reason says what to do"
        yield Advice(
            "info",
            f"{len(away)} of {len(devices)} devices do not take part",
            f"For example {away[0].device.id}: {away[0].reason}.",
            f"{remedy[0].upper()}{remedy[1:]}.",
        )
