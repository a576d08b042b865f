"""Requests to a server over MQTT, with numbers and names, and with nothing to open or run.

Their topic is ``Topics.server_control``.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import Field, StrictFloat, StrictInt

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Ask
from fleet_protocol.messages.parsing import reader
from fleet_protocol.messages.values import Name

Wish = Literal["go", "pause", "stop", "abandon"]
"""What an operator wants of a run; see `SteerRequest`."""

Wanted = Literal[Wish, "start"]
"""The same, or another run with the same settings, which only the server's socket accepts."""


SettingName = Annotated[str, Field(pattern=r"^[a-z][A-Za-z0-9_.-]{0,199}$")]
"""A key of ``fleet.toml`` with its tables, such as ``train.epochs``."""

Fingerprints = Annotated[str, Field(pattern=r"^[0-9a-f]{16}( [0-9a-f]{16})?$")]
"""One fingerprint of a value, or two of a value with paths: relative to the store, and absolute."""

Number = StrictInt | StrictFloat
MOST_SETTINGS = 2000


class RunRequest(FrozenModel):
    """Request a run of its own configuration from a running server.

    The request carries only numbers as values. The server compares its fingerprints with those of
    its own configuration, to check that both mean the same one.

    Attributes:
        request: id chosen by the asker; the events that answer carry it.
        fleet: name of the fleet.
        settings: numbers for the run; the server defines which numbers may be set, and their
            bounds.
        others: fingerprints of the value of every other setting.
    """

    type: Literal["run-request"] = "run-request"
    schema_version: Literal[2] = 2
    request: Name
    fleet: Name
    settings: Mapping[SettingName, Number] = Field(default_factory=dict, max_length=MOST_SETTINGS)
    others: Mapping[SettingName, Fingerprints] = Field(
        default_factory=dict, max_length=MOST_SETTINGS
    )


class SteerRequest(FrozenModel):
    """Ask a server to hold, end or go on with the run in progress.

    Attributes:
        request: id chosen by the asker; the answer carries it.
        fleet: name of the fleet.
        run: id of the run, or its beginning; empty for the one in progress.
        wish: ``go`` on, ``pause`` or ``stop`` after the round in progress, or ``abandon`` that
            round and stop.
    """

    type: Literal["steer-request"] = "steer-request"
    schema_version: Literal[1] = 1
    request: Name
    fleet: Name
    run: Name | Literal[""] = ""
    wish: Wish


ServerRequest = RunRequest | SteerRequest
Request = ServerRequest | Ask
parse_request: Callable[[bytes], Request] = reader(
    Annotated[Request, Field(discriminator="type")], "request"
)
