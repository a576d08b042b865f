"""The values of the pipeline: what an update must be, what arrived, and how far it went."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from broker_server.store import TaskRecord
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
        """Whether the update goes into a secure sum, so that nobody can read its values."""
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
