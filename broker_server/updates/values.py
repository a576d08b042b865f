"""The values of the intake: what an update must be, and what arrived."""

from dataclasses import dataclass

from broker_server.stages.update import Distance
from broker_server.store import TaskRecord
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Instructions


@dataclass(frozen=True)
class ExpectedUpdate:
    """The required form of a task's update.

    Attributes:
        task: the stored task, with the tier that its device took.
        manifest: manifest of that tier.
        instructions: those in the task's offer.
    """

    task: TaskRecord
    manifest: Manifest
    instructions: Instructions

    @property
    def masked(self) -> bool:
        """Return whether the update goes into a secure sum, so that nobody can read its values."""
        return self.instructions.upload.summing is not None


@dataclass(frozen=True)
class ArrivedUpdate:
    """An update that has passed all checks.

    Attributes:
        data: a safetensors blob of float32 weights (masked integers for a secure sum), in the form
            in which the store keeps it.
        distance: measured while it was checked; None for masked updates and batch norm statistics.
    """

    data: bytes
    distance: Distance | None


@dataclass(frozen=True)
class StoredUpdate:
    """An update that has arrived and is stored among the blobs.

    Attributes:
        digest: digest of the blob that is merged.
        distance: see `ArrivedUpdate`.
    """

    digest: str
    distance: Distance | None
