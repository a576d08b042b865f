"""Explains why a broker cannot be reached or refuses something, and what to do about it."""

import socket
import ssl
import time

_REMEDIES = {
    "Not authorized": "look at the login, and at what the broker lets it write (its access list)",
    "Packet too large": (
        "set round.chunk_bytes to less, or let the broker take more (Mosquitto: max_packet_size)"
    ),
    "QoS not supported": (
        "the broker must take messages of quality of service 1 (Mosquitto: max_qos)"
    ),
    "Quota exceeded": (
        "the broker keeps too few messages (Mosquitto: max_queued_messages, max_queued_bytes)"
    ),
    "Retain not supported": "the broker must keep retained messages (Mosquitto: retain_available)",
}
"""What to do about a reason of MQTT 5 that a broker gives."""


def remedy(reason: str) -> str:
    """Return what to check if a broker refuses a connection or a message."""
    return _REMEDIES.get(reason, "look at the login, and at what the broker writes to its log")


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
