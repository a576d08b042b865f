"""JSON bytes into messages; whatever is wrong with them is a refusal with its reason."""

import re
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import problems
from fleet_protocol.messages.header import SCHEMA_VERSION
from fleet_protocol.messages.presence import DeviceProfile, DeviceStatus, Presence
from fleet_protocol.messages.to_device import ServerMessage
from fleet_protocol.messages.to_server import DeviceMessage

_SPOKEN = re.compile(rb'\{"(?:schema_version|v)":\s*(\d{1,9})')  # the first of them up to version 5
_OTHER = "a {} of version {} of the protocol, and this Shoal speaks version {}: bring server and boards to the same release"
MESSAGE_LIMIT_BYTES = 256 * 1024  # the largest control message is a chunk list of a few kB


def reader(
    kind: Any, what: str, limit_bytes: int | None = MESSAGE_LIMIT_BYTES
) -> Callable[[bytes], Any]:
    """What reads messages of a kind, which may be a union of several.

    `what` they are is for the refusal.

    It raises RefusedError where a message is malformed, of an unknown type, or larger than the
    limit.
    """
    adapter = TypeAdapter(kind)

    def read(payload: bytes) -> Any:
        if limit_bytes is not None and len(payload) > limit_bytes:
            text = f"a {what} of {len(payload)} bytes; the limit is {limit_bytes}"
            raise RefusedError(RefusalReason.OVERSIZED, text)
        try:
            return adapter.validate_json(payload)
        except ValidationError as error:
            spoken = _SPOKEN.match(payload)
            version = SCHEMA_VERSION if spoken is None else int(spoken[1])
            same = version == SCHEMA_VERSION
            text = (
                problems(error, "message") if same else _OTHER.format(what, version, SCHEMA_VERSION)
            )
            raise RefusedError(RefusalReason.MALFORMED, text) from error

    return read


parse_server_message: Callable[[bytes], ServerMessage] = reader(ServerMessage, "control message")
parse_device_message: Callable[[bytes], DeviceMessage] = reader(DeviceMessage, "control message")
parse_presence: Callable[[bytes], DeviceStatus | DeviceProfile] = reader(
    Presence, "control message"
)
