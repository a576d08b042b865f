"""What to do next about a run: a few rules, each with its evidence from the store and its remedy."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from broker_server.rounds.best import read_versions, shown_score
from broker_server.settings.fleet import FleetConfig
from broker_server.store import RunRecord, Store, queries
from broker_server.store.machine import RoundState
from broker_server.store.queries import DeviceView, RoundView

_NEWEST_ROUNDS = 5
_SPARE_SECONDS = 60.0
_MANY_MISSED = 0.2
_MUCH_WORSE = 0.1
_LONG_UNCHANGED = 5
_UNFAIR = 0.2
_SHOWN_BOARDS = 3


@dataclass(frozen=True)
class Advice:
    """Something that an operator should know, and what to do about it.

    Attributes:
        kind: ``bad`` where the run suffers, ``info`` otherwise.
        title: what is so.
        evidence: the figures that say so.
        remedy: what to do, commands in backquotes.
    """

    kind: Literal["bad", "info"]
    title: str
    evidence: str
    remedy: str


def find_advice(store: Store, run: str | None = None, now: float | None = None) -> list[Advice]:
    """What the rules find about a run, by default the newest, at a time.

    A store without a run has nothing to say.

    Errors are those of `queries`.
    """
    if run is None and not store.runs():
        return []
    record = queries.find_run(store, run)
    last = store.last_round(record.id)
    rounds = (
        queries.rounds(store, record.id, first=last.number - _NEWEST_ROUNDS, tasks=False)
        if last
        else []
    )
    found = [
        *_standstill(record, rounds, time.time() if now is None else now),
        *_lost(rounds, devices := queries.devices(store, record.id)),
        *_scores(store, record),
        *_wrong_data(devices),
        *_unfair(devices),
        *_away(record, devices),
    ]
    return sorted(found, key=lambda item: item.kind != "bad")


def _standstill(run: RunRecord, rounds: Sequence[RoundView], now: float) -> Iterator[Advice]:
    keys = FleetConfig.stored(run.config).round
    longest = keys.deadline_seconds + keys.wait_seconds + _SPARE_SECONDS
    newest = rounds[-1].round if rounds else None
    still = now - max(run.created_at, (newest.ended_at or newest.planned_at) if newest else 0.0)
    if run.status == "running" and still > longest:
        yield Advice(
            "bad",
            "The run is in progress, and nothing happens",
            f"Its rounds have not moved for {still:.0f} s; one may take {longest:.0f} s.",
            "See whether its server is up; `shoal run` with the same configuration goes on with it.",
        )


def _lost(rounds: Sequence[RoundView], devices: Sequence[DeviceView]) -> Iterator[Advice]:
    last = [view for view in rounds if view.round.ended_at][-_NEWEST_ROUNDS:]
    for newest in [view.round for view in last if view.round.state is RoundState.ABANDONED][-1:]:
        yield Advice(
            "bad",
            "Rounds are abandoned",
            f"Round {newest.number}: {newest.reason or 'no reason was stored'}.",
            f"Look at `shoal rounds show {newest.number}`; round.quorum says how many updates a round needs.",
        )
    missed = sum(view.phases.get("missed", 0) for view in last)
    tasks = sum(sum(view.phases.values()) for view in last)
    if missed and missed >= _MANY_MISSED * tasks:
        worst = sorted((view for view in devices if view.missed), key=lambda view: -view.missed)[:3]
        yield Advice(
            "bad",
            "Many devices do not answer in time",
            f"{missed} of {tasks} tasks of the last {len(last)} rounds were missed; in all rounds most by "
            f"{', '.join(f'{view.device.id} ({view.missed})' for view in worst)}.",
            "Raise round.deadline_seconds, ask more with round.over_selection, or give these devices a smaller tier.",
        )


def _scores(store: Store, run: RunRecord) -> Iterator[Advice]:
    judged = [(view.score, view) for view in read_versions(store, run.id) if view.score is not None]
    if len(judged) < 2:
        return
    (best, at), (end, _) = (
        max(judged, key=lambda entry: (entry[0], entry[1].version.number)),
        judged[-1],
    )
    since = len(judged) - 1 - judged.index((best, at))
    judging = FleetConfig.stored(run.config).evaluation
    show = f"version {at.version.number} has {shown_score(judging, best):.4f}"
    newest = f"{shown_score(judging, end):.4f}"
    take = (
        f"Take it: `shoal export-weights --store {quote(str(store.folder))} --run {quote(run.id)} "
        f"--version {at.version.number}`."
        if at.kept
        else "Its weights are gone: keep_versions says how many stay."
    )
    if best - end > _MUCH_WORSE * abs(best):
        title = "The newest version is much worse than an earlier one"
        yield Advice("bad", title, f"The newest has {newest}; {show}.", take)
    elif since >= _LONG_UNCHANGED:
        evidence = (
            f"There were {since} evaluations since the best one: {show}, and the newest {newest}."
        )
        yield Advice("info", "The model has stopped getting better", evidence, take)
    elif run.ended_at:
        evidence = f"Of {len(judged)} judged versions it is the best: {show}."
        yield Advice("info", f"Version {at.version.number} is the one to take", evidence, take)


def _wrong_data(devices: Sequence[DeviceView]) -> Iterator[Advice]:
    profiles = {view.device.id: view.device.profile for view in devices}
    findings = {
        name: profile.findings for name, profile in profiles.items() if profile and profile.findings
    }
    if not findings:
        return
    shown = [
        f"{name}: {'; '.join(sentences)}"
        for name, sentences in list(findings.items())[:_SHOWN_BOARDS]
    ]
    more = len(findings) - len(shown)
    others = [f"{more} more, see `shoal devices`"] if more else []
    yield Advice(
        "bad",
        f"The data of {len(findings)} of {len(devices)} devices looks wrong",
        f"{'. '.join([*shown, *others])}.",
        "Change [data] in the device.toml there, and run `shoal device doctor`; if most boards report the same,"
        " check [evaluation.data] of fleet.toml.",
    )


def _unfair(devices: Sequence[DeviceView]) -> Iterator[Advice]:
    own = [(view.evaluation.accuracy, view) for view in devices if view.evaluation]
    known = sorted(
        ((value, view) for value, view in own if value is not None),
        key=lambda entry: entry[0],
    )
    if len(known) > 2 and known[-1][0] - known[0][0] > _UNFAIR:
        (low, worst), (high, best) = known[0], known[-1]
        yield Advice(
            "info",
            "The model serves some devices much worse than others",
            f"On their own samples {worst.device.id} ({worst.tier}) has {low:.4f}, and {best.device.id} ({best.tier}) "
            f"has {high:.4f}.",
            "See under Coverage of the page what its tier never trains, and in the table how many samples it has.",
        )


def _away(run: RunRecord, devices: Sequence[DeviceView]) -> Iterator[Advice]:
    away = [view for view in devices if view.reason and view.reason != "not drawn"]
    if away and not run.ended_at:
        remedy = away[0].remedy or "the reason says what to do"
        yield Advice(
            "info",
            f"{len(away)} of {len(devices)} devices take no part",
            f"For example {away[0].device.id}: {away[0].reason}.",
            f"{remedy[0].upper()}{remedy[1:]}.",
        )
