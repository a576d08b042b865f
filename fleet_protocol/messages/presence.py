"""Retained messages about who is online."""

from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.messages.bounds import Word
from fleet_protocol.messages.header import Message
from fleet_protocol.messages.values import Name, Profile

ALIVE_SECONDS = 4.0  # a working device that has sent nothing for so long sends its status again


class DeviceProfile(Message):
    """The retained description of a device, published again only when it has changed.

    Attributes:
        device: id of the device.
        profile: profile of the board.
    """

    type: Literal["profile"] = "profile"
    device: Name = ""
    profile: Profile


class DeviceStatus(Message):
    """Retained status of a device; its last will is this message with ``online`` set to false.

    Attributes:
        device: id of the device.
        online: whether the device is connected now.
        state: current state of the agent's state machine.
    """

    type: Literal["status"] = "status"
    device: Name = ""
    online: bool
    state: Word


Presence = Annotated[DeviceProfile | DeviceStatus, Field(discriminator="type")]


class ServerStatus(Message):
    """Retained status of the server.

    Attributes:
        online: whether the server is connected now.
        run: id of the run in progress, if any.
        store: number and location of the server's store, by which two servers of a fleet can detect
            each other.
    """

    type: Literal["server"] = "server"
    online: bool
    run: Word | None = None
    store: Word = ""
