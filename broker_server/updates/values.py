"""The values of the pipeline: what an update must be, what arrived, and what is folded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from broker_server.store import TaskRecord
from broker_server.strategies.strategy import Contribution
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Instructions

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Expected:
    """What the update of a task must be.

    Attributes:
        task: as the store has it, of the tier that its device took.
        manifest: of that tier.
        instructions: what the task's offer asked of its device.
    """

    task: TaskRecord
    manifest: Manifest
    instructions: Instructions

    @property
    def masked(self) -> bool:
        """Return whether the update goes into a secure sum, so that nobody can read its values."""
        return self.instructions.upload.summing is not None


class Distance(NamedTuple):
    """How far an update is from the weights that its device was sent.

    Attributes:
        norm: Euclidean norm of the difference over all tensors.
        values: how many entries the update has.
    """

    norm: float
    values: int


@dataclass(frozen=True)
class Arrived:
    """An update that has passed all checks.

    Attributes:
        data: a safetensors blob of float32 weights (masked whole numbers for a secure sum), as the
            store keeps it.
        distance: measured while it was checked; None for masked updates and batch norm statistics.
    """

    data: bytes
    distance: Distance | None


@dataclass(frozen=True)
class Stored:
    """An update that has arrived and has its place among the blobs.

    Attributes:
        digest: of the blob that is to be merged.
        distance: as of `Arrived`.
    """

    digest: str
    distance: Distance | None


@dataclass(frozen=True, kw_only=True)
class Update(Contribution):
    """A stored update on its way into the sums; what a method sees of it is a `Contribution`.

    Its weight is `metrics.examples`, and the rows of label axes that it may move are those of
    `metrics.labels`.

    Attributes:
        task: whose answer it is.
        sent: reads the weights that its device was sent, float32 tensors of the same names.
        distance: from what was sent, as the intake measured it; None after a restart of the server
            and for the mean of a secure sum, which are measured when they are folded.
        announced: samples that its device announced before; None if it has not.
    """

    task: TaskRecord
    sent: Callable[[], Tensors]
    distance: Distance | None = None
    announced: int | None = None
