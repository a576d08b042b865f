"""The operator's side of a fleet's identities: its folder, its keys, and the enrolments of its
members.

<folder>/operator.pem       signs members (Ed25519); needed to enrol and revoke alone, and may be kept elsewhere
<folder>/ca.pem, ca.key     the fleet's own certificate authority, for TLS alone
<folder>/crl.pem            client certificates that count for nothing any more
<folder>/server.enrolment   the server as a member
<folder>/broker.pem, .key   the broker's certificate
<folder>/registry.json      members, their logins, who was revoked
<folder>/devices/           an enrolment for each device, to be carried to it
<folder>/fleet.toml         a configuration that runs
"""

import contextlib
import ipaddress
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Literal

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from broker_server.service.certificates import Authority, pem, serial_of
from broker_server.service.mosquitto import rights
from broker_server.service.registry import MemberEntry, Registry, later, read_registry
from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.certificate import (
    Certificate,
    Revocations,
    issue,
    read_certificate,
)
from fleet_protocol.identity.enrolment import (
    REVOKED_DIGITS,
    Enrolment,
    read_enrolment,
    write_secret,
)
from fleet_protocol.identity.papers import Membership
from fleet_protocol.identity.release import MOST_SETS, Release
from fleet_protocol.identity.sealing import new_key, public_key
from fleet_protocol.locks import held
from fleet_protocol.messages import BlobRef
from fleet_protocol.topics import Topics, check_name
from fleet_protocol.transport import BrokerAddress, bracket_host

SERVER = "server"
MOST_DAYS = 36_500
_DAY_SECONDS = 24 * 3600

_FLEET_TOML = """\
# A fleet with identities: devices need the file that `shoal enroll NAME` writes.
fleet = "{fleet}"
store = "store"

[broker]
url = "{url}"
identity = "server.enrolment"
port = {port}  # boards take theirs from the file `address` beside this one: change it, too, and enrol them anew
listen = "{listen}"

# What `shoal run` trains; `shoal export` writes the artifacts. `shoal up` does not need it.
[model]
artifacts = "artifacts"
arch = "conv"
"""
EMQX = "emqx"  # folder of its files: TLS with client certificates, and access rules by name
_ACTIONS = {"read": "subscribe", "write": "publish", "readwrite": "all"}


def write_emqx_listener(folder: Path, port: int) -> None:
    """Write the configuration into the folder of a fleet, for who copies it to the broker's host."""
    text = Path(__file__).with_name("emqx.hocon").read_text(encoding="utf-8")
    write_secret(folder / EMQX / "emqx.hocon", text.replace("PORT", str(port)))


def write_emqx_rules(folder: Path, fleet: str, members: Iterable[str]) -> None:
    """Write ``acl.conf`` for those who are members now, and deny everything else; see `rights`."""
    rules = "".join(
        f'{{allow, {{username, "{name}"}}, {_ACTIONS[right]}, ["{topic}"]}}.\n'
        for name in members
        for right, topic in rights(Topics(fleet), name)
    )
    write_secret(folder / EMQX / "acl.conf", f"{rules}{{deny, all}}.\n")


@dataclass(frozen=True)
class Founding:
    """What a new fleet is.

    Attributes:
        fleet: its name.
        host: name or address under which boards reach the broker.
        port: of the broker.
        url: ``embedded``, ``mosquitto``, ``emqx`` for one on ``host``, or the address of a broker
            elsewhere.
        listen: address that a broker started here listens on.
    """

    fleet: str
    host: str
    port: int = 8883
    url: str = "embedded"
    listen: str = "0.0.0.0"  # noqa: S104  (boards must get in, and nobody does without a login)

    @property
    def broker(self) -> str:
        """The broker's address for boards."""
        return self.url if "://" in self.url else f"mqtts://{bracket_host(self.host)}:{self.port}"


