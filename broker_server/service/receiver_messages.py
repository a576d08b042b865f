"""What a server and its receivers write into the pipes between them: a line of JSON each."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from broker_server.settings.broker import BrokerConfig
from broker_server.store import TaskRecord
from broker_server.updates.values import Distance
from fleet_protocol.errors import RefusalReason
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import BlobRef, Instructions, Ranges


class ReceiverSettings(FrozenModel):
    """The first line for a receiver.

    Attributes:
        fleet: name of the fleet.
        store: folder of the server's store; the same path on every host.
        broker: where chunks arrive.
    """

    fleet: str
    store: Path
    broker: BrokerConfig


class AssignedTask(FrozenModel):
    """A task whose update a receiver shall take.

    `instructions` is the index of its instructions in its `AssignedTasks`: most tasks share theirs.
    """

    record: TaskRecord
    instructions: int


class AssignedTasks(FrozenModel):
    """All tasks of a receiver from now on, in place of those before.

    Attributes:
        tasks: the tasks.
        instructions: those of all tasks, each once.
        manifests: of every tier that the tasks may have, by id.
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
        update: digest, size and cut of the update.
    """

    kind: Literal["announced"] = "announced"
    task: str
    tier: str
    update: BlobRef


Order = Annotated[AssignedTasks | AnnouncedUpdate, Field(discriminator="kind")]
# Both ends are of one version: a receiver runs the code of its server.
ORDERS: TypeAdapter[Order] = TypeAdapter(Order)


class UploadOutcome(FrozenModel):
    """What became of an announced update, or of a chunk.

    Attributes:
        kind: ``stored``: the update is on the disk; ``missing``: chunks of it did not come;
            ``damaged``: the whole has another digest; ``refused``: it is not what was asked for;
            ``counted``: no update, but a chunk that is refused.
        task: id of the task; None for a chunk without one.
        update: digest that was announced.
        merged: digest of what is to be merged, of a stored update.
        distance: of a stored update to what its device was sent.
        ranges: of the missing chunks.
        reason: of a refusal.
        detail: of a refusal, or of the damage.
    """

    kind: Literal["stored", "missing", "damaged", "refused", "counted"]
    task: str | None
    update: str = ""
    merged: str = ""
    distance: Distance | None = None
    ranges: Ranges = ()
    reason: RefusalReason = RefusalReason.FAILED
    detail: str = ""


class Report(FrozenModel):
    """A line of a receiver: at least one comes every second.

    Attributes:
        outcomes: since the last report, in order.
        active_tasks: ids of the tasks of which chunks came since the last report.
        sent: bytes sent on the receiver's connection so far.
        received: bytes received there so far.
        cpu_seconds: processor time so far.
        failed: why the receiver ends, if it cannot write to the disk; else empty.
    """

    outcomes: tuple[UploadOutcome, ...] = ()
    active_tasks: tuple[str, ...] = ()
    # Counts since the start: the last report that came has them all.
    sent: int = 0
    received: int = 0
    cpu_seconds: float = 0.0
    failed: str = ""
