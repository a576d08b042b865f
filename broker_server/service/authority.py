"""The operator's side of a fleet's identities: its folder, its keys, and its members' enrolments.

<folder>/operator.pem       signs members (Ed25519); needed only to enrol and revoke; may be
                            kept elsewhere
<folder>/ca.pem, ca.key     the fleet's own certificate authority, only for TLS
<folder>/crl.pem            revoked client certificates
<folder>/server.enrolment   the server as a member
<folder>/broker.pem, .key   the broker's certificate
<folder>/registry.json      members, and who was revoked
<folder>/devices/           an enrolment for each device, to be carried to it
<folder>/fleet.toml         a configuration that runs
<folder>/emqx, mosquitto    for the broker's host, if the operator runs the broker
"""

import contextlib
import ipaddress
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from broker_server.service.boards_address import boards_address, write_boards_address
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
from fleet_protocol.identity.release import MOST_PLANS, MOST_SETS, Release
from fleet_protocol.identity.sealing import new_key, public_key
from fleet_protocol.locks import held
from fleet_protocol.messages import BlobRef
from fleet_protocol.topics import check_name
from fleet_protocol.transport import BrokerAddress


def found_fleet(folder: Path, new: NewFleet) -> None:
    """Create the folder of a fleet, readable by its owner only: keys, server, configuration.

    Raises:
        ConfigError: the folder is not empty, the name is unusable, or the clock is not set.
        StorageError: it cannot be written.
    """
    require_clock()
    check_name("fleet", new.fleet)
    try:
        ipaddress.ip_address(new.host)
    except ValueError as error:
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,64}", new.host):  # as in certificates
            raise ConfigError(
                f"the broker's host (--host) {new.host!r} is neither an address nor a name "
                "of up to 64 letters, digits, dots and hyphens"
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
    write_boards_address(folder, new.address_file)
    _add(folder, SERVER, "server", days=0)


def enroll(folder: Path, name: str, *, days: int = 0) -> Path:
    """Enrol a device as a member.

    A device that is already a member gets a new key, and the old one becomes invalid.

    Args:
        folder: folder of the fleet.
        name: id of the device.
        days: until the enrolment expires; 0 for never.

    Returns:
        The enrolment file.

    Raises:
        ConfigError: the folder is not that of a fleet, or the name is unusable.
        StorageError: it cannot be written.
    """
    if check_name("device", name) == SERVER:
        raise ConfigError(
            "no device can be named 'server': that is the server's name at the broker"
        )
    return _add(folder, name, "device", days=days)


def renew_server(folder: Path) -> Path:
    """Give the server new keys; it can still open updates that were sealed to the previous key.

    Boards accept the new keys as soon as they receive them, and the old ones no longer.

    Returns:
        The server's enrolment.

    Raises:
        ConfigError: the folder is not that of a fleet.
        StorageError: it cannot be written.
    """
    return _add(folder, SERVER, "server", days=0)


def renew(folder: Path, names: Collection[str], *, days: int) -> list[str]:
    """Extend the validity of enrolments, for the same keys.

    A running server sends them to the devices, which need no other change.

    Args:
        folder: folder of the fleet.
        names: ids of devices; if empty, all devices whose enrolment expires.
        days: days from now until they expire; 0 for never.

    Returns:
        The members that expire later now.

    Raises:
        ConfigError: the device does not exist or was enrolled by a version without renewals, the
            folder is not that of a fleet, or the operator's key is missing.
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
            # The end of an expired enrolment was an epoch, which must not occur again.
            epoch = later(registry.epoch) if entry.has_ended else registry.epoch
            members = {**registry.members, name: extended}
            registry = registry.model_copy(update={"epoch": epoch, "members": members})
            renewed.append(name)
        _keep(folder, registry)
    return renewed


def _extended(
    name: str, entry: MemberEntry, expires: int, operator: Ed25519PrivateKey
) -> MemberEntry | None:
    """Return a member whose enrolment ends at another time; None if that is not later."""
    if entry.certificate is None:
        raise ConfigError(
            f"{name} was enrolled before renewals existed: run `shoal enroll {quote(name)}`, "
            "and copy the file to the board"
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
    sets: Mapping[str, Sequence[BlobRef]],
    days: int,
    before: int,
) -> tuple[Release, str]:
    """Sign a release.

    Args:
        folder: folder of the fleet.
        builds: see `Release`.
        sets: by tier, the manifest of the set, and then those of its plans, the fastest first.
        days: after which boards no longer accept it; 0 for never.
        before: number of the previous release.

    Returns:
        The release, and its form as a message.

    Raises:
        ConfigError: see `renew`; or there are too many sets or plans.
    """
    if len(sets) > MOST_SETS:
        raise ConfigError(
            f"{len(sets)} tiers do not fit into one release; roll out at most {MOST_SETS} at a time"
        )
    whole = {}
    plans = {}
    for tier, manifests in sets.items():
        whole[tier] = manifests[0]
        if manifests[1:]:
            plans[tier] = tuple(manifests[1:])
    count = sum(len(refs) for refs in plans.values())
    if count > MOST_PLANS:
        raise ConfigError(
            f"{count} plans do not fit into one release; export the tiers again with fewer values "
            f"of --memory, so that they have at most {MOST_PLANS} plans"
        )
    release = Release(
        fleet=Authority.read(folder).fleet,
        number=later(before),
        builds=builds,
        sets=whole,
        plans=plans or None,
        expires=expiry_of(days),
    )
    return release, issue(release, read_operator_key(folder)).hex()


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[Registry]:
    """Yield the registry, for one command at a time.

    It includes the changes that a running server has applied.
    """
    read_registry(folder)  # or the folder does not exist
    with held(folder, f"another command is changing {folder}: try again when it has finished"):
        registry = read_registry(folder)
        with contextlib.suppress(ConfigError):  # a fleet that is being created has no server yet
            server = read_enrolment(folder / "server.enrolment")
            registry = registry.caught_up(
                Membership(server, folder / SERVER / "papers.json").revocations
            )
        yield registry


def _no_device(name: str, registry: Registry) -> ConfigError:
    return ConfigError(
        f"this fleet has no device {name!r}; it has {', '.join(registry.devices()) or 'none'}"
    )


def revoke(folder: Path, name: str) -> None:
    """Revoke a device's membership.

    A running server, and the broker that it hosts, apply it within a second.

    Raises:
        ConfigError: the member does not exist, or the folder is not that of a fleet.
        StorageError: it cannot be written.
    """
    with changing(folder) as registry:
        if name not in registry.members or name == SERVER:
            raise _no_device(name, registry)
        _keep(folder, registry.without(name))


def _keep(folder: Path, registry: Registry) -> None:
    # First: the revocation is effective even if the operator's and the authority's key are kept
    # elsewhere.
    registry.write(folder)
    authority = Authority.read(folder)
    write_secret(folder / "crl.pem", authority.revoked(registry.withdrawn))
    write_access(folder, authority.fleet, registry.names())
    revocations = Revocations(fleet=authority.fleet, counter=registry.epoch, since=registry.since)
    signed = issue(revocations, read_operator_key(folder)).hex()
    if len(signed) > REVOKED_DIGITS:
        raise ConfigError(
            f"the list of {len(revocations.since)} revocations is longer than boards accept: "
            "new revocations are effective only at this server; create the fleet again with "
            "`shoal init` in another folder, and enrol the remaining devices there"
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
    """Write an enrolment with new keys, then register its member; return the enrolment's file."""
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
    # It may be another than the fleet was made with: the operator edits its files.
    address = boards_address(folder)
    if role == "server":
        _write_broker_certificate(folder, authority, address.host)
    tls_certificate, tls_key = authority.issue(name)
    token = secrets.token_urlsafe(24)
    enrolment = Enrolment(
        fleet=authority.fleet,
        role=role,
        name=name,
        broker=str(address),
        operator=_public(operator),
        certificate=signed,
        key=key.private_bytes_raw().hex(),
        sealing=sealing,
        token=token,
        ca=authority.certificate,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
    )
    # First the file, then the member: a partial write admits nobody.
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
    before = registry.without(name)  # an old enrolment can no longer read anything
    members = {**before.members, name: entry}
    _keep(folder, before.model_copy(update={"serial": serial, "members": members}))
    return path


def _enrolment_path(folder: Path, name: str, role: Literal["server", "device"]) -> Path:
    if role == "server":
        return folder / "server.enrolment"
    return folder / "devices" / f"{name}.enrolment"


def _sealing_keys(path: Path, role: Literal["server", "device"]) -> tuple[str, ...]:
    """Return a new key, and for a renewed server also its last one, for tasks in progress."""
    if role == "server" and path.exists():
        return (new_key(), *read_enrolment(path).sealing[:1])
    return (new_key(),)


def _write_broker_certificate(folder: Path, authority: Authority, host: str) -> None:
    certificate, key = authority.issue(host, hosts=(host, "localhost", "127.0.0.1", "::1"))
    write_secret(folder / "broker.pem", certificate)
    write_secret(folder / "broker.key", key)


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()
