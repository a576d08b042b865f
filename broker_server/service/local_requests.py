"""Requests that a server accepts only over its socket: its store's owner may run anything."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Ask
from fleet_protocol.messages.parsing import reader
from fleet_protocol.messages.values import Name
from fleet_protocol.requests import SteerRequest


class OwnRun(FrozenModel):
    """Request a run of any configuration from the server of a store.

    Attributes:
        request: id chosen by the sender; the events that answer carry it.
        fleet: name of the fleet.
        config: the configuration as JSON, with absolute paths; its ``store`` and ``broker`` are
            ignored, since the running server has its own.
    """

    type: Literal["own-run"] = "own-run"
    request: Name
    fleet: Name
    config: str


class AnotherRun(FrozenModel):
    """Request another run with the settings of an earlier one from the server of a store.

    Attributes:
        request: id chosen by the sender; the events that answer carry it.
        fleet: name of the fleet.
        run: id of the run, its beginning, or the run's name; empty for the newest.
    """

    type: Literal["another-run"] = "another-run"
    request: Name
    fleet: Name
    run: Name | Literal[""] = ""


LocalServerRequest = OwnRun | AnotherRun | SteerRequest
parse_local_request: Callable[[bytes], LocalServerRequest | Ask] = reader(
    Annotated[LocalServerRequest | Ask, Field(discriminator="type")], "request"
)
