"""What is stored of a run, as tables and as JSON.

`run` is its id or the beginning of that, None for the newest.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.markup import escape

from broker_server.rounds.advice import Advice, find_advice
from broker_server.rounds.best import VersionView, read_versions
from broker_server.store import (
    EventRecord,
    RoundRecord,
    RunRecord,
    Store,
    promotion,
    queries,
)
from broker_server.store.export import load_version
from broker_server.updates.quarantine import release
from fleet_protocol.errors import ConfigError, visible
from fleet_protocol.signals import on_signals
from shoal.cli.console import (
    bytes_text,
    output_console,
    print_json,
    print_rows,
    release_text,
    say,
    seconds_text,
)
from shoal.cli.source import Asked, changes, opened
from shoal.client import Client, Verb

_FOLLOWED = 10_000  # lines that may come between two looks at a log


def _clock(seconds: float | None) -> str:
    return (
        "-"
        if seconds is None
        else datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    )


_View = TypeVar("_View")
_Source = TypeVar("_Source", bound=Store | Client)


@dataclass(frozen=True)
class Shown(Generic[_View]):
    """Something of a store, for people and for programs, to whom `plain` gives records that are
    printed flat.
    """

    look: Asked[Store, _View]
    draw: Callable[[_View], None]
    plain: Callable[[_View], Any] = queries.to_json_values

    def show(
        self,
        store: Path,
        run: str | None,
        *,
        as_json: bool,
        watch: bool = False,
        url: str = "",
    ) -> None:
        """Print it of a run (None for the newest).

        Watched, each time it changes, as JSON on a line of its own.

        No such run is a ConfigError and no store a StorageError, here and below.
        """
        with opened(store, url) as found:
            for view in watched(found, run, self.look) if watch else [self.look(found, run)]:
                if not as_json:
                    if watch:
                        output_console().clear()
                    self.draw(view)
                else:
                    print_json(self.plain(view), line=watch)


_RUN = Asked(queries.find_run, lambda client, run: client.runs(run)[0].run)


def watched(
    source: _Source, run: str | None, look: Callable[[_Source, str | None], _View]
) -> Iterator[_View]:
    """What a look finds, again whenever the store was written, until the run has ended or the
    operator interrupts.
    """
    over = threading.Event()
    stops = (
        on_signals(lambda _: over.set())
        if isinstance(source, Store)
        else suppress(KeyboardInterrupt)
    )
    with stops:  # a network is read until something comes, unless that is interrupted
        for _ in changes(source, over):
            # Before the look: what came before the end is seen by it.
            ended = run is not None and _RUN(source, run).ended_at is not None
            yield look(source, run)
            if ended:
                return


def _draw_status(view: queries.StatusView) -> None:
    console = output_console()
    if view.run is None:
        console.print(f"no run yet; {view.online} of {view.devices} devices online")
        return
    accuracy = "not evaluated" if view.evaluation is None else view.evaluation.summary
    about = f"{escape(view.run.arch)}: {escape(view.run.status)}"
    console.print(f"run [bold]{escape(view.run.id)}[/] of {about}", highlight=False)
    if view.insecure:
        console.print(
            "  [bold red]insecure[/]: nothing is signed; whoever reaches the broker can run graphs on the boards"
        )
    if view.run.detail:
        say(f"  {view.run.detail}")
    say(f"  {view.closed} of {view.rounds} rounds closed, {accuracy}")
    if view.epsilon is not None:
        say(f"  epsilon {view.epsilon:.4g} for the device that was asked most often")
    if view.round is not None:
        say(f"  round {view.round.number} is {view.round.state.value}")
    say(f"  {view.online} of {view.devices} devices online when last heard of")
    say(
        f"  {bytes_text(view.run.wire_bytes)} on the wire, {bytes_text(view.run.payload_bytes)} payload"
    )
    refused = ", ".join(f"{count} {reason}" for reason, count in view.refusals.items()) or "nothing"
    say(f"  refused: {refused}")


def _draw_advice(found: Sequence[Advice]) -> None:
    for item in found:
        say(f"{item.title}\n  {item.evidence}\n  {item.remedy}")
    if not found:
        say("nothing: no rule finds anything wrong")


def _draw_devices(views: Sequence[queries.DeviceView]) -> None:
    rows = []
    for view in views:
        profile = view.device.profile
        rows.append(
            {
                "device": view.device.id,
                "online": "yes" if view.device.online else "no",
                "board": "-" if profile is None else f"{profile.arch}, {profile.cores} cores",
                "version": "-"
                if profile is None
                else release_text(profile.runtime_version, profile.release, profile.sets),
                "tier": view.tier or "-",
                "samples": "-" if view.examples is None else str(view.examples),
                "merged": str(view.merged),
                "missed": str(view.missed),
                "refused": str(view.refused),
                "own accuracy": number_text(view.evaluation.accuracy if view.evaluation else None),
                "training": seconds_text(view.train_seconds),
                "memory": "-" if view.resident_bytes is None else bytes_text(view.resident_bytes),
                "trains on": (profile.provider if profile else "") or "-",
                "last seen": _clock(view.device.last_seen_at),
                "not training, or less": view.reason
                or (profile.lowered if profile else None)
                or "-",
            }
        )
    print_rows("devices", rows, empty="no device was ever seen")
    for view in views:
        for finding in (view.device.profile.findings if view.device.profile else None) or ():
            say(f"the data of {view.device.id} looks wrong: {finding}")


def _tier_accuracy(record: RoundRecord, tier: str) -> str:
    found = record.evaluation.tiers.get(tier) if record.evaluation else None
    return number_text(None if found is None else found.shown)


def number_text(value: float | None) -> str:
    """A number of a table, if there is one."""
    return "-" if value is None else f"{value:.4f}"


def _metric(record: RoundRecord, name: str) -> float | None:
    found = record.evaluation.metrics if record.evaluation else ()
    return next((metric.value for metric in found if metric.name == name), None)


def _draw_rounds(views: Sequence[queries.RoundView]) -> None:
    judged = [view.round.evaluation for view in views if view.round.evaluation]
    metrics = dict.fromkeys(metric.name for found in judged for metric in found.metrics)
    on_devices = dict.fromkeys(name for view in views for name in view.device_metrics)
    tiers = dict.fromkeys(
        tier for view in views if view.round.evaluation for tier in view.round.evaluation.tiers
    )
    rows = [
        {
            "round": str(view.round.number),
            "state": view.round.state.value,
            "accuracy": number_text(
                view.round.evaluation.accuracy if view.round.evaluation else None
            ),
            "loss": number_text(view.round.evaluation.loss if view.round.evaluation else None),
            **{name: number_text(_metric(view.round, name)) for name in metrics},
            "on devices": number_text(view.device_accuracy),
            **{
                f"{name} on devices": number_text(view.device_metrics.get(name))
                for name in on_devices
            },
            **{tier: _tier_accuracy(view.round, tier) for tier in tiers},
            **({"epsilon": f"{view.epsilon:.4g}"} if view.epsilon is not None else {}),
            "updates": ", ".join(f"{count} {phase}" for phase, count in view.phases.items()),
            "time": seconds_text(view.seconds),
            "note": view.round.reason or view.round.note or "",
        }
        for view in views
    ]
    print_rows("rounds", rows, empty="no round yet")


def _draw_runs(views: Sequence[queries.RunView]) -> None:
    rows = [
        {
            "run": view.run.id,
            "status": view.run.status,
            "model": view.run.arch,
            "strategy": view.strategy,
            "rounds": f"{view.closed} of {view.rounds}",
            "versions": ", ".join(f"{name} {number}" for name, number in view.versions.items()),
            "accuracy": number_text(view.evaluation.shown if view.evaluation else None),
            "on the wire": bytes_text(view.run.wire_bytes),
            "begun": _clock(view.run.created_at),
            "time": seconds_text(view.seconds),
            "note": view.run.detail or "",
        }
        for view in views
    ]
    print_rows("runs", rows, empty="no run yet")


def _draw_versions(views: Sequence[VersionView]) -> None:
    _, best = max(
        ((view.score, view.version.number) for view in views if view.score is not None),
        default=(None, None),
    )
    rows = [
        {
            "version": str(view.version.number),
            "made": _clock(view.version.created_at),
            "judged": "-" if view.version.evaluation is None else view.version.evaluation.summary,
            "best": "best" if view.version.number == best else "",
            "weights": "kept" if view.kept else "gone",
        }
        for view in views
    ]
    print_rows("versions", rows, empty="no run yet")


def _draw_log(events: Sequence[EventRecord]) -> None:
    for event in events:
        where = " ".join(
            part
            for part in (
                f"round {event.round}" if event.round else "",
                event.device or "",
            )
            if part
        )
        say(
            visible(
                f"{_clock(event.at)} {event.kind:18} {where:24} {event.detail}",
                lines=False,
            )
        )
    if not events:
        say("the log is empty")


def _without(name: str, view: Any) -> dict[str, Any]:
    """A view but for what another command lists."""
    return {key: value for key, value in queries.to_json_values(view).items() if key != name}


STATUS = Shown(Asked(queries.status, Client.status), _draw_status, partial(_without, "runs"))
ADVICE = Shown(Asked(find_advice, Client.advice), _draw_advice)
DEVICES = Shown(Asked(queries.devices, Client.devices), _draw_devices)
ROUNDS = Shown(
    Asked(
        partial(queries.rounds, tasks=False),
        lambda client, run: client.rounds(run, tasks=0),
    ),
    _draw_rounds,
    lambda views: [_without("tasks", view) for view in views],
)
RUNS = Shown(Asked(queries.runs, Client.runs), _draw_runs)
VERSIONS = Shown(Asked(read_versions, Client.versions), _draw_versions)


def show_log(
    store: Path,
    run: str | None,
    *,
    last: int,
    as_json: bool,
    follow: bool,
    url: str = "",
) -> None:
    """Show the last lines that the server noted of a run, or of all.

    Followed, it goes on with what comes, until the run has ended or the user interrupts.
    """
    known = 0
    look = Asked[Store, list[EventRecord]](
        lambda store, of: queries.log(store, of, last=last, after=known),
        lambda client, of: client.log(last, of, after=known),
    )
    if not follow:
        Shown(look, _draw_log).show(store, run, as_json=as_json, url=url)
        return
    with opened(store, url) as found:
        for events in watched(found, run, look):
            for event in events:
                known = event.id
                last = _FOLLOWED
                if as_json:
                    print_json(queries.to_json_values(event), line=True)
            if events and not as_json:
                _draw_log(events)


def choose(source: Store | Client, run: str | None, *, best: bool) -> tuple[RunRecord, int]:
    """A run, and its version that was judged best, or else the one that is promoted, or the newest.

    Raises:
        ConfigError: there is no such run, or nothing was judged.
    """
    found = next(iter(RUNS.look(source, run)), None)
    if found is None:
        raise ConfigError("there is no run yet; `shoal run` begins one")
    if not best:
        return found.run, found.versions.get("promoted", found.versions["newest"])
    views = VERSIONS.look(source, found.run.id)
    judged = [(view.score, view.version.number) for view in views if view.score is not None]
    if not judged:
        raise ConfigError(f"--best: no version of run {found.run.id} was judged; give --version N")
    return found.run, max(judged)[1]


def acted(store: Path, url: str, verb: Verb, run: str | None, **which: str | int) -> str:
    """Do a verb of `act` to a store or on its page, and say the run."""
    do = Asked[Store, str](
        lambda to, of: act(to, verb, of, **which),
        lambda page, of: page.act(verb, of, **which),
    )
    with opened(store, url, read_only=False) as source:
        return do(source, run)


def act(store: Store, verb: Verb, run: str | None, version: Any = None, device: Any = None) -> str:
    """Promote a version or roll back to it, or release a device, which is asked again from the next
    round.

    Raises:
        ConfigError: the store has no such run or version, or nothing of this device was refused in
            it.
    """
    of = queries.find_run(store, run).id
    if verb == "release":
        release(store, of, device or "")
    elif version is None:
        raise ConfigError(f"{verb}: which version? Give ?version=N")
    else:
        use = promotion.promote if verb == "promote" else promotion.roll_back
        use(store, load_version(store, of, version).record)
    return of
