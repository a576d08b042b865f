"""Fetches blobs in chunks: saves those that arrive and requests missing ones again."""

import contextlib
from collections.abc import Callable, Collection, Iterable

from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import decode_chunk
from fleet_protocol.digests import file_matches
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.messages import BlobRef, Ranges
from fleet_protocol.part_file import PartFile

# The task is refused after a whole blob has arrived so many times with a wrong digest.
_TRIES = 3
_RANGES_PER_REQUEST = 512  # bounds the message; the next request names the chunks that are left out


class BlobFetch:
    """The blobs that one task is still waiting for.

    Args:
        blobs: the blob store; chunks that arrived before a restart are in it already.
        subscribe: called with a digest before its first request.
        unsubscribe: called with a digest when its blob is complete, or no longer needed.
        request: called with a digest and the missing ranges.
        repair_seconds: seconds without a chunk after which missing chunks are requested again.

    Attributes:
        repair_at: ``time.monotonic()`` at which missing chunks are requested again.
        received_bytes: bytes received so far, including the headers of chunks.
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
        """Whether no blob is missing."""
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
        """Request the blobs that are not intact on disk.

        Args:
            refs: the blobs.
            now: ``time.monotonic()``, here and below.
            asked: digests of blobs under way already: subscribed to, and named by the accept
                message.

        Raises:
            StorageError: the disk is full.
        """
        missing = [ref for ref in refs if self._is_missing(ref.digest)]
        for ref in missing:
            blob = self._blobs.part(ref)
            self._incomplete[ref.digest] = blob
            if blob.complete:  # the agent crashed between the last chunk and the move
                self._finish(ref.digest)
        for ref in missing:
            if ref.digest in self._incomplete and ref.digest not in asked:
                self._subscribe(ref.digest)
                self._ask(ref.digest)
        self.repair_at = now + self._repair_seconds

    def receive_chunk(self, digest: str, frame: bytes, now: float) -> bool:
        """Save a chunk of a blob as it arrived; return whether the blob is now complete.

        A chunk is ignored if it is a repetition, damaged, or part of a complete blob.

        Raises:
            RefusedError: the blob arrived whole several times and its digest never matched.
            StorageError: the disk is full or cannot be written.
        """
        blob = self._incomplete.get(digest)
        if blob is None:
            return False  # A late chunk of a complete blob: the broker had it in its queue.
        try:
            is_new = blob.add(decode_chunk(frame))
        except BlobError:
            return False  # not saved, so the next repair requests it
        self.repair_at = now + self._repair_seconds
        if not is_new:
            return False
        self.received_bytes += len(frame)
        return blob.complete and self._finish(digest)

    def repair(self, now: float) -> int:
        """Request everything that is missing again, and return the number of blobs."""
        for digest in self._incomplete:
            self._ask(digest)
        self.repair_at = now + self._repair_seconds
        return len(self._incomplete)

    def close(self) -> None:
        """Stop waiting; chunks that arrived stay on disk."""
        for digest, blob in self._incomplete.items():
            # On a full disk, closing each of the blob's two files may fail once, because it writes
            # buffered data.
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
        """Move a complete blob to its place; start again if its digest is wrong."""
        blob = self._incomplete.pop(digest)
        try:
            self._blobs.place(blob.finish(), digest)
        except BlobError as error:
            self._tries[digest] = self._tries.get(digest, 0) + 1
            if self._tries[digest] >= _TRIES:
                raise RefusedError(
                    RefusalReason.BAD_DIGEST,
                    f"blob {digest[:12]} arrived {_TRIES} times with different content: {error}",
                ) from error
            self._incomplete[digest] = self._blobs.part(blob.ref)
            self._ask(digest)
            return False
        self._unsubscribe(digest)
        return True
