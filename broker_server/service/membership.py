"""The server as a member of its fleet, by its configuration: who it is, and how it gets to its
broker.
"""

import ssl
from pathlib import Path

from broker_server.service.broker import ChildBroker, EmbeddedBroker, Gate
from broker_server.service.mosquitto import MosquittoBroker
from broker_server.service.registry import RegistryReader, read_registry
from broker_server.settings.fleet import BrokerConfig
from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.group import Group
from fleet_protocol.identity.member import Member
from fleet_protocol.identity.papers import Membership
from fleet_protocol.identity.sealing import derive_key
from fleet_protocol.transport import BrokerAddress, bracket_host

_ANYWHERE = {"0.0.0.0", "::", ""}  # noqa: S104  (compared, not bound)


def broker_address(config: BrokerConfig) -> BrokerAddress:
    """Where the configured broker is reached from this machine.

    Raises:
        ConfigError: the address is malformed, the enrolment cannot be read, or a network would
            carry everything in the open although nobody said that it may.
    """
    hosted = config.hosted
    host = "127.0.0.1" if config.listen in _ANYWHERE else config.listen
    member = member_of(config)
    if member is not None:
        url = f"mqtts://{bracket_host(host)}:{config.port}" if hosted else config.url
        return member.enrolment.address(member.folder, url)
    address = (
        BrokerAddress(host, config.port)
        if hosted
        else BrokerAddress.parse(
            config.url,
            ca_file=config.ca_file,
            cert_file=config.cert_file,
            key_file=config.key_file,
        )
    )
    reachable = not address.on_this_machine or (hosted and config.listen in _ANYWHERE)
    if reachable and not address.tls and not config.insecure:
        raise ConfigError(
            f"fleet without identities on {address}: whoever reaches that broker can run graphs on its boards. Make "
            "identities with `shoal init`, or say [broker] insecure = true (shoal up --insecure) for a network that "
            "you trust"
        )
    return address


def member_of(config: BrokerConfig, fleet: str = "") -> Member | None:
    """The server as a member of its fleet, None for a fleet without identities.

    An enrolment, or a registry beside it, that cannot be read is a ConfigError, here and below; so
    is one of another fleet than the one that is named.
    """
    if config.identity is None:
        return None
    folder = config.identity.parent
    own = folder / "server"
    standing = Membership(read_enrolment(config.identity), own / "papers.json")
    enrolment = standing.enrolment
    its = RegistryReader(folder, standing)
    if fleet and enrolment.fleet != fleet:
        raise ConfigError(
            f'{config.identity} is of fleet "{enrolment.fleet}", and the configuration says fleet = "{fleet}": write '
            "the first, or name the enrolment of the second"
        )

    def group() -> Group | None:
        registry = its.current()
        if registry.lacking or not enrolment.sealing:
            return None
        epoch, readers = registry.readers(standing.revocations)
        key = derive_key(
            bytes.fromhex(enrolment.sealing[0]),
            b"shoal-epoch-1\0" + epoch.to_bytes(4, "big"),
        )
        return Group(epoch, key, readers)

    return Member(
        enrolment,
        own,
        revoked=its.revoked,
        papers=its.papers,
        members=its.members,
        group=group,
    )


def why_unsealed(config: BrokerConfig) -> str | None:
    """What keeps blobs and updates of an enrolled fleet from being sealed, and what to do.

    None where they are.
    """
    if config.identity is None:
        return None
    if not read_enrolment(config.identity).sealing:
        return "nothing is sealed, as the server was enrolled before there were seals: `shoal enroll server`"
    lacking = read_registry(config.identity.parent).lacking
    again = "enrolled before there were seals: enrol again, and carry the new files to them"
    return (
        f"blobs are not sealed because of devices {', '.join(lacking)}, {again}"
        if lacking
        else None
    )


def _gate_of(config: BrokerConfig) -> Gate | None:
    """How a broker that is started here lets members in, None for anybody.

    A ConfigError without its certificate.
    """
    if config.identity is None:
        return None
    folder = config.identity.parent
    server = read_enrolment(config.identity)

    def logins() -> dict[str, str]:
        """Of the members now.

        Of the server as it was when it started, as it may be renewed while it runs.
        """
        return read_registry(folder).logins() | {server.name: server.token}

    gate = Gate(
        folder / "broker.pem",
        folder / "broker.key",
        folder / "ca.pem",
        folder / "crl.pem",
        logins,
    )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(gate.certificate, gate.key)
    except OSError as error:
        raise ConfigError(
            f"{gate.certificate} and broker.key beside it are no certificate with its key ({error}), so no broker can"
            " be started with them; take both from a copy of the folder"
        ) from error
    return gate


def hosted_broker(config: BrokerConfig, fleet: str, folder: Path) -> ChildBroker | None:
    """The broker that the server starts, not started yet; None where it is another's."""
    if not config.hosted:
        return None
    gate = _gate_of(config)
    if config.url == "mosquitto":
        return MosquittoBroker(folder, fleet, port=config.port, listen=config.listen, gate=gate)
    return EmbeddedBroker(folder, port=config.port, listen=config.listen, gate=gate)
