"""The operator's side of a fleet's identities: its folder, its keys, and its members' enrolments.

<folder>/operator.pem       signs members (Ed25519); needed to enrol and revoke alone, and may be
                            kept elsewhere
<folder>/ca.pem, ca.key     the fleet's own certificate authority, for TLS alone
<folder>/crl.pem            client certificates that count for nothing any more
<folder>/server.enrolment   the server as a member
<folder>/broker.pem, .key   the broker's certificate
<folder>/registry.json      members, who was revoked
<folder>/devices/           an enrolment for each device, to be carried to it
<folder>/fleet.toml         a configuration that runs
<folder>/emqx, mosquitto    for the broker's host, if the operator runs the broker
"""

import contextlib
import ipaddress
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from broker_server.service.certificates import Authority, pem, serial_of
from broker_server.service.new_fleet import NewFleet
from broker_server.service.operator_key import expiry_of, read_operator_key, require_clock
from broker_server.service.own_brokers import write_access, write_configuration
from broker_server.service.registry import MemberEntry, Registry, later, read_registry
from broker_server.service.topic_rights import SERVER
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
from fleet_protocol.topics import check_name
from fleet_protocol.transport import BrokerAddress


def found_fleet(folder: Path, new: NewFleet) -> None:
    """Make the folder of a fleet, for its owner alone: operator, authority, server, configuration.

    Raises:
        ConfigError: the folder has something in it, the name is unusable, or the clock is not set.
        StorageError: it cannot be written.
    """
    require_clock()
    check_name("fleet", new.fleet)
    try:
        ipaddress.ip_address(new.host)
    except ValueError as error:
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,64}", new.host):  # as certificates have it
            raise ConfigError(
                f"the broker's host (--host) {new.host!r} is neither an address nor a name of up "
                "to 64 letters, digits, dots and hyphens"
            ) from error
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; `shoal init` makes a new folder")
    write_secret(folder / "operator.pem", pem(Ed25519PrivateKey.generate()))
    authority = Authority.generate(new.fleet)
    authority.write(folder)
    Registry().write(folder)
    if new.own_broker is not None:
        address = BrokerAddress.parse(new.broker)
        write_configuration(folder, new.own_broker, new.fleet, address)
    write_secret(folder / "fleet.toml", new.configuration())
    write_secret(folder / "address", new.broker)
    _add(folder, SERVER, "server", days=0)


def enroll(folder: Path, name: str, *, days: int = 0) -> Path:
    """Make a device a member.

    One that was a member gets a new key, and the old one counts for nothing.

    Args:
        folder: of the fleet.
        name: id of the device.
        days: until the enrolment ends; 0 for never.

    Returns:
        The file of its enrolment.

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
    """Give the server new keys; it still opens updates that were sealed to the key before.

    Boards accept the new keys as soon as they hear them, and then the old ones no longer.

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
    expires = expiry_of(days)
    renewed = []
    with changing(folder) as stored:
        registry = stored
        operator = read_operator_key(folder)
        for name in names or registry.devices():
            entry = registry.devices().get(name)
            if entry is None:
                raise _no_device(name, registry)
            extended = _extended(name, entry, expires, operator)
            if extended is None:
                continue
            # The end of one that has ended already was an epoch, which must not come again.
            epoch = later(registry.epoch) if entry.has_ended else registry.epoch
            members = {**registry.members, name: extended}
            registry = registry.model_copy(update={"epoch": epoch, "members": members})
            renewed.append(name)
        _keep(folder, registry)
    return renewed


def _extended(
    name: str, entry: MemberEntry, expires: int, operator: Ed25519PrivateKey
) -> MemberEntry | None:
    """Return a member whose enrolment ends at another time, None if that is not later."""
    if entry.certificate is None:
        raise ConfigError(
            f"{name} was enrolled before there were renewals: `shoal enroll {quote(name)}`, carry "
            "the file"
        )
    old = read_certificate(bytes.fromhex(entry.certificate), operator.public_key())
    new = old.model_copy(update={"expires": expires})
    if not new.outlives(old):
        return None
    certificate = issue(new, operator).hex()
    changes = {"expires": expires, "certificate": certificate, "renewed": True}
    return entry.model_copy(update=changes)


