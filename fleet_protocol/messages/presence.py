"""Retained messages that say who is there."""

from typing import Literal

from fleet_protocol.messages.bounds import Word
from fleet_protocol.messages.header import Message
from fleet_protocol.messages.values import Name, Profile


class DeviceStatus(Message):
    """Retained presence of a device; its will is the same message with ``online`` false.

    Attributes:
        device: id of the device.
        online: connected now.
        state: state of the agent's machine.
        profile: what the board is, absent in the will.
    """

    type: Literal["status"] = "status"
    device: Name
    online: bool
    state: Word
    profile: Profile | None = None


class ServerStatus(Message):
    """Retained presence of the server.

    Attributes:
        online: connected now.
        run: the run in progress, if any.
    """

    type: Literal["server"] = "server"
    online: bool
    run: Word | None = None
