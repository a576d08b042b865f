"""Retained messages that say who is there."""

from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.messages.bounds import Word
from fleet_protocol.messages.header import Message
from fleet_protocol.messages.values import Name, Profile

ALIVE_SECONDS = 4.0  # a device at work that has sent nothing for so long sends its status again


class DeviceProfile(Message):
    """What a device is: retained, and published again only when it has changed.

    Attributes:
        device: id of the device.
        profile: what the board is.
    """

    type: Literal["profile"] = "profile"
    device: Name = ""
    profile: Profile


class DeviceStatus(Message):
    """Retained presence of a device; its will is the same message with ``online`` false.

    Attributes:
        device: id of the device.
        online: connected now.
        state: state of the agent's machine.
    """

    type: Literal["status"] = "status"
    device: Name = ""
    online: bool
    state: Word


Presence = Annotated[DeviceProfile | DeviceStatus, Field(discriminator="type")]


class ServerStatus(Message):
    """Retained presence of the server.

    Attributes:
        online: connected now.
        run: the run in progress, if any.
        store: its number, and where it is, so that two servers of a fleet find each other.
    """

    type: Literal["server"] = "server"
    online: bool
    run: Word | None = None
    store: Word = ""
