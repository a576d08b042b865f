"""Transports of messages: their protocol, their events, and the address of a broker.

MQTT 5 is one (`fleet_protocol.link`). Another transport needs a module with a class of the same
methods, and a row in `SCHEMES`.
"""

import queue
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Protocol

from fleet_protocol.addresses import FORM, hide_login, split_address
from fleet_protocol.errors import ConfigError, RefusedError
from fleet_protocol.hosts import is_loopback

# Chunks that may wait for the broker's acknowledgement: 1.5 MB with the default size.
SEND_WINDOW = 16

BACKOFF_MAX_SECONDS = 30.0  # between attempts to reach a broker that does not answer


@dataclass(frozen=True)
class Scheme:
    """A transport, which the scheme of an address names.

    Its class is imported when it is used, and called like `open_transport`. The port applies if an
    address has none.
    """

    module: str
    name: str
    port: int
    tls: bool = False


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "mqtt": Scheme("fleet_protocol.link", "Link", 1883),
        "mqtts": Scheme("fleet_protocol.link", "Link", 8883, tls=True),
    }
)


@dataclass(frozen=True)
class BrokerAddress:
    """The address of a broker, with the login and the certificates for it."""

    host: str
    port: int
    scheme: str = "mqtt"  # the transport, a row of `SCHEMES`
    username: str | None = None  # login, or None
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None  # certificates to trust instead of the system's
    cert_file: Path | None = None  # client certificate
    key_file: Path | None = None

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        key_file: Path | None = None,
    ) -> "BrokerAddress":
        """Read ``mqtt[s]://[user:password@]host[:port]``.

        User and password are percent-encoded, according to RFC 3986.

        Raises:
            ConfigError: it is malformed.
        """
        try:
            address = split_address(url, SCHEMES)
        except ValueError as error:
            raise ConfigError(
                f"broker address {hide_login(url)!r} is not of the form {FORM}: {error}"
            ) from None  # the error of an address shows the address with its password
        return cls(
            host=address.host,
            port=address.port or SCHEMES[address.scheme].port,
            scheme=address.scheme,
            username=address.username,
            password=address.password,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
        )

    @property
    def on_this_machine(self) -> bool:
        """Whether the broker is on this machine, so that messages cross no network."""
        return is_loopback(self.host)

    @property
    def tls(self) -> bool:
        """Whether to encrypt, and to verify the broker's certificate."""
        return SCHEMES[self.scheme].tls

    def __str__(self) -> str:
        return f"{self.scheme}://{bracket_host(self.host)}:{self.port}"


