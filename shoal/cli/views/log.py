"""Shows the log of a server, and follows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from broker_server.store import EventRecord, queries
from broker_server.store.event_table import EVERY_LINE, LineFilter
from fleet_protocol.errors import visible
from fleet_protocol.spelling import did_you_mean
from shoal.cli.console import print_json, print_text, time_text
from shoal.cli.views.view import View, follow
from shoal.sources import Source, open_source

_EVENTS_AT_ONCE = 10_000
"""Largest number of lines to read after a change of the store."""


@dataclass(frozen=True)
class LogQuery:
    """Which lines are read.

    Attributes:
        run: id of a run, or the beginning of it; None for all runs.
        last: number of newest lines.
        matching: their kinds and device.
    """

    run: str | None
    last: int
    matching: LineFilter = EVERY_LINE


def show_log(store: Path, query: LogQuery, *, as_json: bool, url: str = "") -> None:
    """Print the last lines of the log."""
    hint = ""

    def read(source: Source, run: str) -> list[EventRecord]:
        nonlocal hint
        events = source.log(query.last, run, matching=query.matching)
        if not events:
            hint = _hint(query.matching, source.log(_EVENTS_AT_ONCE, run))
        return events

    def draw(events: Sequence[EventRecord]) -> None:
        _draw(events)
        if not events:
            print_text(f"the log has no matching line{hint}")

    View(read, draw).show(store, query.run, as_json=as_json, url=url)


def _hint(wanted: LineFilter, events: Sequence[EventRecord]) -> str:
    """Return what the log has instead of lines that pass a filter, for a message.

    Args:
        wanted: the filter.
        events: the newest lines of the log.
    """
    kinds = sorted({event.kind for event in events})
    devices = sorted({event.device for event in events if event.device})
    if wanted.kinds and kinds and not set(kinds).intersection(wanted.kinds):
        return f"{did_you_mean(wanted.kinds[0], kinds)}; it has the kinds {', '.join(kinds)}"
    if wanted.device and wanted.device not in devices:
        return (
            f": none is about {wanted.device!r}{did_you_mean(wanted.device, devices)}; `shoal"
            " devices` lists the devices"
        )
    return ""


def follow_log(store: Path, query: LogQuery, *, as_json: bool, url: str = "") -> None:
    """Print the last lines of the log and each new one, until the run ends or the user stops it."""
    newest_id = 0
    count = query.last

    def read(source: Source, run: str) -> list[EventRecord]:
        return source.log(count, run, after=newest_id, matching=query.matching)

    with open_source(store, url) as source:
        for events in follow(source, query.run or "", read):
            if not events:
                continue
            # Later reads return only lines after this one.
            newest_id = events[-1].id
            # `last` bounds the first read only; afterwards no new line may be lost.
            count = _EVENTS_AT_ONCE
            if not as_json:
                _draw(events)
                continue
            for event in events:
                # One line for each event, so that a program can read the stream.
                print_json(queries.to_json_values(event), line=True)


def _draw(events: Sequence[EventRecord]) -> None:
    for event in events:
        # Control characters of a device's text must not reach the terminal.
        print_text(visible(_line(event), lines=False))


def _line(event: EventRecord) -> str:
    """Return an event as a line of text: time, kind, run, round, device and detail."""
    places = []
    if event.round:
        places.append(f"round {event.round}")
    if event.device:
        places.append(event.device)
    return f"{time_text(event.at)} {event.kind:18} {' '.join(places):24} {event.detail}"
