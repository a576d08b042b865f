"""Names of blobs: a digest says by its form how it was made, so that what was named before keeps
its name.

New blobs are named by BLAKE3 (O'Connor, Aumasson, Neves and Wilcox-O'Hearn 2020), written as a
multihash: ``1e20``, for BLAKE3 with 32 bytes, and 64 hexadecimal digits. 64 digits alone are a
sha256: files of artifact sets, which keep their names from export to export, and blobs of stores
from before.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from blake3 import blake3

DIGEST_PATTERN = r"^(1e20)?[0-9a-f]{64}$"

_BLAKE3 = "1e20"
_READ_BYTES = 1024 * 1024


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


def _is_blake3(digest: str) -> bool:
    return len(digest) == len(_BLAKE3) + 64  # a sha256 may begin with the same digits


def blob_digest(*parts: bytes | memoryview) -> str:
    """The name of a new blob, given in parts."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return _BLAKE3 + hasher.hexdigest()


def chunk_digest(payload: bytes | memoryview) -> bytes:
    """What a chunk travels with: 32 bytes of BLAKE3."""
    return blake3(payload).digest()


def matches(data: bytes | memoryview, digest: str) -> bool:
    """Whether the bytes of a blob are what a digest of either form names."""
    return name_among(data, (digest,)) is not None


def name_among(data: bytes | memoryview, digests: Iterable[str]) -> str | None:
    """Which of some digests names the bytes; they are hashed once for each form of them."""
    known = set(digests)
    forms = {_is_blake3(digest) for digest in known}
    names = {blob_digest(data) if is_new else hashlib.sha256(data).hexdigest() for is_new in forms}
    return next(iter(names & known), None)


def file_matches(path: Path, digest: str) -> bool:
    """Whether a file, read piece by piece, is what a digest of either form names.

    An OSError where it is unreadable.
    """
    with path.open("rb") as file:
        return pieces_match(iter(lambda: file.read(_READ_BYTES), b""), digest)


def file_digest(path: Path) -> str:
    """Return the name of a file's content as a new blob, read piece by piece.

    Raise an OSError if unreadable.
    """
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            hasher.update(piece)
    return _BLAKE3 + hasher.hexdigest()


def pieces_match(pieces: Iterable[bytes], digest: str) -> bool:
    """Return whether bytes, piece by piece, match a digest of either form."""
    is_new = _is_blake3(digest)
    hasher: _Hasher = blake3() if is_new else hashlib.sha256()
    for piece in pieces:
        hasher.update(piece)
    return (_BLAKE3 if is_new else "") + hasher.hexdigest() == digest


def blob_path(digest: str) -> Path:
    """Where a blob lies below the folder of all: one folder for each two first digits of its
    digest, of either form.

    A ValueError is for what is no digest, so that it becomes no path.
    """
    if not re.fullmatch(DIGEST_PATTERN, digest):
        raise ValueError(f"{digest!r} is no digest of a blob")
    return Path(digest[-64:-62], digest)
