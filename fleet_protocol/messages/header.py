"""What every message carries, and what those about a task carry besides."""

from typing import Literal

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages.bounds import Count, Positive
from fleet_protocol.messages.values import Name

SCHEMA_VERSION = 5  # 5: a device says what it is apart from what it does


class Message(FrozenModel):
    """What every message carries.

    Attributes:
        schema_version: version of the message formats.
        fleet: name of the fleet.
        seq: counts the sender's messages, for the log.
    """

    schema_version: Literal[5] = 5
    fleet: Name
    seq: Count = 0


class TaskMessage(Message):
    """What every message about a task carries.

    Attributes:
        run: id of the run.
        round: number of the round, from 1.
        task: id of the task.
    """

    run: Name
    round: Positive
    task: Name


class DeviceTaskMessage(TaskMessage):
    """What every message of a device about a task carries.

    Attributes:
        device: id of the device.
    """

    device: Name
