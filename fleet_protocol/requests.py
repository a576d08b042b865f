"""What the command line asks of a running server, on ``Topics.server_control``."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Ask
from fleet_protocol.messages.parsing import reader
from fleet_protocol.messages.values import Name

Wish = Literal["go", "pause", "stop", "abandon"]
"""What an operator wants of a run; see `SteerRequest`."""

Wanted = Literal[Wish, "start"]
"""The same, and another run with the settings of that one."""


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


ServerRequest = RunRequest | SteerRequest
Request = ServerRequest | Ask
parse_request: Callable[[bytes], Request] = reader(Annotated[Request, Field(discriminator="type")], "request")
