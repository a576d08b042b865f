"""Names of blobs by their content, in two forms, so that blobs of earlier versions keep theirs.

New blobs are named by BLAKE3 (O'Connor, Aumasson, Neves and Wilcox-O'Hearn 2020), written as a
multihash: ``1e20``, for BLAKE3 with 32 bytes, and 64 hexadecimal digits. Just 64 digits are a
sha256: files of artifact sets, which keep their names from export to export, and blobs of stores
from before.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from blake3 import blake3

DIGEST_PATTERN = r"^(1e20)?[0-9a-f]{64}$"

_BLAKE3 = "1e20"
_READ_BYTES = 1024 * 1024


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


def _pieces_of(file: BinaryIO) -> Iterator[bytes]:
    # The sentinel ends the iteration at the end of the file.
    return iter(lambda: file.read(_READ_BYTES), b"")


def _is_blake3(digest: str) -> bool:
    return len(digest) == len(_BLAKE3) + 64  # a sha256 may begin with the same digits


def blob_digest(*parts: bytes | memoryview) -> str:
    """Return the name of a new blob, given in parts."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return _BLAKE3 + hasher.hexdigest()


def chunk_digest(payload: bytes | memoryview) -> bytes:
    """Return the digest that is sent with a chunk: 32 bytes of BLAKE3."""
    return blake3(payload).digest()


def matches(data: bytes | memoryview, digest: str) -> bool:
    """Return whether a digest of either form names some bytes."""
    return name_among(data, (digest,)) is not None


def name_among(data: bytes | memoryview, digests: Iterable[str]) -> str | None:
    """Return the digest that names some bytes, of several; None if none does.

    The bytes are hashed once for each form of the digests.
    """
    # One digest is usual; a blob with several names is hashed once for each form.
    candidates = set(digests)
    # Hashing is the cost, so a form that no candidate has is skipped.
    if any(map(_is_blake3, candidates)):
        name = blob_digest(data)
        if name in candidates:
            return name
    if not all(map(_is_blake3, candidates)):
        name = hashlib.sha256(data).hexdigest()
        if name in candidates:
            return name
    return None


def file_matches(path: Path, digest: str) -> bool:
    """Return whether a digest of either form names a file, which is read in pieces.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return pieces_match(_pieces_of(file), digest)


def file_digest(path: Path) -> str:
    """Return the name of a file's content as a new blob; the file is read in pieces.

    Raises:
        OSError: it cannot be read.
    """
    hasher = blake3()
    with path.open("rb") as file:
        for piece in _pieces_of(file):
            hasher.update(piece)
    return _BLAKE3 + hasher.hexdigest()


def pieces_match(pieces: Iterable[bytes], digest: str) -> bool:
    """Return whether a digest of either form names some bytes, which arrive in pieces."""
    is_new = _is_blake3(digest)
    hasher: _Hasher = blake3() if is_new else hashlib.sha256()
    for piece in pieces:
        hasher.update(piece)
    return (_BLAKE3 if is_new else "") + hasher.hexdigest() == digest


def blob_path(digest: str) -> Path:
    """Return the path of a blob below the folder of all blobs.

    There is a folder for each two first digits of the digests, of either form.

    Raises:
        ValueError: the text is not a digest, so it is not used in a path.
    """
    if not re.fullmatch(DIGEST_PATTERN, digest):
        raise ValueError(f"{digest!r} is not a digest of a blob")
    # The last 64 digits are the hash in both forms; its first two name the folder.
    return Path(digest[-64:-62], digest)
