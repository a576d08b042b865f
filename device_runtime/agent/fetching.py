"""Blobs on their way to the device: asked for by digest, verified chunk by chunk, asked for again where they miss."""

import contextlib
from collections.abc import Callable, Collection, Iterable

from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import PartFile, decode_chunk
from fleet_protocol.digests import file_matches
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.messages import BlobRef, Ranges

_TRIES = 3  # whole blobs whose content does not match their digest before the task is refused
_RANGES_PER_REQUEST = 512  # bounds the message; what is left out is asked for next time


class Fetch:
    """The blobs that one task still waits for.

    Args:
        blobs: where they go; chunks that arrived before a restart are there already.
        subscribe: called with a digest before its first request.
        unsubscribe: called with a digest when it is complete, or no longer wanted.
        request: called with a digest and the missing ranges.
        repair_seconds: silence after which missing chunks are asked for again.
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
        self._parts: dict[str, PartFile] = {}
        self._tries: dict[str, int] = {}
        self.repair_at = float("inf")
        self.received_bytes = 0

    @property
    def complete(self) -> bool:
        """Nothing is missing."""
        return not self._parts

    def waits_for(self, digest: str) -> bool:
        """Whether a blob is still missing."""
        return digest in self._parts

    def want(self, refs: Iterable[BlobRef], now: float, asked: Collection[str] = ()) -> None:
        """Ask for the blobs that are not on disk, intact; `now` is ``time.monotonic()``, here and below.

        Those `asked` for are under way already: subscribed to, and named by the accept. A disk that is full is a
        StorageError.
        """
        missing = [ref for ref in refs if ref.digest not in self._parts and not self._intact(ref.digest)]
        for ref in missing:
            part = self._blobs.part(ref)
            self._parts[ref.digest] = part
            if part.complete:  # a crash came between the last chunk and the move
                self._finish(ref.digest)
        for ref in missing:
            if ref.digest in self._parts and ref.digest not in asked:
                self._subscribe(ref.digest)
                self._ask(ref.digest)
        self.repair_at = now + self._repair_seconds

    def _intact(self, digest: str) -> bool:
        path = self._blobs.path(digest)
        if not path.is_file():
            return False
        if file_matches(path, digest):  # read piece by piece: the base of a model may be larger than the memory
            return True
        self._blobs.remove(digest)  # damaged on disk
        return False

    def _ask(self, digest: str) -> None:
        self._request(digest, self._parts[digest].missing()[:_RANGES_PER_REQUEST])

    def on_chunk(self, digest: str, frame: bytes, now: float) -> str | None:
        """Take a chunk of a blob as it came; the digest if the blob is complete now.

        Raises:
            RefusedError: the blob arrived whole several times and never matched its digest.
            StorageError: the disk is full or cannot be written.
        """
        part = self._parts.get(digest)
        if part is None:
            return None  # late, for a blob we have: the broker had it queued
        try:
            new = part.add(decode_chunk(frame))
        except BlobError:
            return None  # not kept, so the next repair asks for it
        self.repair_at = now + self._repair_seconds
        if not new:
            return None
        self.received_bytes += len(frame)
        return digest if part.complete and self._finish(digest) else None

    def _finish(self, digest: str) -> bool:
        """Move a complete part to its place; a part whose digest is wrong starts again."""
        part = self._parts.pop(digest)
        try:
            self._blobs.place(part.finish(), digest)
        except BlobError as error:
            self._tries[digest] = self._tries.get(digest, 0) + 1
            if self._tries[digest] >= _TRIES:
                raise RefusedError(
                    RefusalReason.BAD_DIGEST, f"blob {digest[:12]} arrived {_TRIES} times with another content: {error}"
                ) from error
            self._parts[digest] = self._blobs.part(part.ref)
            self._ask(digest)
            return False
        self._unsubscribe(digest)
        return True

    def repair(self, now: float) -> int:
        """Ask again for everything that is missing, and return how many blobs that are."""
        for digest in self._parts:
            self._ask(digest)
        self.repair_at = now + self._repair_seconds
        return len(self._parts)

    def close(self) -> None:
        """Stop waiting; chunks that arrived stay on disk."""
        for digest, part in self._parts.items():
            # On a full disk each of a part's two files may fail once to write out what it still holds.
            for _ in range(2):
                with contextlib.suppress(OSError):
                    part.close()
            self._unsubscribe(digest)
        self._parts.clear()