def found_fleet(folder: Path, founding: Founding) -> None:
    """Make the folder of a fleet, for its owner alone: operator, authority, server, configuration.

    Raises:
        ConfigError: the folder has something in it, or the name is unusable.
        StorageError: it cannot be written.
    """
    check_name("fleet", founding.fleet)
    try:
        ipaddress.ip_address(founding.host)
    except ValueError as error:
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,64}", founding.host):  # as certificates have it
            what = "is no address, and no name of up to 64 letters, digits, dots and hyphens"
            raise ConfigError(f"--host {founding.host!r} {what}") from error
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; `shoal init` makes a new folder")
    write_secret(folder / "operator.pem", pem(Ed25519PrivateKey.generate()))
    authority = Authority.generate(founding.fleet)
    authority.write(folder)
    Registry().write(folder)
    if founding.url == EMQX:
        write_emqx_listener(folder, founding.port)
        founding = replace(founding, url=founding.broker)
    write_secret(folder / "fleet.toml", _FLEET_TOML.format(**vars(founding)))
    write_secret(folder / "address", founding.broker)
    _add(folder, SERVER, "server", days=0)


def enroll(folder: Path, name: str, *, days: int = 0) -> Path:
    """Make a device a member until so many days are over, 0 for never, and say where its enrolment
    is.

    One that was gets a new key, and the old one counts for nothing.

    Raises:
        ConfigError: no fleet's folder, or an unusable name.
        StorageError: it cannot be written.
    """
    if check_name("device", name) == SERVER:
        raise ConfigError(
            "no device can be named 'server'; that is the server's name at the broker"
        )
    return _add(folder, name, "device", days=days)


def renew_server(folder: Path) -> Path:
    """Give the server new keys.

    Boards take them as soon as they hear them, and then the old ones no longer.

    It still opens updates that were sealed to the key before.

    Returns:
        The server's enrolment.

    Raises:
        ConfigError: no fleet's folder.
        StorageError: it cannot be written.
    """
    return _add(folder, SERVER, "server", days=0)


def renew(folder: Path, names: Collection[str], *, days: int) -> list[str]:
    """Let enrolments end later, for the same keys.

    A server that is up tells the devices, which need not be touched.

    Args:
        folder: of the fleet.
        names: ids of devices; of all whose enrolment ends where there are none.
        days: from now until they end; 0 for never.

    Returns:
        Those that end later now.

    Raises:
        ConfigError: no such device, or one from before there were renewals; no fleet's folder, no
            operator's key.
        StorageError: it cannot be written.
    """
    expires = _end(days)
    done = []
    with changing(folder) as registry:
        operator = _operator(folder)
        for name in names or registry.devices():
            entry = registry.devices().get(name)
            if entry is None:
                raise _no_device(name, registry)
            if entry.certificate is None:
                text = f"{name} was enrolled before there were renewals: `shoal enroll {quote(name)}`, carry the file"
                raise ConfigError(text)
            old = read_certificate(bytes.fromhex(entry.certificate), operator.public_key())
            new = old.model_copy(update={"expires": expires})
            if not new.outlives(old):
                continue
            changes = {
                "expires": expires,
                "certificate": issue(new, operator).hex(),
                "renewed": True,
            }
            # The end of one that has ended already was an epoch, which must not come again.
            epoch = later(registry.epoch) if 0 < entry.expires < time.time() else registry.epoch
            members = {**registry.members, name: entry.model_copy(update=changes)}
            registry = registry.model_copy(update={"epoch": epoch, "members": members})  # noqa: PLW2901
            done.append(name)
        _keep(folder, registry)
    return done


def sign_release(
    folder: Path,
    builds: Mapping[str, BlobRef],
    sets: Mapping[str, BlobRef],
    days: int,
    before: int,
) -> tuple[Release, str]:
    """A release after the one with the number `before`, the rest as of its class, and signed.

    Errors as of `renew`.
    """
    if len(sets) > MOST_SETS:
        raise ConfigError(
            f"{len(sets)} tiers do not go into one release; roll out {MOST_SETS} at most at a time"
        )
    fleet = Authority.read(folder).fleet
    number = later(before)
    release = Release(fleet=fleet, number=number, builds=builds, sets=sets, expires=_end(days))
    return release, issue(release, _operator(folder)).hex()


def _end(days: int) -> int:
    if not 0 <= days <= MOST_DAYS:
        raise ConfigError(
            f"an enrolment ends after 1 to {MOST_DAYS} days, or never with 0; not after {days}"
        )
    return int(time.time()) + days * _DAY_SECONDS if days else 0


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[Registry]:
    """The registry, for one command at a time, and caught up with what the server beside it has
    obeyed.
    """
    read_registry(folder)  # or there is no folder
    with held(folder, f"another command is changing {folder}: try again when it is done"):
        registry = read_registry(folder)
        with contextlib.suppress(ConfigError):  # a fleet that is being founded has no server yet
            server = read_enrolment(folder / "server.enrolment")
            registry = registry.caught_up(
                Membership(server, folder / SERVER / "papers.json").revocations
            )
        yield registry


