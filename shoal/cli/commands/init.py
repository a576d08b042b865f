"""Create a fleet's folder with identities, or (--template) a project with a model and data.

With --host, the fleet's server starts an installed Mosquitto. With --broker, the fleet uses your
own broker, and this command writes the files for it.

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
from shoal.cli.console import print_text
from shoal.extras import needs

if TYPE_CHECKING:
    from broker_server.service.new_fleet import NewFleet

_FOLDER = Path(__file__).parents[2] / "templates"
_COMMON = "common"
_SUFFIX = ".txt"
"""Suffix of program names, so that no tool treats them as files of this package."""

_BROKERS = ("mosquitto", "emqx")
"""Values of --broker that are not addresses."""
TEMPLATES = tuple(
    sorted(path.name for path in _FOLDER.iterdir() if path.is_dir() and path.name != _COMMON)
)


def make_project(folder: Path, template: str, fleet: str) -> None:
    """Write model, data, configurations and the commands to run them into a new, or empty, folder.

    A file of the template replaces the common file of the same name.

    Raises:
        ConfigError: there is no such template, the name is invalid, or the folder is not empty.
        StorageError: it cannot be written.
    """
    if template not in TEMPLATES:
        choice = f"choose one of {', '.join(TEMPLATES)}"
        raise ConfigError(
            f"--template: no template {template!r}{did_you_mean(template, TEMPLATES)}; {choice}"
        )
    check_name("fleet", fleet)
    # Also refuses a file in the folder's place.
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; `shoal init` needs a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The template's files come last, so that they replace common ones.
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
    """Return a fleet with the operator's own Mosquitto.

    Raises:
        ConfigError: the address is malformed, does not use TLS, or has a different host from
            --host.
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
            "--broker: remove the login from the address: this broker requires certificates"
            " of the fleet"
        )
    if host is not None and host.strip("[]") != address.host:
        raise ConfigError(
            f"--host {host} and --broker {address} name different hosts: omit --host, because"
            " boards use the broker's address"
        )
    return NewFleet(fleet, address.host, address.port, url=str(address))


def _require_known_broker(broker: str) -> None:
    """Raise a ConfigError if a value of --broker is neither an address nor a known broker."""
    if broker in _BROKERS:
        return
    hint = did_you_mean(broker, _BROKERS)
    if not hint and "." in broker:
        hint = f" (did you mean 'mqtts://{hide_login(broker)}'?)"
    raise ConfigError(
        f"--broker: a fleet with identities cannot use {hide_login(broker)!r}{hint}; use"
        " mosquitto, emqx or mqtts://HOST:PORT"
    )


def _new_fleet(fleet: str, host: str, port: int, broker: str) -> "NewFleet":
    """Return a fleet with a broker that the server starts, or an EMQX.

    Raises:
        ConfigError: no Mosquitto is installed that the server could start.
    """
    from broker_server.service.mosquitto import installed_mosquitto
    from broker_server.service.new_fleet import NewFleet

    # Without a Mosquitto the new fleet could not start, so refuse before any file is written.
    if broker == "mosquitto":
        installed_mosquitto()
    listen = "::" if ":" in host else "0.0.0.0"  # noqa: S104  (boards must get in)
    return NewFleet(fleet, host, port, broker, listen)


def _init(
    fleet: Annotated[str, typer.Argument(help="Name of the fleet.")],
    host: Annotated[
        str | None,
        typer.Option(
            help="Host name or address at which boards reach the broker; not allowed if --broker"
            " is an address."
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            autocompletion=lambda incomplete: [
                name for name in TEMPLATES if name.startswith(incomplete)
            ],
            help="Create a project on this machine instead, from a template:"
            f" {', '.join(TEMPLATES)}.",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Target folder; by default, a folder with the fleet's name."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the broker.")] = 8883,
    broker: Annotated[
        str,
        typer.Option(
            help="Broker: mosquitto (the server starts an installed one), mqtts://host:port of"
            " your own Mosquitto, or emqx (on the host). For your own Mosquitto or emqx, the"
            " command writes files for the broker's host."
        ),
    ] = "mosquitto",
) -> None:
    place = folder or Path(fleet)
    # A template is a project on this machine, without identities.
    if template is not None and host is None:
        make_project(place, template, fleet)
        print_text(f"project {fleet} in {place}; {place / 'README.md'} has the commands")
        return
    is_elsewhere = "://" in broker
    if not is_elsewhere:
        _require_known_broker(broker)
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
        # An IPv6 address may be typed with brackets, as in a URL.
        new = _new_fleet(fleet, (host or "").strip("[]"), port, broker)
    found_fleet(place, new)
    print_text(f"fleet {fleet} in {place}; operator.pem and ca.key are secrets")
    if new.own_broker is not None:
        guide = place / new.own_broker / OWN_BROKERS[new.own_broker].guide
        print_text(f"its broker:     {guide} lists the files that its host needs")
    print_text(f"start it:       shoal up --config {quote(str(place / 'fleet.toml'))}")
    print_text(f"add a device:   shoal enroll NAME --folder {quote(str(place))}")
