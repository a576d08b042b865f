"""The messages in the pipes between a server and its receivers: one line of JSON each."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from broker_server.service.reassembly import UploadOutcome
from broker_server.settings.broker import BrokerConfig
from broker_server.store import TaskRecord
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import BlobRef, Instructions


class ReceiverSettings(FrozenModel):
    """The first line for a receiver.

    Attributes:
        fleet: name of the fleet.
        store: folder of the server's store; the same path on every host.
        broker: at which chunks arrive.
    """

    fleet: str
    store: Path
    broker: BrokerConfig


class AssignedTask(FrozenModel):
    """A task whose update a receiver must receive.

    `instructions` is the index of its instructions in its `AssignedTasks`: most tasks share theirs.
    """

    record: TaskRecord
    instructions: int


class AssignedTasks(FrozenModel):
    """All tasks of a receiver from now on, replacing the previous ones.

    Attributes:
        tasks: the tasks.
        instructions: the instructions of all tasks, without repetition.
        manifests: manifests of every tier that the tasks may take, by id.
    """

    kind: Literal["tasks"] = "tasks"
    tasks: tuple[AssignedTask, ...]
    instructions: tuple[Instructions, ...]
    manifests: dict[str, Manifest]


class AnnouncedUpdate(FrozenModel):
    """An update that its device has announced as complete.

    Attributes:
        task: id of the task.
        tier: the tier that the device has trained.
        update: digest, size and chunk size of the update.
    """

    kind: Literal["announced"] = "announced"
    task: str
    tier: str
    update: BlobRef


Order = Annotated[AssignedTasks | AnnouncedUpdate, Field(discriminator="kind")]
# Both ends have the same version: a receiver runs the code of its server.
ORDERS: TypeAdapter[Order] = TypeAdapter(Order)


class Report(FrozenModel):
    """A line from a receiver: at least one arrives every second.

    Attributes:
        outcomes: since the last report, in order.
        active_tasks: ids of the tasks for which chunks arrived since the last report.
        sent: bytes sent on the receiver's connection so far.
        received: bytes received there so far.
        cpu_seconds: processor time so far.
        failed: why the receiver ends, if it cannot write to the disk; otherwise empty.
    """

    outcomes: tuple[UploadOutcome, ...] = ()
    active_tasks: tuple[str, ...] = ()
    # Totals since the start: the last report that arrived contains them all.
    sent: int = 0
    received: int = 0
    cpu_seconds: float = 0.0
    failed: str = ""
