"""The task in hand, as the agent's states know it while it lasts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from device_runtime.agent.task_store import StoredTask
from fleet_protocol.manifest import BASE, FileSpec, Manifest
from fleet_protocol.messages import BlobRef, Offer

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
    # its part in the secure sum that the update goes into, if it goes into one
    member: "Member | None" = None

    @property
    def offer(self) -> Offer:
        """What the server wants."""
        return self.record.offer

    @property
    def announced_tier(self) -> str:
        """The tier as messages name it: nothing where it is the first that was offered."""
        return "" if self.record.tier == self.offer.choices[0].tier else self.record.tier

    def blobs_in_use(self) -> set[str]:
        """Return the digests that must stay on disk while the task lasts."""
        choice = self.record.choice
        digests = {choice.artifact_set.digest, choice.weights.digest}
        if self.manifest is not None:
            digests.update(spec.digest for spec in self.files(self.manifest.graphs))
        if self.record.update is not None:
            digests.add(self.record.update.digest)
        return digests

    def files(self, graphs: Collection[str]) -> list[FileSpec]:
        """Return the files that some graphs of the set need: themselves and its frozen tensors."""
        if self.manifest is None:
            raise RuntimeError(
                "the files of a task are asked for before its manifest is there; this is a bug"
            )
        return graph_files(self.manifest, graphs)


def graph_files(manifest: Manifest, graphs: Collection[str]) -> list[FileSpec]:
    """Return the files of some graphs of a set, and of the frozen tensors that they take."""
    files: list[FileSpec] = [manifest.graphs[key] for key in graphs]
    if manifest.base:
        files.append(manifest.files[BASE])
    return files


def blob_refs(files: Sequence[FileSpec], chunk_bytes: int) -> list[BlobRef]:
    """Return what files of a set are as blobs that travel in chunks of so many bytes."""
    return [
        BlobRef(
            digest=file.digest,
            size=file.size,
            chunk_bytes=chunk_bytes,
        )
        for file in files
    ]
