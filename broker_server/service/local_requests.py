"""What is asked at the socket of a server alone, by the owner of its store: his configurations are his own to run."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Ask
from fleet_protocol.messages.parsing import reader
from fleet_protocol.messages.values import Name
from fleet_protocol.requests import SteerRequest


class OwnRun(FrozenModel):
    """Ask the server of a store for a run of a configuration of its owner's.

    Attributes:
        request: id chosen by the asker; the events that answer carry it.
        fleet: name of the fleet.
        config: the configuration as JSON, with absolute paths; its ``store`` and ``broker`` are the running server's
            own and not read.
    """

    type: Literal["own-run"] = "own-run"
    request: Name
    fleet: Name
    config: str


class AnotherRun(FrozenModel):
    """Ask the server of a store for another run with the settings of one that it had.

    Attributes:
        request: id chosen by the asker; the events that answer carry it.
        fleet: name of the fleet.
        run: id of the run, or its beginning; empty for the newest.
    """

    type: Literal["another-run"] = "another-run"
    request: Name
    fleet: Name
    run: Name | Literal[""] = ""


LocalServerRequest = OwnRun | AnotherRun | SteerRequest
parse_local_request: Callable[[bytes], LocalServerRequest | Ask] = reader(
    Annotated[LocalServerRequest | Ask, Field(discriminator="type")], "request"
)
