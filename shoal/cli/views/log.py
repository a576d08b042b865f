"""Shows the lines that a server noted, and follows them."""

from collections.abc import Sequence
from pathlib import Path

from broker_server.store import EventRecord, queries
from broker_server.store.event_table import EVERY_LINE, LineFilter
from fleet_protocol.errors import visible
from shoal.cli.console import print_json, say, time_text
from shoal.cli.views.view import View, follow
from shoal.sources import Source, open_source

_EVENTS_AT_ONCE = 10_000
"""Bound on the lines that are read after one change of the store."""


def show_log(  # noqa: PLR0913  (an argument for each option of the command)
    store: Path,
    run: str | None,
    *,
    last: int,
    as_json: bool,
    url: str = "",
    matching: LineFilter = EVERY_LINE,
) -> None:
    """Print the last lines of the log, of a run (its id, or the beginning of it) or of all."""

    def read(source: Source, run: str) -> list[EventRecord]:
        return source.log(last, run, matching=matching)

    View(read, _draw).show(store, run, as_json=as_json, url=url)


def follow_log(  # noqa: PLR0913  (an argument for each option of the command)
    store: Path,
    run: str | None,
    *,
    last: int,
    as_json: bool,
    url: str = "",
    matching: LineFilter = EVERY_LINE,
) -> None:
    """Print the last lines of the log and each new one, until the run ends or the user stops it."""
    newest_id = 0
    count = last

    def read(source: Source, run: str) -> list[EventRecord]:
        return source.log(count, run, after=newest_id, matching=matching)

    with open_source(store, url) as source:
        for events in follow(source, run or "", read):
            if not events:
                continue
            newest_id = events[-1].id
            count = _EVENTS_AT_ONCE
            if not as_json:
                _draw(events)
                continue
            for event in events:
                print_json(queries.to_json_values(event), line=True)


def _draw(events: Sequence[EventRecord]) -> None:
    for event in events:
        say(visible(_line(event), lines=False))
    if not events:
        say("the log has no such line")


def _line(event: EventRecord) -> str:
    """Return an event as a line of text: when, what, where, and its detail."""
    places = []
    if event.round:
        places.append(f"round {event.round}")
    if event.device:
        places.append(event.device)
    return f"{time_text(event.at)} {event.kind:18} {' '.join(places):24} {event.detail}"