def _no_device(name: str, registry: Registry) -> ConfigError:
    return ConfigError(
        f"{name!r} is no device of this fleet; there are {', '.join(registry.devices()) or 'none'}"
    )


def revoke(folder: Path, name: str) -> None:
    """Make a device no member any more.

    A running server knows within a second, and the broker that it hosts.

    Raises:
        ConfigError: there is no such member, or no fleet's folder.
        StorageError: it cannot be written.
    """
    with changing(folder) as registry:
        if name not in registry.members or name == SERVER:
            raise _no_device(name, registry)
        _keep(folder, registry.without(name))


def _keep(folder: Path, registry: Registry) -> None:
    registry.write(
        folder
    )  # first: it counts even where the operator's and the authority's key are kept elsewhere
    authority = Authority.read(folder)
    write_secret(folder / "crl.pem", authority.revoked(registry.withdrawn))
    if (folder / EMQX).exists():
        write_emqx_rules(folder, authority.fleet, registry.logins())
    said = Revocations(fleet=authority.fleet, counter=registry.epoch, since=registry.since)
    signed = issue(said, _operator(folder)).hex()
    if len(signed) > REVOKED_DIGITS:
        raise ConfigError(
            f"the list of {len(said.since)} revocations is longer than boards take: what is new counts at this server"
            " alone; found the fleet anew with `shoal init` in another folder, and enrol those that are left there"
        )
    registry.model_copy(update={"revoked": signed}).write(folder)


def _add(folder: Path, name: str, role: Literal["server", "device"], *, days: int) -> Path:
    with changing(folder) as registry:
        return _added(folder, registry, name, role, _end(days))


def _added(
    folder: Path,
    registry: Registry,
    name: str,
    role: Literal["server", "device"],
    expires: int,
) -> Path:
    operator = _operator(folder)
    authority = Authority.read(folder)
    key = Ed25519PrivateKey.generate()
    fleet = authority.fleet
    serial = later(registry.serial)
    path = (
        folder / "server.enrolment"
        if role == "server"
        else folder / "devices" / f"{name}.enrolment"
    )
    before = (
        read_enrolment(path).sealing[:1] if role == "server" and path.exists() else ()
    )  # boards have tasks in hand
    sealing = (new_key(), *before)
    opens = public_key(sealing[0])
    certificate = Certificate(
        fleet=fleet,
        role=role,
        name=name,
        key=_public(key),
        serial=serial,
        expires=expires,
        sealing=opens,
    )
    address = (folder / "address").read_text(encoding="utf-8").strip()
    host = BrokerAddress.parse(address).host  # which may be another than the fleet was made with
    if role == "server":
        certificate_of_broker, key_of_broker = authority.issue(
            host, hosts=(host, "localhost", "127.0.0.1", "::1")
        )
        write_secret(folder / "broker.pem", certificate_of_broker)
        write_secret(folder / "broker.key", key_of_broker)
    tls_certificate, tls_key = authority.issue(name)
    tls = serial_of(tls_certificate)
    signed = issue(certificate, operator).hex()
    token = secrets.token_urlsafe(24)
    enrolment = Enrolment(
        fleet=fleet,
        role=role,
        name=name,
        broker=address,
        operator=_public(operator),
        certificate=signed,
        key=key.private_bytes_raw().hex(),
        sealing=sealing,
        token=token,
        ca=authority.certificate,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
    )
    write_secret(path, enrolment.model_dump_json(indent=1))
    entry = MemberEntry(
        role=role,
        serial=serial,
        token=token,
        sealing=opens,
        tls=tls,
        expires=expires,
        certificate=signed,
    )
    left = registry.without(name)  # who has an old enrolment reads nothing any more
    _keep(
        folder,
        left.model_copy(update={"serial": serial, "members": {**left.members, name: entry}}),
    )
    return path


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def _operator(folder: Path) -> Ed25519PrivateKey:
    path = folder / "operator.pem"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (
        OSError,
        TypeError,
        ValueError,
    ) as error:  # a TypeError for one with a passphrase
        raise ConfigError(
            f"cannot read the operator's key {path}, which enrolling, renewing and revoking need: {error}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is no Ed25519 key")
    return key
