"""Add a device to a fleet: write its secret file, and a configuration to begin with.

Example: shoal enroll attic
"""

from pathlib import Path
from typing import Annotated

import typer

from fleet_protocol.errors import StorageError
from shoal.cli.common import HERE, FleetFolder
from shoal.cli.console import say
from shoal.extras import needs

_DEVICE_TOML = """\
# Device {name}. On the board, in the folder of this file: shoal device run
# docs/reference/device.toml.md lists all settings.
state_dir = "state"

# Fleet, name and broker are in this file, which is a secret.
[identity]
file = "{enrolment}"

# This board's own samples; docs/data.md lists the other kinds: csv, images, npy and functions.
[data]
kind = "npz"
path = "data.npz"  # with the arrays x and y
"""


def _write_device_file(enrolment: Path, name: str) -> Path:
    """Write a configuration to begin with beside an enrolment; one that is there is kept."""
    path = enrolment.with_suffix(".toml")
    if not path.exists():
        try:
            path.write_text(_DEVICE_TOML.format(name=name, enrolment=enrolment.name), "utf-8")
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    return path


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
    device_file = _write_device_file(path, name)
    say(f"{path}: copy it to the board; it is a secret")
    say(f"{device_file}: copy it there as device.toml, with the place of the board's data")
    say("on the board, in the folder of both: shoal device doctor, then shoal device run")
    say(what_to_copy(folder) or "the broker of a server that is up lets it in within seconds")
    if before:
        say("the enrolment that this device had counts for nothing any more")
