"""Writes files for a broker that the operator runs: configuration, access rules, and a README.

Configuration and README are written once; rules and certificates with every change of membership.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from broker_server.service.mosquitto_files import AccessFiles, access_rules, listener
from broker_server.service.topic_rights import rights
from fleet_protocol.identity.enrolment import write_secret
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress

EMQX = "emqx"
MOSQUITTO = "mosquitto"


@dataclass(frozen=True)
class OwnBroker:
    """The files for one kind of broker, in a subfolder of the fleet's folder with its name.

    Attributes:
        guide: the file that explains where to copy the others.
        write_configuration: writes the constant files, for a fleet and the broker's address.
        write_access: writes the access rules, for the fleet's folder, its name and its members.
    """

    guide: str
    write_configuration: Callable[[Path, str, BrokerAddress], None]
    write_access: Callable[[Path, str, Iterable[str]], None]


def write_configuration(folder: Path, kind: str, fleet: str, address: BrokerAddress) -> None:
    """Write configuration and README of a broker into a folder within the fleet's.

    Args:
        folder: folder of the fleet.
        kind: key of `OWN_BROKERS`.
        fleet: its name.
        address: address of the broker.
    """
    OWN_BROKERS[kind].write_configuration(folder / kind, fleet, address)


def write_access(folder: Path, fleet: str, members: Iterable[str]) -> None:
    """Write the access rules if the operator runs the fleet's broker."""
    names = list(members)
    for kind in own_kinds(folder):
        OWN_BROKERS[kind].write_access(folder / kind, fleet, names)


def own_kinds(folder: Path) -> list[str]:
    """Return the kinds of operator-run brokers for which a fleet's folder has files."""
    return [kind for kind in OWN_BROKERS if (folder / kind).is_dir()]


def what_to_copy(folder: Path) -> str:
    """Return the operator's next step after a change of membership; empty if the server does it."""
    for kind in own_kinds(folder):
        # Each kind has a folder, and a fleet has one broker.
        place = folder / kind
        guide = place / OWN_BROKERS[kind].guide
        return f"now copy the files of {place} to the broker's host, as {guide} says"
    return ""


# EMQX

_ACTIONS = MappingProxyType({"read": "subscribe", "write": "publish", "readwrite": "all"})


def _write_emqx(folder: Path, _fleet: str, address: BrokerAddress) -> None:
    text = Path(__file__).with_name("emqx.hocon").read_text(encoding="utf-8")
    write_secret(folder / "emqx.hocon", text.replace("PORT", str(address.port)))


def _write_emqx_rules(folder: Path, fleet: str, members: Iterable[str]) -> None:
    """Write ``acl.conf``, which denies everything else; see `rights`."""
    lines = []
    for name in members:
        for right, topic in rights(Topics(fleet), name):
            action = _ACTIONS[right]
            lines.append(f'{{allow, {{username, "{name}"}}, {action}, ["{topic}"]}}.\n')
    lines.append("{deny, all}.\n")
    write_secret(folder / "acl.conf", "".join(lines))


# Mosquitto

_PLACE = PurePosixPath("/etc/mosquitto/shoal")
"""Where Mosquitto's files are on the broker's host."""
_CERTIFICATES = ("ca.pem", "crl.pem", "broker.pem", "broker.key")

_HEAD = """\
# The listener of fleet {fleet}, for {place.parent}/conf.d of a Mosquitto 2; README.md beside this
# file lists which files to copy, and where. It admits only clients with a certificate of the fleet.
"""

_README = """\
# Mosquitto for fleet {fleet}

This folder contains everything that the Mosquitto on {host} needs. Use that Mosquitto only for this
fleet, because a Mosquitto has one set of access rules. Each device needs a certificate of the fleet
to connect, and can use only its own topics. `broker.key` is a secret.

## Set it up

Copy the folder to {host}, from the folder of the fleet. If the fleet's folder is on {host}, skip
this step:

    scp -r mosquitto {host}:

Then, on {host}, in the copied folder (Debian, Ubuntu, Raspberry Pi OS):

    sudo apt install mosquitto
    sudo install -d -o root -g mosquitto -m 750 {place}
    sudo install -o root -g mosquitto -m 640 acl ca.pem crl.pem broker.pem broker.key {place}
    sudo install -m 644 shoal.conf {place.parent}/conf.d
    sudo systemctl restart mosquitto

If Mosquitto does not start, `sudo tail /var/log/mosquitto/mosquitto.log` shows why. Port {port}
must be open for the boards. Start the server in the fleet's folder:

    shoal up --config fleet.toml

## After `shoal enroll` and `shoal revoke`

These commands change `acl` and `crl.pem` in this folder; `shoal enroll server` also changes
`broker.pem` and `broker.key`. Copy the folder to {host} again, and install the files there:

    sudo install -o root -g mosquitto -m 640 acl ca.pem crl.pem broker.pem broker.key {place}
    sudo systemctl restart mosquitto

All boards reconnect within seconds, and a run continues. If you only added devices,
`sudo systemctl reload mosquitto` is enough, and keeps all connections. A device that was revoked or
enrolled again keeps its connection until the restart.
"""


def _write_mosquitto(folder: Path, fleet: str, address: BrokerAddress) -> None:
    access = AccessFiles(
        certificate=_PLACE / "broker.pem",
        key=_PLACE / "broker.key",
        authority=_PLACE / "ca.pem",
        rules=_PLACE / "acl",
        withdrawn=_PLACE / "crl.pem",
    )
    head = _HEAD.format(fleet=fleet, place=_PLACE)
    write_secret(folder / "shoal.conf", head + listener(address.port, "", access))
    readme = _README.format(fleet=fleet, host=address.host, port=address.port, place=_PLACE)
    write_secret(folder / "README.md", readme)


def _write_mosquitto_rules(folder: Path, fleet: str, members: Iterable[str]) -> None:
    write_secret(folder / "acl", access_rules(fleet, members))
    # Copies, so that nobody moves the authority's or the operator's key to the broker's host.
    # A folder from an earlier version may lack one of them.
    for name in _CERTIFICATES:
        source = folder.parent / name
        if source.exists():
            write_secret(folder / name, source.read_bytes())


OWN_BROKERS: Mapping[str, OwnBroker] = MappingProxyType(
    {
        EMQX: OwnBroker("emqx.hocon", _write_emqx, _write_emqx_rules),
        MOSQUITTO: OwnBroker("README.md", _write_mosquitto, _write_mosquitto_rules),
    }
)