def bracket_host(host: str) -> str:
    """Return a host as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class Connected:
    """The broker accepted the connection.

    If it did not know the session, the messages that it had queued are lost.
    """

    session_present: bool


@dataclass(frozen=True)
class Disconnected:
    """The connection is lost, for a reason of paho or the broker; the link connects again.

    The code is the broker's reason (`fleet_protocol.refusals`); None if it gave none.
    """

    reason: str
    code: int | None = None


@dataclass(frozen=True)
class Refused:
    """The broker refuses a message or a subscription; it is not sent again.

    Attributes:
        topic: topic of the message, or the filter of the subscription.
        code: the reason, see `fleet_protocol.refusals`.
        packet_bytes: size of the packet with the message; 0 for a subscription.
    """

    topic: str
    code: int
    packet_bytes: int = 0

    def __str__(self) -> str:
        if not self.packet_bytes:
            return f"the subscription to {self.topic}"
        return f"a message of {self.packet_bytes:,} bytes on {self.topic}"


@dataclass(frozen=True)
class LoginRefused:
    """The broker refuses a client that was connected before; it is asked again about once an hour.

    The code is the reason, see `fleet_protocol.refusals`.
    """

    code: int


@dataclass(frozen=True)
class Received:
    """A message arrived; the broker may have retained it. A signer is a member of the fleet.

    It arrived at a moment on the clock of ``time.monotonic()``.
    """

    topic: str
    payload: bytes
    retained: bool = False
    signer: str | None = None
    arrived_at: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True)
class Rejected:
    """A message arrived that is forged, or was received before, or that the broker must not retain.

    The device in its topic need not be its sender.
    """

    topic: str
    error: RefusedError


@dataclass(frozen=True)
class OperatorNotice:
    """New statements of the operator about this member have arrived."""

    renewed: bool  # its enrolment ends later, and it signs with the new one
    # A `fleet_protocol.identity.release.Release` that it must install; None if there is none.
    release: object = None
    heard: int = 0  # number of the release with which the server has received its messages
    revoked: bool = False  # its enrolment counts no more


Event = Connected | Disconnected | Received | Refused | LoginRefused | Rejected | OperatorNotice


@dataclass(frozen=True)
class WireCount:
    """Bytes of the MQTT packets of messages, with headers and acknowledgements."""

    sent: int
    received: int


@dataclass(frozen=True)
class Farewell:
    """A retained last message: a will, or a message on closing that replaces it."""

    topic: str
    payload: bytes


class Transport(Protocol):
    """A connection to a broker that outlives the broker.

    It delivers at least once, reconnects by itself, subscribes again with every connection, and
    puts every event into the inbox that it was opened with. It does not guarantee completeness,
    since blobs have digests. Data on an `authentic` transport was sent by a member, so that chunks
    need no digests. Operations that fail raise a TransportError.
    """

    authentic: bool

    @property
    def address(self) -> BrokerAddress:
        """The broker."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""

    @property
    def wire(self) -> WireCount:
        """Bytes exchanged so far."""

    @property
    def packet_bytes(self) -> int:
        """Size of the largest packet that the broker accepts.

        As it has announced, or as its refusals have shown.
        """

    def connect(self, timeout_seconds: float = 30.0) -> None:
        """Connect for the first time."""

    def subscribe(
        self,
        topic_filter: str,
        qos: int = 1,
        timeout_seconds: float = 10.0,
    ) -> None:
        """Subscribe, now and after every reconnect, and wait until the broker has confirmed it.

        Without a connection, or without a time to wait, the subscription is only recorded. If the
        broker refuses it, a BrokerRefusedError is raised; with a later connection the refusal is an
        event.
        """

    def unsubscribe(self, topic_filter: str) -> None:
        """End the subscription to a topic filter."""

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int = 1,
        retain: bool = False,
    ) -> None:
        """Send a message; without a connection it waits, unless the queue is full.

        A packet that is larger than `packet_bytes` raises a BrokerRefusedError.
        """

    def publish_stream(self, messages: Iterable[tuple[str, bytes]], deadline: float) -> int:
        """Send the chunks of a blob, and return their number.

        At most a window of them is in memory. Sending ends at the deadline, on the clock of
        ``time.monotonic()``.
        """

    def drain(self, deadline: float, at_most: int = 0) -> None:
        """Wait until at most a given number of messages is unacknowledged.

        The deadline is on the clock of ``time.monotonic()``.
        """

    def close(self, farewell: Farewell | None = None, timeout_seconds: float = 2.0) -> None:
        """Disconnect for good, with a retained last message, if any, which replaces the will."""


def import_needed(what: str, name: str) -> ModuleType:
    """Import a module whose packages may be missing.

    Args:
        what: the part that needs the module, for the message.
        name: name of the module.

    Raises:
        ConfigError: a package is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed here, but {what} needs it: pip install "
            "'shoal[device]' on a board, 'shoal[server]' for a server"
        ) from error


def open_transport(  # noqa: PLR0913  (options by keyword)
    address: BrokerAddress,
    client_id: str,
    inbox: queue.SimpleQueue[Event],
    *,
    will: Farewell | None = None,
    session_expiry_seconds: int = 3600,
    member: object | None = None,
) -> Transport:
    """Return the transport that an address names; it is not connected yet.

    Args:
        address: address of the broker.
        client_id: id of this connection only.
        inbox: receives all events.
        will: published, retained, by the broker when the connection is lost.
        session_expiry_seconds: how long the broker keeps the session after that.
        member: a `fleet_protocol.identity.member.Member` that signs what it sends, and accepts only
            signed messages; None for a fleet without identities.

    Raises:
        ConfigError: a certificate file of the address cannot be read, or a package is not
            installed.
        StorageError: the folder of the member cannot be written.
    """
    settings = {"will": will, "session_expiry_seconds": session_expiry_seconds}
    opened: Transport
    if member is not None:
        # This module needs cryptography.
        module = import_needed("an enrolled fleet", "fleet_protocol.identity.signed_transport")
        opened = module.open_signed(
            address,
            client_id,
            inbox,
            member,
            **settings,
        )
        return opened
    scheme = SCHEMES[address.scheme]
    module = import_needed(f"{address.scheme}://", scheme.module)
    opened = getattr(module, scheme.name)(address, client_id, inbox, **settings)
    return opened
