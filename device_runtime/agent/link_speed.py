"""Measures the speed of a board's link in its own transfers.

The speed excludes latency: the first chunk of a transfer starts the clock, and only the bytes after
it count. A transfer of a single chunk counts as a whole, from its request. A short transfer is
inaccurate, so it never replaces a longer one.
"""

from dataclasses import dataclass

TELLING_BYTES = 64 * 1024
"""Bytes of a transfer from which on its speed is accurate."""


_UPLOAD_COUNTS = 3
"""Number of downloads after which an upload is outdated."""
_CHANGED = 2.0
"""Factor by which downloads become faster or slower if the link has changed."""


@dataclass(frozen=True)
class LinkSpeed:
    """The measurement of the link in one transfer."""

    bytes_per_second: float
    measured_bytes: int

    def outweighs(self, before: "LinkSpeed | None") -> bool:
        """Return whether this measurement replaces an earlier one."""
        if before is None:
            return True
        return self.measured_bytes >= min(TELLING_BYTES, before.measured_bytes)


class TransferTimer:
    """Times one transfer, chunk by chunk. Moments are of ``time.monotonic()``.

    Args:
        began: when the transfer was requested.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._first_at: float | None = None
        self._first_bytes = 0
        self._bytes = 0
        self._last_at = began

    @property
    def runs(self) -> bool:
        """Whether the first chunk has arrived."""
        return self._first_at is not None

    def note(self, size: int, now: float) -> None:
        """Record the number of bytes that have arrived."""
        if self._first_at is None:
            self._first_at = now
            self._first_bytes = size
        self._bytes += size
        self._last_at = now

    def speed(self) -> LinkSpeed | None:
        """Return the measured speed; None if the transfer took no time, or nothing arrived."""
        if self._first_at is None:
            return None
        began = self._first_at
        # Without the first chunk, whose time includes the wait for the server.
        size = self._bytes - self._first_bytes
        if not size:
            began = self._began
            size = self._bytes
        seconds = self._last_at - began
        if seconds <= 0:
            return None
        return LinkSpeed(size / seconds, size)


@dataclass
class LinkRecord:
    """A board's measurements of its link.

    Attributes:
        down: speed of the last download that counts.
        up: speed of the last upload that counts; None if none does.
        beside: speed of the download in that upload's round.
        downloads: number of downloads since that upload.
    """

    down: LinkSpeed | None = None
    up: LinkSpeed | None = None
    beside: LinkSpeed | None = None
    downloads: int = 0

    def note_download(self, speed: LinkSpeed | None) -> None:
        """Record a download, unless it is too short."""
        if speed is None or not speed.outweighs(self.down):
            return
        self.down = speed
        self.downloads += 1
        if self.downloads > _UPLOAD_COUNTS or self._has_changed():
            # An old upload says less about the link than a new download.
            self.up = None

    def note_upload(self, speed: LinkSpeed | None) -> None:
        """Record an upload, unless it is too short."""
        if speed is None or not speed.outweighs(self.up or self.down):
            return
        self.up = speed
        self.beside = self.down
        self.downloads = 0

    @property
    def sending_speed(self) -> float | None:
        """Bytes per second at which the board would probably send now; None if unknown.

        A download can be timed before a round, an upload only after it. So the last upload counts
        as long as downloads are about as fast as in its round. Afterwards, the download of this
        round counts.
        """
        newest = self.up or self.down
        return None if newest is None else newest.bytes_per_second

    def _has_changed(self) -> bool:
        """Return whether the speed of downloads differs much from that in the upload's round."""
        if self.beside is None or self.down is None:
            return False
        share = self.down.bytes_per_second / self.beside.bytes_per_second
        # Both ways: a link that became faster also makes the old upload worthless.
        return not 1 / _CHANGED <= share <= _CHANGED
