"""Extend the enrolments of devices; connected devices receive them over the broker.

Example: shoal renew --days 365
"""

import time
from collections.abc import Mapping
from typing import Annotated

import typer

from shoal.cli.common import HERE, FleetFolder
from shoal.cli.console import say
from shoal.extras import needs

_MOST_SHOWN = 5  # enrolments that a line names


def _renew(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of devices; by default all that end."),
    ] = None,
    folder: FleetFolder = HERE,
    days: Annotated[
        int,
        typer.Option(min=0, max=36_500, help="Days from now until it ends; 0 for never."),
    ] = 365,
) -> None:
    with needs("server"):
        from broker_server.service.authority import renew
        from broker_server.service.registry import read_registry

    done = renew(folder, names or (), days=days)
    if done:
        say(f"renewed: {', '.join(done)}; a server that is up tells them")
        return
    ends = {}
    for name, entry in read_registry(folder).devices().items():
        if not names or name in names:
            ends[name] = entry.expires
    say(_why_none(ends, days))


def _why_none(ends: Mapping[str, int], days: int) -> str:
    """Return why no enrolment was renewed.

    Args:
        ends: when the enrolments end, in seconds since 1970, by device; 0 for never.
        days: from now, until which they were to last.
    """
    if not ends:
        return "no device is enrolled here, so none was renewed; `shoal enroll NAME` enrols one"
    shown = []
    for name, expires in list(ends.items())[:_MOST_SHOWN]:
        day = time.strftime("%Y-%m-%d", time.gmtime(expires))
        shown.append(f"{name} ends on {day}" if expires else f"{name} never ends")
    if len(ends) > _MOST_SHOWN:
        shown.append(f"{len(ends) - _MOST_SHOWN} others end as late")
    listed = ", ".join(shown)
    if not any(ends.values()):
        return f"none was renewed: {listed}"
    return (
        f"none was renewed, because none would end later than now: {listed}, and you asked for "
        f"{days} days from today. Ask for more with --days, or for no end with --days 0"
    )
