"""Make a device a member of a fleet: writes one secret file, to be carried to the board."""

from shlex import quote
from typing import Annotated

import typer

from shoal.cli.common import HERE, FleetFolder
from shoal.cli.console import say
from shoal.extras import needs


def _enroll(
    name: Annotated[
        str,
        typer.Argument(help="Id of the device; `server` gives the server a new key."),
    ],
    folder: FleetFolder = HERE,
    days: Annotated[
        int, typer.Option(min=0, max=36_500, help="Days until it expires; 0 for never.")
    ] = 0,
) -> None:
    with needs("server"):
        from broker_server.service.authority import enroll, renew_server
        from broker_server.service.own_brokers import what_to_copy
        from broker_server.service.topic_rights import SERVER

    before = (folder / "devices" / f"{name}.enrolment").exists()
    path = renew_server(folder) if name == SERVER else enroll(folder, name, days=days)
    if name == SERVER:
        say(f"{path}: the server has a new key; restart it")
        if what_to_copy(folder):
            say(what_to_copy(folder))
        return
    say(
        f"{path}: copy it to the board, then: shoal device run --config device.toml --enrolment "
        f"{quote(path.name)}"
    )
    say(what_to_copy(folder) or "the broker of a server that is up lets it in within seconds")
    if before:
        say("the enrolment that this device had counts for nothing any more")
