"""Extend devices' enrolments; connected devices receive the new certificates over the broker.

Example: shoal renew --days 365
"""

import time
from collections.abc import Mapping
from typing import Annotated

import typer

from shoal.cli.common import HERE, FleetFolder
from shoal.cli.console import print_text
from shoal.extras import needs

_MOST_SHOWN = 5  # enrolments that one line lists


def _renew(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of devices; by default, all devices whose enrolment expires."),
    ] = None,
    folder: FleetFolder = HERE,
    days: Annotated[
        int,
        typer.Option(
            min=0, max=36_500, help="Days from now until the enrolment expires; 0 for never."
        ),
    ] = 365,
) -> None:
    with needs("server"):
        from broker_server.service.authority import renew
        from broker_server.service.registry import read_registry

    done = renew(folder, names or (), days=days)
    if done:
        print_text(
            f"renewed: {', '.join(done)}; a running server sends the new dates to the devices"
        )
        return
    ends = {}
    for name, entry in read_registry(folder).devices().items():
        if not names or name in names:
            ends[name] = entry.expires
    print_text(_why_none(ends, days))


def _why_none(ends: Mapping[str, int], days: int) -> str:
    """Return the reason why no enrolment was renewed.

    Args:
        ends: when the enrolments expire, in seconds since 1970, by device; 0 for never.
        days: requested validity from now, in days.
    """
    if not ends:
        return (
            "no device is enrolled in this folder, so nothing was renewed; enrol one with `shoal"
            " enroll NAME`"
        )
    shown = []
    for name, expires in list(ends.items())[:_MOST_SHOWN]:
        day = time.strftime("%Y-%m-%d", time.gmtime(expires))
        shown.append(f"{name} expires on {day}" if expires else f"{name} never expires")
    if len(ends) > _MOST_SHOWN:
        shown.append(f"{len(ends) - _MOST_SHOWN} others expire as late")
    listed = ", ".join(shown)
    if not any(ends.values()):
        return f"nothing was renewed: {listed}"
    return (
        "nothing was renewed, because no enrolment would expire later than it does now:"
        f" {listed}, and you requested {days} days from today. Give a larger --days, or --days 0"
        " for no expiry"
    )
