"""The reasons with which a broker refuses something: their meaning, and what to do.

Boards, server, commands and `doctor` all read this one table.
"""

import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Reaction(Enum):
    """The program's reaction to a refusal."""

    STOP = "stop"  # a first connection fails; a later one is tried again about once an hour
    BACK_OFF = "back-off"  # it is tried again, less and less often
    DROP = "drop"  # the message is not sent again, and the subscription counts as missing
    SHRINK = "shrink"  # the message is not sent again; chunks are made smaller


@dataclass(frozen=True)
class BrokerRefusal:
    """A reason of MQTT 5 with which a broker refuses something.

    Attributes:
        code: the reason code.
        meaning: its name in the standard.
        connection: what the program does if a connection is refused or ended with it (CONNACK,
            DISCONNECT).
        message: what it does if a message or a subscription is refused with it (PUBACK, SUBACK).
        remedy: what an operator should do.
    """

    code: int
    meaning: str
    connection: Reaction
    message: Reaction
    remedy: str


SESSION_TAKEN_OVER = 0x8E
PACKET_TOO_LARGE = 0x95
NOT_AUTHORIZED = 0x87
TOPIC_REFUSED = frozenset({NOT_AUTHORIZED, 0x90})
"""Reasons that concern the topic of a message, so every message on it would be refused."""
CERTIFICATE_REFUSED = 0x100
"""Shoal's own code beyond those of MQTT: the broker refuses this client's certificate in TLS."""

_LOG = "check the broker's log"
_LOGIN = "check the login, and what the broker lets it publish and subscribe to (its access rules)"
_VERSION = "the broker must support MQTT 5"
_LATER = "the broker is overloaded or starting; the client tries again later"
_RATE = "the broker accepts fewer messages a second than the fleet sends: raise its limit"
_ADDRESS = "the broker redirects its clients to another address: set the new one as `broker`"
_SIZE = (
    "set round.chunk_bytes to less, or raise the broker's limit (Mosquitto: "
    "max_packet_size, message_size_limit)"
)
_CERTIFICATE = (
    "it was revoked or belongs to another fleet: make a new enrolment with `shoal enroll`, "
    "or check cert_file; if the certificate is valid, the broker needs the newest crl.pem"
)
_TOPIC = "the broker must allow topics that begin with shoal/"

# fmt: off
_ROWS: tuple[tuple[int, str, Reaction, Reaction, str], ...] = (
    (0x80, "Unspecified error", Reaction.BACK_OFF, Reaction.DROP, _LOG),
    (0x81, "Malformed packet", Reaction.BACK_OFF, Reaction.DROP, _LOG),
    (0x82, "Protocol error", Reaction.BACK_OFF, Reaction.DROP, _LOG),
    (0x83, "Implementation specific error", Reaction.BACK_OFF, Reaction.DROP, _LOG),
    (0x84, "Unsupported protocol version", Reaction.STOP, Reaction.DROP, _VERSION),
    (0x85, "Client identifier not valid", Reaction.STOP, Reaction.DROP,
     "the broker must accept client ids of up to 160 letters, digits, '-', '_' and '.'"),
    (0x86, "Bad user name or password", Reaction.STOP, Reaction.DROP,
     "check user and password in the address, or make a new enrolment with `shoal enroll`"),
    (NOT_AUTHORIZED, "Not authorized", Reaction.STOP, Reaction.DROP, _LOGIN),
    (0x88, "Server unavailable", Reaction.BACK_OFF, Reaction.DROP, _LATER),
    (0x89, "Server busy", Reaction.BACK_OFF, Reaction.DROP, _LATER),
    (0x8A, "Banned", Reaction.STOP, Reaction.DROP, "lift the ban of this client on the broker"),
    (0x8B, "Server shutting down", Reaction.BACK_OFF, Reaction.DROP, "start the broker again"),
    (0x8C, "Bad authentication method", Reaction.STOP, Reaction.DROP,
     "the broker must accept a login with user and password"),
    (0x8D, "Keep alive timeout", Reaction.BACK_OFF, Reaction.DROP,
     "the network or this computer is too slow; check its load and its connection"),
    (SESSION_TAKEN_OVER, "Session taken over", Reaction.BACK_OFF, Reaction.DROP,
     "two programs use the same name: stop one of them, or give it another name"),
    (0x8F, "Topic filter invalid", Reaction.BACK_OFF, Reaction.DROP, _TOPIC),
    (0x90, "Topic name invalid", Reaction.BACK_OFF, Reaction.DROP, _TOPIC),
    (0x93, "Receive maximum exceeded", Reaction.BACK_OFF, Reaction.DROP,
     "let the broker accept more messages at once (Mosquitto: max_inflight_messages)"),
    (PACKET_TOO_LARGE, "Packet too large", Reaction.SHRINK, Reaction.SHRINK,
     _SIZE),
    (0x96, "Message rate too high", Reaction.BACK_OFF, Reaction.DROP, _RATE),
    (0x97, "Quota exceeded", Reaction.BACK_OFF, Reaction.DROP,
     "the broker queues too few messages (Mosquitto: max_queued_messages, max_queued_bytes)"),
    (0x98, "Administrative action", Reaction.BACK_OFF, Reaction.DROP,
     "somebody has ended the connection at the broker; ask its operator"),
    (0x99, "Payload format invalid", Reaction.BACK_OFF, Reaction.DROP,
     "the broker must allow binary payloads"),
    (0x9A, "Retain not supported", Reaction.STOP, Reaction.DROP,
     "the broker must retain messages (Mosquitto: retain_available)"),
    (0x9B, "QoS not supported", Reaction.STOP, Reaction.DROP,
     "the broker must support messages with quality of service 1 (Mosquitto: max_qos)"),
    (0x9C, "Use another server", Reaction.STOP, Reaction.DROP, _ADDRESS),
    (0x9D, "Server moved", Reaction.STOP, Reaction.DROP, _ADDRESS),
    (0x9F, "Connection rate exceeded", Reaction.BACK_OFF, Reaction.DROP,
     "the broker accepts fewer connections a second than the fleet makes: raise its limit"),
    (0xA0, "Maximum connect time", Reaction.BACK_OFF, Reaction.DROP,
     "the broker ends connections after a time limit: remove the limit"),
    (0xA2, "Wildcard subscriptions not supported", Reaction.BACK_OFF, Reaction.DROP,
     "the broker must let clients subscribe with + in a topic"),
    (CERTIFICATE_REFUSED, "Certificate refused", Reaction.STOP, Reaction.DROP,
     _CERTIFICATE),
)
# fmt: on

