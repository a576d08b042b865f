"""What the command line asks of a running server, on ``Topics.server_control``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages.parsing import check_size
from fleet_protocol.messages.values import Name

__all__ = ["RunRequest", "SteerRequest", "Wish", "malformed", "parse_request"]

Wish = Literal["go", "pause", "stop", "abandon"]
"""What an operator wants of a run; see `SteerRequest`."""


class RunRequest(FrozenModel):
    """Ask a running server for a run.

    Attributes:
        request: id chosen by the asker; the events that answer carry it.
        fleet: name of the fleet.
        config: the server's configuration as JSON, with absolute paths; its ``store`` and ``broker`` are the running
            server's own and not read.
    """

    type: Literal["run-request"] = "run-request"
    schema_version: Literal[1] = 1
    request: Name
    fleet: Name
    config: str

    def to_bytes(self) -> bytes:
        """The request as it travels."""
        return self.model_dump_json().encode()


class SteerRequest(FrozenModel):
    """Ask a server to hold, end or go on with the run in progress.

    Attributes:
        request: id chosen by the asker; the answer carries it.
        fleet: name of the fleet.
        run: id of the run, or its beginning; empty for the one in progress.
        wish: ``go`` on, ``pause`` or ``stop`` after the round in progress, or ``abandon`` that round and stop.
    """

    type: Literal["steer-request"] = "steer-request"
    schema_version: Literal[1] = 1
    request: Name
    fleet: Name
    run: Name | Literal[""] = ""
    wish: Wish

    def to_bytes(self) -> bytes:
        """The request as it travels."""
        return self.model_dump_json().encode()


_REQUESTS: TypeAdapter[RunRequest | SteerRequest] = TypeAdapter(
    Annotated[RunRequest | SteerRequest, Field(discriminator="type")]
)


def malformed(payload: bytes, what: str, error: ValidationError) -> RefusedError:
    """What to raise for a message that cannot be read.

    Args:
        payload: the message.
        what: it should have been.
        error: what is wrong with it.
    """
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "message"
    return RefusedError(RefusalReason.MALFORMED, f"not {what} ({len(payload)} bytes): {where}: {first['msg']}")


def parse_request(payload: bytes) -> RunRequest | SteerRequest:
    """Read a request to the server.

    Args:
        payload: JSON bytes.

    Raises:
        RefusedError: the request is malformed or oversized.
    """
    check_size(payload, "request")
    try:
        return _REQUESTS.validate_json(payload)
    except ValidationError as error:
        raise malformed(payload, "a request", error) from error
