"""Make a folder for a fleet with identities (--host), or for a model and data (--template)."""

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.spelling import did_you_mean
from fleet_protocol.topics import check_name
from shoal.cli.console import say
from shoal.extras import needs

_FOLDER = Path(__file__).parents[2] / "templates"
_COMMON = "common"
_SUFFIX = ".txt"
"""Behind the names of programs, so that nothing takes them for ours."""

TEMPLATES = tuple(
    sorted(path.name for path in _FOLDER.iterdir() if path.is_dir() and path.name != _COMMON)
)


def make_project(folder: Path, template: str, fleet: str) -> None:
    """Write model, data, configurations and the commands to run them into a new, or empty, folder.

    A file of the template's own counts before that of the same name which all share.

    Raises:
        ConfigError: there is no such template, the name is unusable, or the folder has something in
            it.
        StorageError: it cannot be written.
    """
    if template not in TEMPLATES:
        choice = f"choose one of {', '.join(TEMPLATES)}"
        raise ConfigError(
            f"--template: no template {template!r}{did_you_mean(template, TEMPLATES)}; {choice}"
        )
    check_name("fleet", fleet)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; `shoal init` makes a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in (_FOLDER / _COMMON, _FOLDER / template):
            for path in source.iterdir():
                text = (
                    path.read_text(encoding="utf-8")
                    .replace("FLEET", fleet)
                    .replace("TEMPLATE", template)
                )
                (folder / path.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error


def _init(
    fleet: Annotated[str, typer.Argument(help="Name of the fleet.")],
    host: Annotated[
        str | None,
        typer.Option(help="Name or address under which boards reach the broker."),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            autocompletion=lambda incomplete: [
                name for name in TEMPLATES if name.startswith(incomplete)
            ],
            help=f"A project on this machine instead: {', '.join(TEMPLATES)}.",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to; by default a folder of the fleet's name."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the broker.")] = 8883,
    broker: Annotated[
        str,
        typer.Option(
            help="embedded, mosquitto (an installed one), emqx (on the host, with the files that "
            "are written), or "
            "mqtts://host:port of one with the fleet's certificates."
        ),
    ] = "embedded",
) -> None:
    place = folder or Path(fleet)
    if template is not None and host is None:
        make_project(place, template, fleet)
        say(f"project {fleet} in {place}; {place / 'README.md'} has the commands")
        return
    if host is None or template is not None:
        raise ConfigError(
            "give --host for a fleet with identities, or --template for a project on this machine"
        )
    with needs("server"):
        from broker_server.service.authority import NewFleet, found_fleet

    host = host.strip("[]")
    founding = NewFleet(fleet, host, port, broker)
    found_fleet(place, replace(founding, listen="::") if ":" in host else founding)
    say(f"fleet {fleet} in {place}; operator.pem and ca.key are secrets")
    say(f"start it:       shoal up --config {quote(str(place / 'fleet.toml'))}")
    say(f"add a device:   shoal enroll NAME --folder {quote(str(place))}")
