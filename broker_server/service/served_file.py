"""Reads a file that the server publishes, as it was when its digest was checked."""

import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from fleet_protocol.blobs import Chunk
from fleet_protocol.digests import pieces_match
from fleet_protocol.errors import BlobError
from fleet_protocol.foreign_files import file_state, open_regular

_PIECE_BYTES = 1 << 20


class ServedFile:
    """An open file; its path may meanwhile lead to another file.

    It is read and not mapped: if a mapped file is truncated, the process that maps it ends.

    Args:
        path: path of the file.
        size: bytes that it must have.
        digest: digest that its content must have.
        verified: states of the file that had the digest; the present one is added.

    Raises:
        BlobError: the file cannot be read, is a link, or differs from the offered one.
    """

    def __init__(self, path: Path, size: int, digest: str, verified: set[tuple[int, ...]]) -> None:
        self._path = path
        self._size = size
        try:
            self._file: BinaryIO = open_regular(path)
        except OSError as error:
            raise BlobError(f"cannot read {path}: {error}") from error
        # It stays readable if it is removed while it is published, and is closed with this value.
        weakref.finalize(self, self._file.close)
        self._digest = digest
        self._verified = verified
        self._require_digest()

    def _require_digest(self) -> None:
        """Check the content, unless the file has not changed since the last check."""
        state = file_state(self._file)
        if state in self._verified:
            return
        if not pieces_match(self._pieces(), self._digest) or file_state(self._file) != state:
            raise BlobError(
                f"{self._path} was changed on disk; it no longer has the digest that was offered"
            )
        self._verified.add(state)

    def _pieces(self) -> Iterator[bytes]:
        for start in range(0, self._size, _PIECE_BYTES):
            yield self._read(start, min(_PIECE_BYTES, self._size - start))
        # A file that has grown has more bytes.
        yield self._read(self._size, 1)

    def chunks(self, indices: Collection[int], chunk_bytes: int) -> list[Chunk]:
        """Read some chunks.

        Raises:
            BlobError: the file was changed since its digest was checked, or cannot be read.
        """
        chunks = []
        for index in indices:
            payload = self._read(index * chunk_bytes, chunk_bytes)
            chunks.append(Chunk(index, self._size, chunk_bytes, memoryview(payload)))
        # Afterwards, so that a change during the reading is detected, too. A file that was removed,
        # or linked for a backup, has another state and the same content.
        self._require_digest()
        return chunks

    def _read(self, start: int, count: int) -> bytes:
        try:
            self._file.seek(start)
            return self._file.read(count)
        except OSError as error:
            raise BlobError(f"cannot read {self._path}: {error.strerror}") from error