def sign_release(
    folder: Path,
    builds: Mapping[str, BlobRef],
    sets: Mapping[str, BlobRef],
    days: int,
    before: int,
) -> tuple[Release, str]:
    """Sign a release.

    Args:
        folder: of the fleet.
        builds: as of `Release`.
        sets: as of `Release`.
        days: until boards take it no longer; 0 for never.
        before: number of the release before it.

    Returns:
        The release, and how it travels.

    Raises:
        ConfigError: as of `renew`, or there are too many sets.
    """
    if len(sets) > MOST_SETS:
        raise ConfigError(
            f"{len(sets)} tiers do not go into one release; roll out {MOST_SETS} at most at a time"
        )
    fleet = Authority.read(folder).fleet
    number = later(before)
    release = Release(fleet=fleet, number=number, builds=builds, sets=sets, expires=expiry_of(days))
    return release, issue(release, read_operator_key(folder)).hex()


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[Registry]:
    """Yield the registry, for one command at a time.

    It has caught up with what the server beside it has obeyed.
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
    # First: it counts even where the operator's and the authority's key are kept elsewhere.
    registry.write(folder)
    authority = Authority.read(folder)
    write_secret(folder / "crl.pem", authority.revoked(registry.withdrawn))
    write_access(folder, authority.fleet, registry.names())
    revocations = Revocations(fleet=authority.fleet, counter=registry.epoch, since=registry.since)
    signed = issue(revocations, read_operator_key(folder)).hex()
    if len(signed) > REVOKED_DIGITS:
        raise ConfigError(
            f"the list of {len(revocations.since)} revocations is longer than boards take: what is "
            "new counts at this server alone; found the fleet anew with `shoal init` in another "
            "folder, and enrol those that are left there"
        )
    registry.model_copy(update={"revoked": signed}).write(folder)


def _add(folder: Path, name: str, role: Literal["server", "device"], *, days: int) -> Path:
    with changing(folder) as registry:
        return _added(folder, registry, name, role, expiry_of(days))


def _added(
    folder: Path,
    registry: Registry,
    name: str,
    role: Literal["server", "device"],
    expires: int,
) -> Path:
    """Write an enrolment with new keys, then make its member one; return the enrolment's file."""
    operator = read_operator_key(folder)
    authority = Authority.read(folder)
    key = Ed25519PrivateKey.generate()
    serial = later(registry.serial)
    path = _enrolment_path(folder, name, role)
    sealing = _sealing_keys(path, role)
    certificate = Certificate(
        fleet=authority.fleet,
        role=role,
        name=name,
        key=_public(key),
        serial=serial,
        expires=expires,
        sealing=public_key(sealing[0]),
    )
    signed = issue(certificate, operator).hex()
    # The address may be another than the fleet was made with: the operator edits its file.
    address = (folder / "address").read_text(encoding="utf-8").strip()
    if role == "server":
        _write_broker_certificate(folder, authority, BrokerAddress.parse(address).host)
    tls_certificate, tls_key = authority.issue(name)
    token = secrets.token_urlsafe(24)
    enrolment = Enrolment(
        fleet=authority.fleet,
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
    # First the file, then the member: what is written halfway lets nobody in.
    write_secret(path, enrolment.model_dump_json(indent=1))
    entry = MemberEntry(
        role=role,
        serial=serial,
        token=token,
        sealing=certificate.sealing,
        tls=serial_of(tls_certificate),
        expires=expires,
        certificate=signed,
    )
    before = registry.without(name)  # an old enrolment reads nothing any more
    members = {**before.members, name: entry}
    _keep(folder, before.model_copy(update={"serial": serial, "members": members}))
    return path


def _enrolment_path(folder: Path, name: str, role: Literal["server", "device"]) -> Path:
    if role == "server":
        return folder / "server.enrolment"
    return folder / "devices" / f"{name}.enrolment"


def _sealing_keys(path: Path, role: Literal["server", "device"]) -> tuple[str, ...]:
    """Return a new key, and for a renewed server its last one: boards have tasks in hand."""
    if role == "server" and path.exists():
        return (new_key(), *read_enrolment(path).sealing[:1])
    return (new_key(),)


def _write_broker_certificate(folder: Path, authority: Authority, host: str) -> None:
    certificate, key = authority.issue(host, hosts=(host, "localhost", "127.0.0.1", "::1"))
    write_secret(folder / "broker.pem", certificate)
    write_secret(folder / "broker.key", key)


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()
