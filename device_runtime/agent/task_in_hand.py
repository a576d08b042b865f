"""The current task, as the agent's states see it."""

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

    record: StoredTask  # the record that is, or will be, on disk
    deadline: float  # `time.monotonic()` at which its round closes
    started: float  # `time.monotonic()` of the offer, or of the restart
    resumed: bool = False  # whether it was found on disk
    manifest: Manifest | None = None  # of the artifact set, once fetched
    fetch_seconds: float = 0.0  # from the offer until the blobs are on disk
    # its part in the secure sum that receives the update; None without one
    member: "Member | None" = None

    @property
    def offer(self) -> Offer:
        """The server's offer."""
        return self.record.offer

    @property
    def announced_tier(self) -> str:
        """The tier as messages name it: None for the first tier that was offered."""
        return "" if self.record.tier == self.offer.choices[0].tier else self.record.tier

    def blobs_in_use(self) -> set[str]:
        """Return the digests of blobs that must stay on disk during the task."""
        choice = self.record.choice
        digests = {choice.artifact_set.digest, choice.weights.digest}
        if self.manifest is not None:
            digests.update(spec.digest for spec in self.files(self.manifest.graphs))
        if self.record.update is not None:
            digests.add(self.record.update.digest)
        return digests

    def files(self, graphs: Collection[str]) -> list[FileSpec]:
        """Return the files that some graphs of the set need: themselves and frozen tensors."""
        if self.manifest is None:
            raise RuntimeError(
                "the files of a task are requested before its manifest is on disk; this is a bug"
            )
        return graph_files(self.manifest, graphs)


def graph_files(manifest: Manifest, graphs: Collection[str]) -> list[FileSpec]:
    """Return the files of some graphs of a set, and of the frozen tensors that they use."""
    files: list[FileSpec] = [manifest.graphs[key] for key in graphs]
    if manifest.base:
        files.append(manifest.files[BASE])
    return files


def blob_refs(files: Sequence[FileSpec], chunk_bytes: int) -> list[BlobRef]:
    """Return files of a set as blobs that travel in chunks of a given size."""
    return [
        BlobRef(
            digest=file.digest,
            size=file.size,
            chunk_bytes=chunk_bytes,
        )
        for file in files
    ]
