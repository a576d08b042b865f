"""Add a device to a fleet: write the device's secret file, and an initial configuration.

Example: shoal enroll attic
"""

from pathlib import Path
from typing import Annotated

import typer

from fleet_protocol.errors import StorageError
from shoal.cli.common import HERE, FleetFolder
from shoal.cli.console import print_text
from shoal.extras import needs

_DEVICE_TOML = """\
# Device {name}. On the board, in the folder of this file: shoal device run
# docs/reference/device.toml.md lists all settings.
state_dir = "state"

# This file holds fleet, name, broker and key. Keep it secret.
[identity]
file = "{enrolment}"

# The samples of this board; docs/data.md lists the other kinds: csv, images, npy and functions.
[data]
kind = "npz"
path = "data.npz"  # with the arrays x and y
"""


def _write_device_file(enrolment: Path, name: str) -> Path:
    """Write an initial configuration beside an enrolment; an existing one is kept."""
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
        typer.Argument(help="Id of the device; `server` creates a new key for the server."),
    ],
    folder: FleetFolder = HERE,
    days: Annotated[
        int, typer.Option(min=0, max=36_500, help="Days until the enrolment expires; 0 for never.")
    ] = 0,
) -> None:
    with needs("server"):
        from broker_server.service.authority import enroll, renew_server
        from broker_server.service.own_brokers import what_to_copy
        from broker_server.service.topic_rights import SERVER

    # Looked for before the new enrolment replaces it.
    before = (folder / "devices" / f"{name}.enrolment").exists()
    path = renew_server(folder) if name == SERVER else enroll(folder, name, days=days)
    if name == SERVER:
        print_text(f"{path}: the server has a new key; restart it")
        if what_to_copy(folder):
            print_text(what_to_copy(folder))
        return
    device_file = _write_device_file(path, name)
    print_text(f"{path}: copy it to the board; it is a secret")
    print_text(
        f"{device_file}: set the path of the board's data in it, and copy it to the board as"
        " device.toml"
    )
    print_text(
        "on the board, in the folder of both files: shoal device doctor, then shoal device run"
    )
    print_text(what_to_copy(folder) or "a running server's broker admits the device within seconds")
    if before:
        print_text("the previous enrolment of this device is no longer valid")
