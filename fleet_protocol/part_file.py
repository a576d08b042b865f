"""A file for an arriving blob, which keeps its chunks across restarts."""

import os
from pathlib import Path

from fleet_protocol.blobs import Chunk
from fleet_protocol.digests import file_matches, matches
from fleet_protocol.disk import disk_errors, write_all
from fleet_protocol.errors import BlobError
from fleet_protocol.messages import BlobRef, Ranges

_MARK = b"\x01"  # of a chunk that has been written


class PartFile:
    """An arriving blob, in a file whose folder exists.

    The file contains the bytes at their places and, behind the whole blob, a byte for each chunk,
    which is set after the chunk's bytes were written. So a crash between the two costs one chunk.
    A file for another blob size or chunk size is started again.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, ref: BlobRef, path: Path) -> None:
        self.ref = ref
        self.path = path
        self._have: set[int] = set()
        with disk_errors("open", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            # Unbuffered: if a full disk refuses data, it must not be written again, and fail again,
            # on closing.
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
            size = self._file.seek(0, os.SEEK_END)
            if ref.size < size <= ref.size + ref.chunks:
                marks = os.pread(self._file.fileno(), ref.chunks, ref.size)
                self._have = {index for index, mark in enumerate(marks) if mark == _MARK[0]}
            if not self._have and size > ref.size:
                self._file.truncate(ref.size)  # shorter content is overwritten

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return len(self._have) == self.ref.chunks

    def missing(self) -> Ranges:
        """Return half-open ranges of the chunks that are missing."""
        gaps = []
        expected = 0
        for index in (*sorted(self._have), self.ref.chunks):
            if index > expected:
                gaps.append((expected, index))
            expected = index + 1
        return tuple(gaps)

    def add(self, chunk: Chunk) -> bool:
        """Write a chunk, and return whether it was new.

        Raises:
            BlobError: the chunk belongs to a blob of another size or chunk size.
            StorageError: the disk is full or cannot be written; other chunks stay.
        """
        if (chunk.size, chunk.chunk_bytes) != (self.ref.size, self.ref.chunk_bytes):
            raise BlobError(
                f"a chunk of a blob of {chunk.size} bytes in chunks of {chunk.chunk_bytes} "
                f"arrived for blob {self.ref.digest[:12]} of {self.ref.size} bytes in chunks "
                f"of {self.ref.chunk_bytes}"
            )
        if chunk.index in self._have:
            return False
        # Recorded after it was written, so that a full disk does not lose it.
        self._write(chunk)
        self._have.add(chunk.index)
        return True

    def _write(self, chunk: Chunk) -> None:
        with disk_errors("write", self.path):
            write_all(self._file.fileno(), chunk.payload, chunk.index * chunk.chunk_bytes)
            write_all(self._file.fileno(), _MARK, self.ref.size + chunk.index)

    def finish(self) -> Path:
        """Verify the blob, of any size, and close the file, which then survives a power cut.

        Returns:
            The path, ready to be moved to its place.

        Raises:
            BlobError: chunks are missing, or the blob does not match its digest; then the file is
                deleted, so that the next attempt starts again.
        """
        self._cut_marks()
        with disk_errors("write", self.path):
            os.fsync(self._file.fileno())
            self.close()
            is_intact = file_matches(self.path, self.ref.digest)
        self._require(is_intact)
        return self.path

    def read_verified(self) -> bytes:
        """Verify the blob, close the file, and return its bytes.

        The caller deletes the file. The errors are those of `finish`.
        """
        self._cut_marks()
        with disk_errors("read", self.path):
            self._file.seek(0)
            data = self._file.read()
            self.close()
        self._require(matches(data, self.ref.digest))
        return data

    def _cut_marks(self) -> None:
        if not self.complete:
            raise BlobError(f"blob {self.ref.digest[:12]} still lacks chunks {self.missing()}")
        with disk_errors("write", self.path):
            self._file.truncate(self.ref.size)

    def _require(self, is_intact: bool) -> None:
        if not is_intact:
            self.drop()
            raise BlobError(
                f"the blob does not have the digest {self.ref.digest[:12]}; it was dropped, "
                "fetch it again"
            )

    def close(self) -> None:
        """Close the file; its chunks stay on disk."""
        self._file.close()

    def drop(self) -> None:
        """Close the file and delete it."""
        self.close()
        self.path.unlink(missing_ok=True)
