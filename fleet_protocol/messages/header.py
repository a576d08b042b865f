"""What every message carries, and what those about a task carry besides."""

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
        """The message as it travels; what it would be read as if it were not said is left out."""
        said = self.model_dump_json(exclude_defaults=True)
        return f'{{"v":{SCHEMA_VERSION},"type":"{self.type}",{said[1:]}'.encode()

    def told(self, **known: object) -> Self:
        """The message with what was left out of it, as its topic or its task says."""
        return self.model_copy(
            update={name: value for name, value in known.items() if not getattr(self, name, True)}
        )


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
