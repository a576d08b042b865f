"""JSON bytes into messages; whatever is wrong with them is a refusal with its reason."""

from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import problems
from fleet_protocol.messages.presence import DeviceProfile, DeviceStatus, Presence
from fleet_protocol.messages.to_device import ServerMessage
from fleet_protocol.messages.to_server import DeviceMessage

MESSAGE_LIMIT_BYTES = 256 * 1024  # the largest control message is a chunk list of a few kB

_SERVER_MESSAGES: TypeAdapter[ServerMessage] = TypeAdapter(ServerMessage)
_DEVICE_MESSAGES: TypeAdapter[DeviceMessage] = TypeAdapter(DeviceMessage)
_PRESENCES: TypeAdapter[Presence] = TypeAdapter(Presence)

MessageT = TypeVar("MessageT")


def parse_server_message(payload: bytes) -> ServerMessage:
    """Read a message from the server to a device.

    Raises:
        RefusedError: the message is malformed, oversized or of an unknown type.
    """
    return _parse(_SERVER_MESSAGES, payload)


def parse_device_message(payload: bytes) -> DeviceMessage:
    """Read a message from a device to the server.

    Raises:
        RefusedError: the message is malformed, oversized or of an unknown type.
    """
    return _parse(_DEVICE_MESSAGES, payload)


def parse_presence(payload: bytes) -> DeviceStatus | DeviceProfile:
    """Read what a device says of itself, retained.

    Raises:
        RefusedError: the message is malformed or oversized.
    """
    return _parse(_PRESENCES, payload)


def check_size(payload: bytes, what: str) -> None:
    """See that a message is not too large to be read.

    Raises:
        RefusedError: it is oversized.
    """
    if len(payload) > MESSAGE_LIMIT_BYTES:
        text = f"a {what} of {len(payload)} bytes; the limit is {MESSAGE_LIMIT_BYTES}"
        raise RefusedError(RefusalReason.OVERSIZED, text)


def read(adapter: TypeAdapter[MessageT], payload: bytes) -> MessageT:
    """Read a message of any size.

    Raises:
        RefusedError: it is malformed; the first things that are wrong are named.
    """
    try:
        return adapter.validate_json(payload)
    except ValidationError as error:
        raise RefusedError(RefusalReason.MALFORMED, problems(error, "message")) from error


def _parse(adapter: TypeAdapter[MessageT], payload: bytes) -> MessageT:
    check_size(payload, "control message")
    return read(adapter, payload)
