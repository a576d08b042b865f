"""Fields that every message has, and further ones of messages about a task."""

from typing import Literal

from typing_extensions import Self, override

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages.bounds import Positive
from fleet_protocol.messages.values import Name

SCHEMA_VERSION = 8  # 8: offers may carry the data contract, and refusals have reasons for data


class Message(FrozenModel):
    """The fields that every message has.

    Fields that follow from the topic or the task may be left out, but must not differ.

    Attributes:
        v: version of the message formats.
        type: type of the message.
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
        """Return the message with the fields that it leaves out, taken from its topic or task."""
        missing = {}
        for name, value in known.items():
            if not getattr(self, name, True):
                missing[name] = value
        # A copy takes longer than reading the message.
        return self.model_copy(update=missing) if missing else self


class TaskMessage(Message):
    """The fields that every message about a task has.

    Attributes:
        run: id of the run.
        round: number of the round, counted from 1.
        task: id of the task, which belongs to one run, round and device.
    """

    run: Name = ""
    round: Positive = 0
    task: Name


class DeviceTaskMessage(TaskMessage):
    """The fields that every message from a device about a task has.

    Attributes:
        device: id of the device.
    """

    device: Name = ""
