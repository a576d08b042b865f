"""The reasons for which a broker refuses something: what each means, and what to do about it.

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
    """What the program does after a refusal."""

    STOP = "stop"  # a first connection fails; a later one is tried again about once an hour
    BACK_OFF = "back-off"  # it is tried again, less and less often
    DROP = "drop"  # the message is not sent again, and the subscription counts as missing
    SHRINK = "shrink"  # the message is not sent again; chunks are made smaller


@dataclass(frozen=True)
class BrokerRefusal:
    """A reason of MQTT 5 for which a broker refuses something.

    Attributes:
        code: the reason code.
        meaning: its name in the standard.
        connection: what the program does if a connection is refused or ended for it (CONNACK,
            DISCONNECT).
        message: what it does if a message or a subscription is refused for it (PUBACK, SUBACK).
        remedy: what an operator does about it.
    """

    code: int
    meaning: str
    connection: Reaction
    message: Reaction
    remedy: str


SESSION_TAKEN_OVER = 0x8E
PACKET_TOO_LARGE = 0x95
NOT_AUTHORIZED = 0x87
CERTIFICATE_REFUSED = 0x100
"""Of ours, beyond those of MQTT: the broker ends TLS because of this client's certificate."""

_LOG = "look at what the broker writes to its log"
_LOGIN = (
    "look at the login, and at what the broker lets it publish and subscribe to (its access list)"
)
_VERSION = "the broker must speak MQTT 5"
_LATER = "the broker has too much to do, or starts; it is asked again later"
_RATE = "the broker takes fewer messages a second than the fleet sends: let it take more"
_ADDRESS = "the broker sends its clients to another address: set the new one as `broker`"
_SIZE = (
    "set round.chunk_bytes to less, or let the broker take more (Mosquitto: max_packet_size, "
    "message_size_limit)"
)
_CERTIFICATE = (
    "it was withdrawn or is of another fleet: make a new enrolment with `shoal enroll`, or look at "
    "cert_file; where the certificate is good, the broker needs the newest crl.pem"
)
_TOPIC = "the broker must let topics that begin with shoal/ pass"

