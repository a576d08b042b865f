"""Fetches blobs chunk by chunk: keeps what arrives, and asks again for what is missing."""

import contextlib
from collections.abc import Callable, Collection, Iterable

from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import decode_chunk
from fleet_protocol.digests import file_matches
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.messages import BlobRef, Ranges
from fleet_protocol.part_file import PartFile

_TRIES = 3  # whole blobs whose content does not match their digest before the task is refused
_RANGES_PER_REQUEST = 512  # bounds the message; what is left out is asked for next time


class BlobFetch:
    """The blobs that one task still waits for.

    Args:
        blobs: where they go; chunks that arrived before a restart are there already.
        subscribe: called with a digest before its first request.
        unsubscribe: called with a digest when it is complete, or no longer wanted.
        request: called with a digest and the missing ranges.
        repair_seconds: silence after which missing chunks are asked for again.

    Attributes:
        repair_at: ``time.monotonic()`` when missing chunks are asked for again.
        received_bytes: so far, headers of chunks included.
    """

    def __init__(
        self,
        blobs: BlobStore,
        *,
        subscribe: Callable[[str], None],
        unsubscribe: Callable[[str], None],
        request: Callable[[str, Ranges], None],
        repair_seconds: float,
    ) -> None:
        self._blobs = blobs
        self._subscribe = subscribe
        self._unsubscribe = unsubscribe
        self._request = request
        self._repair_seconds = repair_seconds
        self._incomplete: dict[str, PartFile] = {}
        self._tries: dict[str, int] = {}
        self.repair_at = float("inf")
        self.received_bytes = 0

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self._incomplete

    @property
    def digests(self) -> Collection[str]:
        """Digests of the blobs that are missing."""
        return self._incomplete.keys()

    def waits_for(self, digest: str) -> bool:
        """Return whether a blob is still missing."""
        return digest in self._incomplete

    def want(
        self,
        refs: Iterable[BlobRef],
        now: float,
        asked: Collection[str] = (),
    ) -> None:
        """Ask for the blobs that are not on disk, intact.

        Args:
            refs: the blobs.
            now: ``time.monotonic()``, here and below.
            asked: digests of those that are under way already: subscribed to, and named by the
                accept.

        Raises:
            StorageError: the disk is full.
        """
        missing = [ref for ref in refs if self._is_missing(ref.digest)]
        for ref in missing:
            blob = self._blobs.part(ref)
            self._incomplete[ref.digest] = blob
            if blob.complete:  # a crash came between the last chunk and the move
                self._finish(ref.digest)
        for ref in missing:
            if ref.digest in self._incomplete and ref.digest not in asked:
                self._subscribe(ref.digest)
                self._ask(ref.digest)
        self.repair_at = now + self._repair_seconds

    def receive_chunk(self, digest: str, frame: bytes, now: float) -> bool:
        """Keep a chunk of a blob as it came; return whether the blob is complete now.

        A chunk that comes twice, is damaged, or belongs to a blob that is here changes nothing.

        Raises:
            RefusedError: the blob arrived whole several times and never matched its digest.
            StorageError: the disk is full or cannot be written.
        """
        blob = self._incomplete.get(digest)
        if blob is None:
            return False  # late, for a blob we have: the broker had it queued
        try:
            is_new = blob.add(decode_chunk(frame))
        except BlobError:
            return False  # not kept, so the next repair asks for it
        self.repair_at = now + self._repair_seconds
        if not is_new:
            return False
        self.received_bytes += len(frame)
        return blob.complete and self._finish(digest)

    def repair(self, now: float) -> int:
        """Ask again for everything that is missing, and return how many blobs that are."""
        for digest in self._incomplete:
            self._ask(digest)
        self.repair_at = now + self._repair_seconds
        return len(self._incomplete)

    def close(self) -> None:
        """Stop waiting; chunks that arrived stay on disk."""
        for digest, blob in self._incomplete.items():
            # On a full disk each of its two files may fail once to write out what it still holds.
            for _ in range(2):
                with contextlib.suppress(OSError):
                    blob.close()
            self._unsubscribe(digest)
        self._incomplete.clear()

    def _is_missing(self, digest: str) -> bool:
        """Return whether a blob is neither on disk nor waited for."""
        return digest not in self._incomplete and not self._is_intact(digest)

    def _is_intact(self, digest: str) -> bool:
        path = self._blobs.path(digest)
        if not path.is_file():
            return False
        # Hashed in blocks: the base of a model may be larger than the memory.
        if file_matches(path, digest):
            return True
        self._blobs.remove(digest)  # damaged on disk
        return False

    def _ask(self, digest: str) -> None:
        self._request(digest, self._incomplete[digest].missing()[:_RANGES_PER_REQUEST])

    def _finish(self, digest: str) -> bool:
        """Move a complete blob to its place; one whose digest is wrong starts again."""
        blob = self._incomplete.pop(digest)
        try:
            self._blobs.place(blob.finish(), digest)
        except BlobError as error:
            self._tries[digest] = self._tries.get(digest, 0) + 1
            if self._tries[digest] >= _TRIES:
                raise RefusedError(
                    RefusalReason.BAD_DIGEST,
                    f"blob {digest[:12]} arrived {_TRIES} times with another content: {error}",
                ) from error
            self._incomplete[digest] = self._blobs.part(blob.ref)
            self._ask(digest)
            return False
        self._unsubscribe(digest)
        return True
