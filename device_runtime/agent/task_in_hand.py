"""The task in hand, as the agent's states know it while it lasts."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from device_runtime.agent.task_store import StoredTask
from fleet_protocol.manifest import BASE, FileSpec, Manifest
from fleet_protocol.messages import Offer

if TYPE_CHECKING:
    from fleet_protocol.secure_sum import Member


@dataclass
class TaskInHand:
    """One task, from its offer to its end."""

    record: StoredTask  # what is, or will be, on disk about it
    deadline: float  # `time.monotonic()` when its round closes
    started: float  # `time.monotonic()` of the offer, or of the restart
    resumed: bool = False  # it was found on disk
    manifest: Manifest | None = None  # of the artifact set taken, once fetched
    fetch_seconds: float = 0.0  # from the offer to the blobs on disk
    member: "Member | None" = (
        None  # its part in the secure sum that the update goes into, if it goes into one
    )

    @property
    def offer(self) -> Offer:
        """What the server wants."""
        return self.record.offer

    @property
    def tier_said(self) -> str:
        """The tier as messages say it: nothing where it is the first that was offered."""
        return "" if self.record.tier == self.offer.choices[0].tier else self.record.tier

    def blobs_in_use(self) -> set[str]:
        """Digests that must stay on disk while the task lasts."""
        choice = self.record.choice
        update = self.record.update
        files = (
            {spec.digest for spec in self.files(self.manifest.graphs)} if self.manifest else set()
        )
        return {
            choice.artifact_set.digest,
            choice.weights.digest,
            *files,
            *([update.digest] if update else []),
        }

    def files(self, graphs: Collection[str]) -> list[FileSpec]:
        """The files of the set that some of its graphs need: themselves, and the frozen tensors
        that they take.
        """
        if self.manifest is None:
            raise RuntimeError(
                "the files of a task are asked for before its manifest is there; this is a bug"
            )
        base = [self.manifest.files[BASE]] if self.manifest.base else []
        return [*(self.manifest.graphs[key] for key in graphs), *base]
