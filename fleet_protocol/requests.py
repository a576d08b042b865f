"""Requests to a server over MQTT, with numbers and names, but nothing to open or run.

Their topic is ``Topics.server_control``.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import Field, StrictFloat, StrictInt

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Ask
from fleet_protocol.messages.parsing import reader
from fleet_protocol.messages.values import Name
from fleet_protocol.run_names import RunName

Wish = Literal["go", "pause", "stop", "abandon"]
"""An operator's wish for a run; see `SteerRequest`."""

Wanted = Literal[Wish, "start"]
"""The same, or another run with the same settings, which only the server's socket accepts."""


SettingName = Annotated[str, Field(pattern=r"^[a-z][A-Za-z0-9_.-]{0,199}$")]
"""A key of ``fleet.toml`` with its tables, such as ``train.epochs``."""

Fingerprints = Annotated[str, Field(pattern=r"^[0-9a-f]{16}( [0-9a-f]{16})?$")]
"""One fingerprint of a value, or two of a value with paths: relative to the store, and absolute."""

Number = StrictInt | StrictFloat
MOST_SETTINGS = 2000


class RunRequest(FrozenModel):
    """A request to a running server to start a run of its own configuration.

    The request carries only numbers as values. The server compares its fingerprints with those of
    its own configuration, to check that both mean the same one.

    Attributes:
        request: id that the sender chose; the server's events about this request repeat it.
        fleet: name of the fleet.
        settings: numeric settings for the run; the server defines which ones can be set, and their
            bounds.
        others: fingerprints of the values of all other settings, by name.
        name: name of the run; None for the name in the server's own configuration.
    """

    type: Literal["run-request"] = "run-request"
    schema_version: Literal[2] = 2
    request: Name
    fleet: Name
    settings: Mapping[SettingName, Number] = Field(default_factory=dict, max_length=MOST_SETTINGS)
    others: Mapping[SettingName, Fingerprints] = Field(
        default_factory=dict, max_length=MOST_SETTINGS
    )
    name: RunName | None = None


class SteerRequest(FrozenModel):
    """A request to a server to pause, stop or continue the run in progress.

    Attributes:
        request: id that the sender chose; the reply repeats it.
        fleet: name of the fleet.
        run: id of the run, a prefix of the id, or the run's name; empty for the run in progress.
        wish: ``go`` continues the run, ``pause`` and ``stop`` take effect after the round in
            progress, and ``abandon`` stops immediately, without finishing that round.
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
