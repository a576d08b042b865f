"""The server as a member of its fleet: its identity and its connection to the broker."""

import ssl
from collections.abc import Iterator
from pathlib import Path

from broker_server.service.boards_address import describe_outdated
from broker_server.service.broker import ChildBroker
from broker_server.service.embedded_broker import EmbeddedBroker
from broker_server.service.mosquitto import MemberAuthentication, MosquittoBroker
from broker_server.service.registry import RegistryReader, read_registry
from broker_server.settings.broker import ANYWHERE, EMBEDDED, MOSQUITTO, BrokerConfig
from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.group import Group
from fleet_protocol.identity.member import Member
from fleet_protocol.identity.papers import Membership
from fleet_protocol.identity.sealing import derive_key
from fleet_protocol.tls_connection import refuse_passphrase
from fleet_protocol.transport import BrokerAddress, bracket_host


def broker_address(config: BrokerConfig) -> BrokerAddress:
    """Return the address at which this machine reaches the configured broker.

    Raises:
        ConfigError: the address is malformed, the enrolment cannot be read, or the connection would
            be unencrypted over a network although the settings do not allow that.
    """
    hosted = config.hosted
    host = "127.0.0.1" if config.listen in ANYWHERE else config.listen
    member = member_of(config)
    if member is not None:
        # The certificate names this computer, too, so that the server can reach its own broker.
        url = f"mqtts://{bracket_host(host)}:{config.port}" if hosted else config.url
        return member.enrolment.address(member.folder, url)
    if hosted:
        address = BrokerAddress(host, config.port)
    else:
        address = BrokerAddress.parse(
            config.url,
            ca_file=config.ca_file,
            cert_file=config.cert_file,
            key_file=config.key_file,
        )
    # Others can reach a hosted broker that listens on all addresses.
    reachable = not address.on_this_machine or (hosted and config.listen in ANYWHERE)
    if reachable and not address.tls and not config.insecure:
        raise ConfigError(
            f"fleet without identities on {address}: anyone who reaches that broker can run "
            "graphs on its boards. Create identities with `shoal init`, or set [broker] "
            "insecure = true (shoal up --insecure) for a network that you trust"
        )
    return address


def member_of(config: BrokerConfig, fleet: str = "") -> Member | None:
    """Return the server as a member of its fleet; None for a fleet without identities.

    Args:
        config: configuration of the broker.
        fleet: fleet that the enrolment must belong to; empty for any.

    Raises:
        ConfigError: the enrolment, or the registry beside it, cannot be read, or belongs to another
            fleet.
    """
    if config.identity is None:
        return None
    folder = config.identity.parent
    own = folder / "server"
    membership = Membership(read_enrolment(config.identity), own / "papers.json")
    enrolment = membership.enrolment
    registry_reader = RegistryReader(folder, membership)
    if fleet and enrolment.fleet != fleet:
        raise ConfigError(
            f'{config.identity} belongs to fleet "{enrolment.fleet}", but the configuration '
            f'has fleet = "{fleet}": correct it, or name the enrolment of fleet "{fleet}"'
        )

    def group() -> Group | None:
        registry = registry_reader.current()
        if registry.lacking or not enrolment.sealing:
            return None  # a single device that cannot open seals prevents all sealing
        epoch, readers = registry.readers(membership.revocations)
        # Derived, not drawn: a restarted server has the same key for an epoch.
        key = derive_key(
            bytes.fromhex(enrolment.sealing[0]),
            b"shoal-epoch-1\0" + epoch.to_bytes(4, "big"),
        )
        return Group(epoch, key, readers)

    return Member(
        enrolment,
        own,
        revoked=registry_reader.revoked,
        papers=registry_reader.papers,
        members=registry_reader.members,
        group=group,
    )


def why_unsealed(config: BrokerConfig) -> str | None:
    """Return why blobs and updates of an enrolled fleet are not sealed, and what to do.

    None if they are sealed, or the fleet has no identities.
    """
    if config.identity is None:
        return None
    if not read_enrolment(config.identity).sealing:
        return (
            "nothing is sealed, because the server was enrolled before sealing existed: run "
            "`shoal enroll server`"
        )
    lacking = read_registry(config.identity.parent).lacking
    if not lacking:
        return None
    return (
        f"blobs are not sealed because of devices {', '.join(lacking)}, enrolled before "
        "sealing existed: enrol them again, and copy the new files to them"
    )


def membership_notices(config: BrokerConfig) -> Iterator[tuple[str, str]]:
    """Yield what is amiss with the members of a fleet, each with its kind for the log."""
    unsealed = why_unsealed(config)
    if unsealed is not None:
        yield "unsealed", unsealed
    outdated = describe_outdated(config)
    if outdated is not None:
        yield "address-differs", outdated


def _gate_of(config: BrokerConfig) -> MemberAuthentication | None:
    """Return how a broker that is started here authenticates members; None if it admits anybody.

    Raises:
        ConfigError: its certificate or key cannot be read.
    """
    if config.identity is None:
        return None
    folder = config.identity.parent
    server = read_enrolment(config.identity)

    def members() -> set[str]:
        # The server's name is included although it may be renewed while it runs.
        return {*read_registry(folder).names(), server.name}

    certificate = folder / "broker.pem"
    try:
        # Checked now: a broker that cannot read them would only end, with a line in its log.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, folder / "broker.key", refuse_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{certificate} and broker.key beside it are not a certificate with its key"
            f" ({error}), so no broker can be started with them; restore both from a copy of the"
            " folder"
        ) from error
    return MemberAuthentication(folder, members)


def hosted_broker(config: BrokerConfig, fleet: str, folder: Path) -> ChildBroker | None:
    """Return the broker that the server starts, not started yet; None if it runs elsewhere."""
    if config.url == EMBEDDED:
        return EmbeddedBroker(folder, port=config.port, listen=config.listen)
    if config.url == MOSQUITTO:
        gate = _gate_of(config)
        return MosquittoBroker(folder, fleet, port=config.port, listen=config.listen, gate=gate)
    return None
