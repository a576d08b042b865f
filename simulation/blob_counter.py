"""Counts the bytes of the blobs that a server would send to simulated devices."""

from collections.abc import Iterable, Mapping
from pathlib import Path


class BlobCounter:
    """Counts the bytes that a server would send, each blob once."""

    def __init__(self) -> None:
        self._served: set[str] = set()
        self._bytes = 0

    def serve(self, files: Mapping[str, Path]) -> None:
        """Count files by digest; each counts once while it is offered."""
        for digest, path in files.items():
            if digest not in self._served:
                self._served.add(digest)
                self._bytes += path.stat().st_size

    def withdraw(self, digests: Iterable[str]) -> None:
        """Withdraw blobs; they count again when they are offered again."""
        self._served.difference_update(digests)

    def reset(self) -> int:
        """Return the bytes since the last call."""
        count = self._bytes
        self._bytes = 0
        return count
