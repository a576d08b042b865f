"""The server as a member of its fleet: its identity and its way to the broker."""

import ssl
from pathlib import Path

from broker_server.service.broker import ChildBroker
from broker_server.service.embedded_broker import EmbeddedBroker
from broker_server.service.mosquitto import Gate, MosquittoBroker
from broker_server.service.registry import RegistryReader, read_registry
from broker_server.settings.broker import ANYWHERE, EMBEDDED, MOSQUITTO, BrokerConfig
from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.group import Group
from fleet_protocol.identity.member import Member
from fleet_protocol.identity.papers import Membership
from fleet_protocol.identity.sealing import derive_key
from fleet_protocol.transport import BrokerAddress, bracket_host


def broker_address(config: BrokerConfig) -> BrokerAddress:
    """Return where the configured broker is reached from this machine.

    Raises:
        ConfigError: the address is malformed, the enrolment cannot be read, or a network would
            carry everything in the open although nobody said that it may.
    """
    hosted = config.hosted
    host = "127.0.0.1" if config.listen in ANYWHERE else config.listen
    member = member_of(config)
    if member is not None:
        # The certificate names this computer, too, so that the server reaches its own broker.
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
    # Others reach a hosted broker that listens everywhere.
    reachable = not address.on_this_machine or (hosted and config.listen in ANYWHERE)
    if reachable and not address.tls and not config.insecure:
        raise ConfigError(
            f"fleet without identities on {address}: whoever reaches that broker can run graphs on "
            "its boards. Make identities with `shoal init`, or say [broker] insecure = true (shoal "
            "up --insecure) for a network that you trust"
        )
    return address


def member_of(config: BrokerConfig, fleet: str = "") -> Member | None:
    """Return the server as a member of its fleet, None for a fleet without identities.

    Args:
        config: of the broker.
        fleet: that the enrolment must be of; empty for any.

    Raises:
        ConfigError: the enrolment, or the registry beside it, cannot be read, or is of another
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
            f'{config.identity} is of fleet "{enrolment.fleet}", and the configuration says fleet '
            f'= "{fleet}": write the first, or name the enrolment of the second'
        )

    def group() -> Group | None:
        registry = registry_reader.current()
        if registry.lacking or not enrolment.sealing:
            return None  # one device that cannot open seals keeps all from being sealed
        epoch, readers = registry.readers(membership.revocations)
        # Derived and not drawn: a server that starts again has the same key for an epoch.
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
    """Return what keeps blobs and updates of an enrolled fleet from being sealed, and what to do.

    None if they are sealed, or the fleet has no identities.
    """
    if config.identity is None:
        return None
    if not read_enrolment(config.identity).sealing:
        return (
            "nothing is sealed, as the server was enrolled before there were seals: `shoal enroll "
            "server`"
        )
    lacking = read_registry(config.identity.parent).lacking
    if not lacking:
        return None
    return (
        f"blobs are not sealed because of devices {', '.join(lacking)}, enrolled before there were "
        "seals: enrol again, and carry the new files to them"
    )


def _gate_of(config: BrokerConfig) -> Gate | None:
    """Return how a broker that is started here lets members in; None if it lets anybody in.

    Raises:
        ConfigError: its certificate or key cannot be read.
    """
    if config.identity is None:
        return None
    folder = config.identity.parent
    server = read_enrolment(config.identity)

    def members() -> set[str]:
        # The server's name is there although it may be renewed while it runs.
        return {*read_registry(folder).names(), server.name}

    certificate = folder / "broker.pem"
    try:
        # Now: a broker that cannot read them would only end, with a line in its log.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, folder / "broker.key")
    except OSError as error:
        raise ConfigError(
            f"{certificate} and broker.key beside it are no certificate with its key "
            f"({error}), so no broker can be started with them; take both from a copy of the folder"
        ) from error
    return Gate(folder, members)


def hosted_broker(config: BrokerConfig, fleet: str, folder: Path) -> ChildBroker | None:
    """Return the broker that the server starts, not started yet; None if it is elsewhere."""
    if config.url == EMBEDDED:
        return EmbeddedBroker(folder, port=config.port, listen=config.listen)
    if config.url == MOSQUITTO:
        gate = _gate_of(config)
        return MosquittoBroker(folder, fleet, port=config.port, listen=config.listen, gate=gate)
    return None
