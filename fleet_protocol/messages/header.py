"""Fields that every message has, and further ones of messages about a task."""

from typing import Literal

from typing_extensions import Self, override

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages.bounds import Positive
from fleet_protocol.messages.values import Name

SCHEMA_VERSION = 8  # 8: offers may carry the data contract, and refusals have reasons for data


class Message(FrozenModel):
    """What every message carries.

    What its topic or its task says need not be said again, but must not differ.

    Attributes:
        v: version of the message formats.
        type: of the message.
        fleet: name of the fleet.
    """

    v: Literal[8] = 8
    type: str
    fleet: Name = ""

    @override
    def to_bytes(self) -> bytes:
        """Return the message as JSON, without fields that have their defaults."""
        fields = self.model_dump_json(exclude_defaults=True)
        separator = "" if fields == "{}" else ","
        # Version and type have their defaults, too, but readers need them first.
        return f'{{"v":{SCHEMA_VERSION},"type":"{self.type}"{separator}{fields[1:]}'.encode()

    def completed(self, **known: object) -> Self:
        """Return the message with fields that it leaves out, as its topic or task gives them."""
        missing = {}
        for name, value in known.items():
            if not getattr(self, name, True):
                missing[name] = value
        return self.model_copy(update=missing)


class TaskMessage(Message):
    """What every message about a task carries.

    Attributes:
        run: id of the run.
        round: number of the round, from 1.
        task: id of the task, which is of one run, round and device.
    """

    run: Name = ""
    round: Positive = 0
    task: Name


class DeviceTaskMessage(TaskMessage):
    """What every message of a device about a task carries.

    Attributes:
        device: id of the device.
    """

    device: Name = ""