REFUSALS: Mapping[int, BrokerRefusal] = MappingProxyType(
    {row[0]: BrokerRefusal(*row) for row in _ROWS}
)
"""Every reason that Shoal knows, by its code."""

FIRST_FAILURE = 0x80
"""Lowest reason code that is a refusal."""

_NOT_VALID_YET = 9  # code of OpenSSL

# Reason codes of a broker of MQTT 3.1.1, as reasons of MQTT 5.
_OLD_CONNECTION_CODES = MappingProxyType({1: 0x84, 2: 0x85, 3: 0x88, 4: 0x86, 5: NOT_AUTHORIZED})


def refusal_of_code(code: int) -> BrokerRefusal:
    """Return the meaning of a reason code, even of one that no table lists."""
    refusal = REFUSALS.get(_OLD_CONNECTION_CODES.get(code, code))
    if refusal is not None:
        return refusal
    return BrokerRefusal(code, f"reason 0x{code:02x}", Reaction.BACK_OFF, Reaction.DROP, _LOG)


def explain(code: int) -> str:
    """Return the meaning of a reason code in brackets, and what an operator should do."""
    refusal = refusal_of_code(code)
    return f"({refusal.meaning}); {refusal.remedy}"


def why_ended(code: int | None, reason: object) -> str:
    """Return why a connection ended.

    Args:
        code: the broker's reason; None if it gave none.
        reason: reason from paho.
    """
    if code:
        refusal = refusal_of_code(code)
        return f"{refusal.meaning}; {refusal.remedy}"
    # paho's name for every loss without a known reason.
    return "without a reason" if str(reason) == "Unspecified error" else str(reason)


def is_certificate_alert(error: BaseException | None) -> bool:
    """Return whether the other side has ended TLS because of this side's certificate.

    With TLS 1.3 that arrives after this side's handshake, instead of an answer.
    """
    reason = str(getattr(error, "reason", ""))
    is_alert = isinstance(error, ssl.SSLError) and "ALERT" in reason
    return is_alert and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason)


def is_refused_certificate(error: BaseException | None) -> bool:
    """Return whether TLS failed for a reason that waiting does not remove."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_code != _NOT_VALID_YET
    return isinstance(error, ssl.SSLError)


_PORT = "check whether its port is for mqtt:// or for mqtts:// (TLS)"

ENDED_EARLY = f"it ends the connection without a reason; {_PORT}"
"""The likely faults if a broker ends a connection before it answers."""


def why_not_reached(error: BaseException | None) -> str:
    """Return why a connection could not be made, and what to check."""
    match error:
        case ssl.SSLCertVerificationError(verify_code=9):
            now = time.strftime("%Y-%m-%d %H:%M")
            return (
                "its certificate is not valid yet according to this computer's clock, which "
                f"shows {now}: synchronise the clock (timedatectl set-ntp true), or check "
                "when the certificate becomes valid"
            )
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate is not trusted ({error.verify_message}); check ca_file, "
                "the host name in the address, and this computer's clock"
            )
        case ssl.SSLError():
            return (
                f"the TLS handshake fails ({error.reason or error}); {_PORT}, and check the "
                "certificate files"
            )
        case socket.gaierror():
            return "the host name is unknown"
        case None | ConnectionRefusedError() | TimeoutError():
            return "nothing answers there"
        case ConnectionResetError() | BrokenPipeError():
            return ENDED_EARLY
        case _:
            return str(error)