# fmt: off
_ROWS: tuple[tuple[int, str, Reaction, Reaction, str], ...] = (
    (0x80, "Unspecified error", Reaction.BACK_OFF, Reaction.DROP, _LOG),
    (0x81, "Malformed packet", Reaction.BACK_OFF, Reaction.DROP, _LOG),
    (0x82, "Protocol error", Reaction.BACK_OFF, Reaction.DROP, _LOG),
    (0x83, "Implementation specific error", Reaction.BACK_OFF, Reaction.DROP, _LOG),
    (0x84, "Unsupported protocol version", Reaction.STOP, Reaction.DROP, _VERSION),
    (0x85, "Client identifier not valid", Reaction.STOP, Reaction.DROP,
     "the broker must take client ids of up to 160 letters, digits, '-', '_' and '.'"),
    (0x86, "Bad user name or password", Reaction.STOP, Reaction.DROP,
     "look at user and password in the address, or make a new enrolment with `shoal enroll`"),
    (NOT_AUTHORIZED, "Not authorized", Reaction.STOP, Reaction.DROP, _LOGIN),
    (0x88, "Server unavailable", Reaction.BACK_OFF, Reaction.DROP, _LATER),
    (0x89, "Server busy", Reaction.BACK_OFF, Reaction.DROP, _LATER),
    (0x8A, "Banned", Reaction.STOP, Reaction.DROP, "lift the ban of this client on the broker"),
    (0x8B, "Server shutting down", Reaction.BACK_OFF, Reaction.DROP, "start the broker again"),
    (0x8C, "Bad authentication method", Reaction.STOP, Reaction.DROP,
     "the broker must take a login of user and password"),
    (0x8D, "Keep alive timeout", Reaction.BACK_OFF, Reaction.DROP,
     "the network or this computer is too slow; look at its load and its reception"),
    (SESSION_TAKEN_OVER, "Session taken over", Reaction.BACK_OFF, Reaction.DROP,
     "two programs run under one name: stop one of them, or give it another name"),
    (0x8F, "Topic filter invalid", Reaction.BACK_OFF, Reaction.DROP, _TOPIC),
    (0x90, "Topic name invalid", Reaction.BACK_OFF, Reaction.DROP, _TOPIC),
    (0x93, "Receive maximum exceeded", Reaction.BACK_OFF, Reaction.DROP,
     "let the broker take more messages at once (Mosquitto: max_inflight_messages)"),
    (PACKET_TOO_LARGE, "Packet too large", Reaction.SHRINK, Reaction.SHRINK,
     _SIZE),
    (0x96, "Message rate too high", Reaction.BACK_OFF, Reaction.DROP, _RATE),
    (0x97, "Quota exceeded", Reaction.BACK_OFF, Reaction.DROP,
     "the broker keeps too few messages (Mosquitto: max_queued_messages, max_queued_bytes)"),
    (0x98, "Administrative action", Reaction.BACK_OFF, Reaction.DROP,
     "somebody has ended the connection on the broker; ask who operates it"),
    (0x99, "Payload format invalid", Reaction.BACK_OFF, Reaction.DROP,
     "the broker must let binary payloads pass"),
    (0x9A, "Retain not supported", Reaction.STOP, Reaction.DROP,
     "the broker must keep retained messages (Mosquitto: retain_available)"),
    (0x9B, "QoS not supported", Reaction.STOP, Reaction.DROP,
     "the broker must take messages of quality of service 1 (Mosquitto: max_qos)"),
    (0x9C, "Use another server", Reaction.STOP, Reaction.DROP, _ADDRESS),
    (0x9D, "Server moved", Reaction.STOP, Reaction.DROP, _ADDRESS),
    (0x9F, "Connection rate exceeded", Reaction.BACK_OFF, Reaction.DROP,
     "the broker takes fewer connections a second than the fleet makes: let it take more"),
    (0xA0, "Maximum connect time", Reaction.BACK_OFF, Reaction.DROP,
     "the broker ends connections after a time: let it keep them"),
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

# What a broker of MQTT 3.1.1 answers, by its code, as reasons of MQTT 5.
_OLD_CONNECTION_CODES = MappingProxyType({1: 0x84, 2: 0x85, 3: 0x88, 4: 0x86, 5: NOT_AUTHORIZED})


def refusal_of_code(code: int) -> BrokerRefusal:
    """Return what a reason code means; also of one that no table knows."""
    refusal = REFUSALS.get(_OLD_CONNECTION_CODES.get(code, code))
    if refusal is not None:
        return refusal
    return BrokerRefusal(code, f"reason 0x{code:02x}", Reaction.BACK_OFF, Reaction.DROP, _LOG)


def explain(code: int) -> str:
    """Return the meaning of a reason code in brackets, and what an operator does about it."""
    refusal = refusal_of_code(code)
    return f"({refusal.meaning}); {refusal.remedy}"


def why_ended(code: int | None, reason: object) -> str:
    """Return why a connection ended.

    Args:
        code: the broker's reason; None if it gave none.
        reason: of paho.
    """
    if code:
        refusal = refusal_of_code(code)
        return f"{refusal.meaning}; {refusal.remedy}"
    # What paho calls every loss that it has no reason for.
    return "without a reason" if str(reason) == "Unspecified error" else str(reason)


def is_certificate_alert(error: BaseException | None) -> bool:
    """Return whether the other side has ended TLS because of this side's certificate.

    With TLS 1.3 that comes after the handshake of this side, in place of an answer.
    """
    reason = str(getattr(error, "reason", ""))
    is_alert = isinstance(error, ssl.SSLError) and "ALERT" in reason
    return is_alert and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason)


def is_refused_certificate(error: BaseException | None) -> bool:
    """Return whether TLS failed for a reason that time alone does not mend."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_code != _NOT_VALID_YET
    return isinstance(error, ssl.SSLError)


def why_not_reached(error: BaseException | None) -> str:
    """Return why a connection could not be made, and what to check."""
    match error:
        case ssl.SSLCertVerificationError(verify_code=9):
            now = time.strftime("%Y-%m-%d %H:%M")
            return (
                f"its certificate is not valid yet, and this computer's clock says {now}: let it "
                "fetch the time (timedatectl set-ntp true), or look at when the certificate begins"
            )
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate is not trusted ({error.verify_message}); look at ca_file, at the "
                "host name in the address, and at this computer's clock"
            )
        case ssl.SSLError():
            return (
                f"TLS does not come about ({error.reason or error}); look at the certificate "
                "files, and at the port"
            )
        case socket.gaierror():
            return "there is no host of this name"
        case None | ConnectionRefusedError() | TimeoutError():
            return "nothing answers there"
        case _:
            return str(error)
