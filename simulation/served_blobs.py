"""Counts the bytes that a server of the simulated fleet would send."""

from collections.abc import Iterable, Mapping
from pathlib import Path


class ServedBlobs:
    """The blobs that devices may fetch, each of which counts once."""

    def __init__(self) -> None:
        self._served: set[str] = set()
        self._bytes = 0

    def serve(self, files: Mapping[str, Path]) -> None:
        """Count the bytes of blobs that are not served yet, by digest."""
        for digest, path in files.items():
            if digest not in self._served:
                self._served.add(digest)
                self._bytes += path.stat().st_size

    def withdraw(self, digests: Iterable[str]) -> None:
        """Forget blobs, which count again when they are served again."""
        self._served.difference_update(digests)

    def reset(self) -> int:
        """Return the bytes since the last call."""
        count = self._bytes
        self._bytes = 0
        return count
