"""The broker's address for boards: the file ``address`` of a fleet's folder, and its fleet.toml.

The file has the host under which boards reach the broker. If the file has a port, for example that
of a router that forwards it, this port counts; otherwise the port in fleet.toml does.
"""

from dataclasses import replace
from pathlib import Path
from shlex import quote

from pydantic import BaseModel

from broker_server.settings.broker import BrokerConfig
from fleet_protocol.addresses import split_address
from fleet_protocol.configuration import load_config
from fleet_protocol.errors import BlobError, ConfigError
from fleet_protocol.foreign_files import read_regular
from fleet_protocol.identity.enrolment import read_enrolment, write_secret
from fleet_protocol.transport import SCHEMES, BrokerAddress, bracket_host

_ADDRESS = "address"
_MOST_BYTES = 4096


class _Fleet(BaseModel):
    """A ``fleet.toml`` of which only the broker is read."""

    broker: BrokerConfig = BrokerConfig()


def write_boards_address(folder: Path, text: str) -> None:
    """Write the file."""
    write_secret(folder / _ADDRESS, text)


def boards_address(folder: Path) -> BrokerAddress:
    """Return the address that a board is enrolled with now.

    Args:
        folder: folder of the fleet.

    Raises:
        ConfigError: the file is missing or malformed, or fleet.toml is.
    """
    path = folder / _ADDRESS
    try:
        text = read_regular(path.resolve(), _MOST_BYTES).decode().strip()
    except (BlobError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); write the broker's address for boards into it, as "
            "mqtts://HOST"
        ) from error
    address = BrokerAddress.parse(text)
    configuration = folder / "fleet.toml"
    names_port = split_address(text, SCHEMES).port is not None
    # A port in the file is that of a router, and has priority.
    if not names_port and configuration.is_file():
        broker = load_config(configuration, _Fleet).broker
        if broker.hosted:
            return replace(address, port=broker.port)
    return address


def describe_outdated(broker: BrokerConfig) -> str | None:
    """Return why enrolled boards may not reach the broker of a configuration, and what to do.

    None if they do, as far as the files of the fleet say, or the fleet has no identities.

    Raises:
        ConfigError: as in `boards_address`.
    """
    if broker.identity is None:
        return None
    folder = broker.identity.parent
    if not (folder / _ADDRESS).is_file():
        return None
    address = boards_address(folder)
    if broker.hosted and address.port != broker.port:
        return (
            f"boards are enrolled for port {address.port}, as {folder / _ADDRESS} says, and the "
            f"broker listens on port {broker.port}: unless a router forwards one to the "
            f"other, write mqtts://{bracket_host(address.host)} into that file, and enrol the "
            "boards again"
        )
    # The server was enrolled with the address that boards had then.
    before = read_enrolment(broker.identity).broker
    if BrokerAddress.parse(before) != address:
        return (
            f"boards that were enrolled for {before} do not find the broker at {address}: enrol "
            f"them again (`shoal enroll NAME --folder {quote(str(folder))}`), and copy their files "
            f"to them; `shoal enroll server --folder {quote(str(folder))}` removes this warning"
        )
    return None
