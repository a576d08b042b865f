"""Reads messages from JSON; every fault in them is a refusal with its reason."""

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

# Up to version 5 the key was `schema_version`.
# The version is the first key of a message, so it is found even where the rest is not JSON.
_VERSION = re.compile(rb'\{"(?:schema_version|v)":\s*(\d{1,9})')
MESSAGE_LIMIT_BYTES = 256 * 1024  # the largest control message is a chunk list of a few kB


def reader(
    kind: Any, what: str, limit_bytes: int | None = MESSAGE_LIMIT_BYTES
) -> Callable[[bytes], Any]:
    """Return a function that reads messages of a kind.

    The function raises a RefusedError if a message is malformed, of an unknown type, or larger than
    the limit.

    Args:
        kind: a type, or a union of several.
        what: name of such a message in a refusal.
        limit_bytes: most bytes of a message; None for no limit.
    """
    adapter = TypeAdapter(kind)

    def read(payload: bytes) -> Any:
        # Checked before anything is parsed.
        if limit_bytes is not None and len(payload) > limit_bytes:
            raise RefusedError(
                RefusalReason.OVERSIZED,
                f"a {what} of {len(payload)} bytes; the limit is {limit_bytes}",
            )
        try:
            return adapter.validate_json(payload)
        except ValidationError as error:
            raise RefusedError(RefusalReason.MALFORMED, _explain(error, payload, what)) from error

    return read


def _explain(
    error: ValidationError,
    payload: bytes,
    what: str,
) -> str:
    """Return why a message could not be read; a different version explains every fault."""
    match = _VERSION.match(payload)
    version = SCHEMA_VERSION if match is None else int(match[1])
    if version == SCHEMA_VERSION:
        return problems(error, "message")
    return (
        f"a {what} of version {version} of the protocol, but this Shoal supports version "
        f"{SCHEMA_VERSION}: install the same release on server and boards"
    )


parse_server_message: Callable[[bytes], ServerMessage] = reader(ServerMessage, "control message")
parse_device_message: Callable[[bytes], DeviceMessage] = reader(DeviceMessage, "control message")
parse_presence: Callable[[bytes], DeviceStatus | DeviceProfile] = reader(
    Presence, "control message"
)
