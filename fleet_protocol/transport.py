"""What carries messages: events, the address of a broker, and the protocol that every transport
fulfils.

MQTT 5 is one (`fleet_protocol.link`). Another is one file with a class of the same methods and a
row in `SCHEMES`.
"""

import queue
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Protocol
from urllib.parse import unquote, urlsplit

from fleet_protocol.errors import ConfigError, RefusedError
from fleet_protocol.spelling import without_login

SEND_WINDOW = (
    16  # chunks that may wait for the broker's acknowledgement; 1.5 MB at the default chunk size
)

BACKOFF_MAX_SECONDS = 30.0  # between attempts to connect again


@dataclass(frozen=True)
class Scheme:
    """A transport, as the first part of an address names it: the class of a module, imported when
    used, and a port.

    It is called like `open_transport`; the port counts where an address names none.
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
    """Where the broker is and how to get in."""

    host: str
    port: int
    scheme: str = "mqtt"  # which transport, a row of `SCHEMES`
    username: str | None = None  # login, or None
    password: str | None = None
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
        """Read ``mqtt[s]://[user:password@]host[:port]``; another form is a ConfigError."""
        wrong = ConfigError(
            f"broker address {without_login(url)!r} is not of the form mqtt://[user:password@]host[:port] (or mqtts://)"
        )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise wrong from error
        scheme = SCHEMES.get(parts.scheme)
        if scheme is None or not parts.hostname or parts.path not in {"", "/"}:
            raise wrong
        return cls(
            host=parts.hostname,
            port=port or scheme.port,
            scheme=parts.scheme,
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
        )

    @property
    def on_this_machine(self) -> bool:
        """Whether nobody between here and the broker can listen."""
        return self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"

    @property
    def tls(self) -> bool:
        """Whether to encrypt, and to verify the broker's certificate."""
        return SCHEMES[self.scheme].tls

    def __str__(self) -> str:
        return f"{self.scheme}://{bracket_host(self.host)}:{self.port}"


def bracket_host(host: str) -> str:
    """A host as it stands before a port: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class Connected:
    """The broker accepted the connection.

    If it did not know the session, what it had queued is gone.
    """

    session_present: bool


@dataclass(frozen=True)
class Disconnected:
    """The connection is gone, for a reason that paho or the broker said.

    The link tries again by itself.
    """

    reason: str


@dataclass(frozen=True)
class Received:
    """A message arrived, perhaps stored before we subscribed.

    Where it was signed, its signer is a member.
    """

    topic: str
    payload: bytes
    retained: bool = False
    signer: str | None = None


@dataclass(frozen=True)
class Rejected:
    """A message arrived on a signed transport that nobody who may say it there has said, or that
    was said before.

    Who is named in its topic need not be who sent this.
    """

    topic: str
    error: RefusedError


@dataclass(frozen=True)
class OperatorNotice:
    """What the operator says to this member has come."""

    renewed: bool  # its enrolment ends later; it speaks with that from now on
    # a `fleet_protocol.identity.release.Release` that it is to take; None for none, or none any
    # more
    release: object = None
    heard: int = 0  # number of the release with which the server has heard it


Event = Connected | Disconnected | Received | Rejected | OperatorNotice


@dataclass(frozen=True)
class WireCount:
    """Bytes of the MQTT packets that carried messages to the broker and back, headers and
    acknowledgements included.
    """

    sent: int
    received: int


@dataclass(frozen=True)
class Farewell:
    """A retained last message: a will, or a good-bye that replaces it."""

    topic: str
    payload: bytes


class Transport(Protocol):
    """A connection to a broker that outlives the broker.

    It delivers at least once, reconnects by itself, subscribes again with every connection, and
    puts every event into the inbox it was opened with. Completeness is not its business: blobs have
    digests. What arrives on an `authentic` one is what a member has sent, so that chunks need no
    digests of their own. What fails is a TransportError.
    """

    authentic: bool

    @property
    def address(self) -> BrokerAddress:
        """The broker."""

    @property
    def connected(self) -> bool:
        """Whether the broker is there now."""

    @property
    def wire(self) -> WireCount:
        """Bytes exchanged so far."""

    @property
    def packet_bytes(self) -> int:
        """Size of the largest packet that the broker takes, as far as it says."""

    def connect(self, timeout_seconds: float = 30.0) -> None:
        """Connect for the first time, if something answers and lets us in."""

    def subscribe(self, topic_filter: str, qos: int = 1, timeout_seconds: float = 10.0) -> None:
        """Subscribe, now and after every reconnect, and wait until the broker, if it is there, has
        confirmed it.

        While the broker is away, or without a time to wait, it is only noted.
        """

    def unsubscribe(self, topic_filter: str) -> None:
        """Forget a topic filter, as given to `subscribe`."""

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Send a message; while the broker is away it waits here, unless no more can wait."""

    def publish_stream(self, messages: Iterable[tuple[str, bytes]], deadline: float) -> int:
        """Send the chunks of a blob, and count them, without ever holding more than a window of
        them in memory.

        What the broker has not taken by the deadline, on the clock of ``time.monotonic()``, is
        given up.
        """

    def drain(self, deadline: float, at_most: int = 0) -> None:
        """Wait until the broker has acknowledged what was sent but for so many, to a deadline of
        `time.monotonic`.
        """

    def close(self, farewell: Farewell | None = None, timeout_seconds: float = 2.0) -> None:
        """Disconnect for good, with a retained last message, if any, which replaces the will."""


def import_needed(what: str, name: str) -> ModuleType:
    """Import a module that something needs.

    A ConfigError where a package that it needs is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed here, which {what} needs: "
            "pip install 'shoal[device]' on a board, 'shoal[server]' for a server"
        ) from error


def open_transport(
    address: BrokerAddress,
    client_id: str,
    inbox: queue.SimpleQueue[Event],
    *,
    will: Farewell | None = None,
    session_expiry_seconds: int = 3600,
    member: object | None = None,
) -> Transport:
    """Make the transport that an address names; it is not connected yet.

    Two must not share a client id. The will is published, retained, when we vanish, and the session
    kept for so long. A `fleet_protocol.identity.member.Member` signs what it says and takes nothing
    that is not signed.

    Raises:
        ConfigError: a certificate file of the address cannot be read, or what the transport needs
            is not installed.
        StorageError: the folder of the member cannot be written.
    """
    about = {"will": will, "session_expiry_seconds": session_expiry_seconds}
    opened: Transport
    if member is not None:
        module = import_needed(
            "an enrolled fleet", "fleet_protocol.identity.signed_transport"
        )  # cryptography, that is
        opened = module.open_signed(address, client_id, inbox, member, **about)
        return opened
    scheme = SCHEMES[address.scheme]
    module = import_needed(f"{address.scheme}://", scheme.module)
    opened = getattr(module, scheme.name)(address, client_id, inbox, **about)
    return opened
