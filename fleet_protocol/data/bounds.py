"""The most that readers take from files, so that a small file cannot fill the memory."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from fleet_protocol.errors import DataError
from fleet_protocol.free_memory import free_bytes
from fleet_protocol.frozen import FrozenModel

MOST_PIXELS = 178_956_970
"""Pixels beyond which Pillow opens no image."""

LONGEST_LINE = 16 * 2**20
"""Greatest number of characters in one line of a table."""


class ReadBounds(FrozenModel):
    """The most that a reader takes.

    Attributes:
        pixels: maximum number of pixels in one image, before it is resized to ``size``.
        samples: maximum number of samples in the whole source, and of lines in a table.
        columns: maximum number of columns in a table.
        bytes: maximum size in bytes of the unpacked samples in memory; by default, the memory that
            is free when the samples are read. A large ``.npy`` file stays on disk.
    """

    pixels: int = Field(default=50_000_000, ge=1, le=MOST_PIXELS)
    samples: int = Field(default=100_000_000, ge=1)
    columns: int = Field(default=100_000, ge=1)
    bytes: int | None = Field(default=None, ge=1)

    def check(
        self,
        path: Path | str,
        bound: Literal["pixels", "samples", "columns"],
        count: int,
    ) -> None:
        """Check a number of things in a file.

        Raises:
            DataError: there are more than the bound; the message names the file and the setting.
        """
        most = getattr(self, bound)
        if count > most:
            raise DataError(
                f"{path} has {count:,} {bound} or more, and the limit is {most:,}: if the file is "
                f"not damaged, set a larger bounds.{bound} in [data]"
            )

    def most_bytes(self) -> int:
        """Return how many bytes of samples are allowed now."""
        # A system that does not report its free memory sets no bound.
        return self.bytes or free_bytes() or 2**63

    def check_bytes(self, path: Path | str, count: int) -> None:
        """Check how many bytes the samples of a file take in memory.

        Raises:
            DataError: they are more than the bound, or than the free memory.
        """
        most = self.most_bytes()
        if count > most:
            kind = "free now" if self.bytes is None else "allowed"
            raise DataError(
                f"{path} takes {count:,} bytes of memory or more, and {most:,} are {kind}: if the "
                "file is not damaged, set a larger bounds.bytes in [data], or save fewer samples"
            )
