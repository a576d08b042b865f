"""Sends chunks of an update, a window at a time, in the agent's worker thread."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from device_runtime.agent.link_speed import LinkSpeed, TransferTimer
from device_runtime.training.hooks import TaskStopped
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import iter_chunks
from fleet_protocol.errors import TransportError
from fleet_protocol.messages import BlobRef, Ranges
from fleet_protocol.transport import SEND_WINDOW, Transport

# Time between two checks of whether the upload is still wanted, while the broker is unreachable.
_PATIENCE_SECONDS = 0.5


@dataclass(frozen=True)
class Upload:
    """Chunks to send."""

    update: BlobRef  # the blob
    ranges: Ranges  # half-open ranges of chunk indices
    topic: Callable[[int], str]  # topic of a chunk index
    again: bool = False  # whether they were sent before, so that each needs its digest now


@dataclass(frozen=True)
class SentChunks:
    """Result of sending.

    Attributes:
        count: number of chunks.
        speed: speed of the link, from the acknowledgement of the first chunk to that of the last;
            None where that took no time.
    """

    count: int
    speed: LinkSpeed | None


def send_chunks(
    link: Transport,
    blobs: BlobStore,
    upload: Upload,
    *,
    stopped: Callable[[], bool],
) -> SentChunks:
    """Send chunks, waiting while the broker is unreachable.

    Args:
        link: link over which they are sent.
        blobs: blobs that hold the update.
        upload: the chunks to send.
        stopped: called repeatedly; true when the upload is no longer wanted.

    Raises:
        TaskStopped: ``stopped`` returned true.
        BlobError: the update on disk is damaged.
    """
    update = upload.update
    data = blobs.read(update.digest)
    # On an authenticated link each chunk proves its own integrity; on others a repeated chunk needs
    # a digest.
    digests = upload.again and not link.authentic
    timer = TransferTimer(time.monotonic())
    sizes: list[int] = []
    for index, frame in iter_chunks(data, update.chunk_bytes, upload.ranges, digests=digests):
        _wait(link, SEND_WINDOW - 1, stopped)
        if len(sizes) == SEND_WINDOW:
            timer.note(sizes[0], time.monotonic())
        link.publish(upload.topic(index), frame)
        sizes.append(len(frame))
    if not timer.runs and sizes:
        _wait(link, len(sizes) - 1, stopped)
        timer.note(sizes[0], time.monotonic())
    # Some brokers do not keep the order between topics: the chunks should arrive before their
    # announcement.
    _wait(link, 0, stopped)
    if len(sizes) > 1:
        timer.note(sum(sizes[1:]), time.monotonic())
    return SentChunks(len(sizes), timer.speed())


def _wait(link: Transport, unacknowledged: int, stopped: Callable[[], bool]) -> None:
    """Wait until at most a given number of messages is unacknowledged."""
    while not stopped():
        with contextlib.suppress(TransportError):
            link.drain(time.monotonic() + _PATIENCE_SECONDS, unacknowledged)
            return
    raise TaskStopped
