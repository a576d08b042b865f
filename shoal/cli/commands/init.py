"""Make a folder for a fleet with identities, or for a model and data (--template).

The server of such a fleet starts an installed Mosquitto (--host), or uses your own broker
(--broker), for which the command writes files.

Example: shoal init garden --host 192.168.1.10
"""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from fleet_protocol.addresses import hide_login
from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.spelling import did_you_mean
from fleet_protocol.topics import check_name
from fleet_protocol.transport import BrokerAddress
from shoal.cli.console import say
from shoal.extras import needs

if TYPE_CHECKING:
    from broker_server.service.new_fleet import NewFleet

_FOLDER = Path(__file__).parents[2] / "templates"
_COMMON = "common"
_SUFFIX = ".txt"
"""Behind the names of programs, so that nothing takes them for ours."""

_BROKERS = ("mosquitto", "emqx")
"""Values of --broker that are no address."""
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


def _new_fleet_elsewhere(fleet: str, host: str | None, broker: str) -> "NewFleet":
    """Return a fleet with a Mosquitto of the operator's own.

    Raises:
        ConfigError: the address is malformed, without TLS, or of another host than --host.
    """
    from broker_server.service.new_fleet import NewFleet

    address = BrokerAddress.parse(broker)
    if not address.tls:
        raise ConfigError(
            f"--broker {address}: the broker of a fleet with identities needs TLS: give its "
            "address as mqtts://HOST:PORT"
        )
    if address.username is not None:
        raise ConfigError(
            "--broker: leave the login out: this broker asks for certificates of the fleet"
        )
    if host is not None and host.strip("[]") != address.host:
        raise ConfigError(
            f"--host {host} and --broker {address} name two hosts: leave --host out, since boards "
            "reach the broker under its address"
        )
    return NewFleet(fleet, address.host, address.port, url=str(address))


def _new_fleet(fleet: str, host: str, port: int, broker: str) -> "NewFleet":
    """Return a fleet with a broker that the server starts, or an EMQX.

    Raises:
        ConfigError: there is no such broker, or none is installed that the server could start.
    """
    from broker_server.service.mosquitto import installed_mosquitto
    from broker_server.service.new_fleet import NewFleet

    if broker not in _BROKERS:
        raise ConfigError(
            f"--broker: no broker {hide_login(broker)!r} of a fleet with identities"
            f"{did_you_mean(broker, _BROKERS)}; take mosquitto, emqx or mqtts://HOST:PORT"
        )
    if broker == "mosquitto":
        installed_mosquitto()
    listen = "::" if ":" in host else "0.0.0.0"  # noqa: S104  (boards must get in)
    return NewFleet(fleet, host, port, broker, listen)


def _init(
    fleet: Annotated[str, typer.Argument(help="Name of the fleet.")],
    host: Annotated[
        str | None,
        typer.Option(
            help="Name or address under which boards reach the broker; not beside an address in "
            "--broker."
        ),
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
            help="mosquitto (the server starts an installed one), mqtts://host:port of your "
            "own Mosquitto, or emqx (on the host); the last two get files for their host."
        ),
    ] = "mosquitto",
) -> None:
    place = folder or Path(fleet)
    if template is not None and host is None:
        make_project(place, template, fleet)
        say(f"project {fleet} in {place}; {place / 'README.md'} has the commands")
        return
    is_elsewhere = "://" in broker
    if template is not None or (host is None and not is_elsewhere):
        raise ConfigError(
            "give --host for a fleet with identities, or --template for a project on this machine"
        )
    with needs("server"):
        from broker_server.service.authority import found_fleet
        from broker_server.service.own_brokers import OWN_BROKERS

    if is_elsewhere:
        new = _new_fleet_elsewhere(fleet, host, broker)
    else:
        new = _new_fleet(fleet, (host or "").strip("[]"), port, broker)
    found_fleet(place, new)
    say(f"fleet {fleet} in {place}; operator.pem and ca.key are secrets")
    if new.own_broker is not None:
        guide = place / new.own_broker / OWN_BROKERS[new.own_broker].guide
        say(f"its broker:     {guide} says which files its host needs")
    say(f"start it:       shoal up --config {quote(str(place / 'fleet.toml'))}")
    say(f"add a device:   shoal enroll NAME --folder {quote(str(place))}")
