"""Sends chunks of an update, a window at a time, in the agent's worker thread."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from device_runtime.training.hooks import TaskStopped
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import iter_chunks
from fleet_protocol.errors import TransportError
from fleet_protocol.messages import BlobRef, Ranges
from fleet_protocol.transport import SEND_WINDOW, Transport

# While the broker is away, time between two looks at whether the upload is still wanted.
_PATIENCE_SECONDS = 0.5


@dataclass(frozen=True)
class Upload:
    """Chunks that are to be sent."""

    update: BlobRef  # the blob
    ranges: Ranges  # half-open ranges of chunk indices
    topic: Callable[[int], str]  # topic of a chunk index
    again: bool = False  # they were sent before, so that each shows now that it is right


def send_chunks(
    link: Transport,
    blobs: BlobStore,
    upload: Upload,
    *,
    stopped: Callable[[], bool],
) -> int:
    """Send chunks, waiting out a broker that is away.

    Args:
        link: what they are sent over.
        blobs: where the update lies.
        upload: which chunks.
        stopped: called again and again; true when nobody wants the upload any more.

    Returns:
        The number of chunks sent.

    Raises:
        TaskStopped: ``stopped`` said so.
        BlobError: the update is no longer intact on disk.
    """
    update = upload.update
    data = blobs.read(update.digest)
    # An authentic link says for each chunk that it is right; others need a digest in a repetition.
    digests = upload.again and not link.authentic
    count = 0
    for index, frame in iter_chunks(data, update.chunk_bytes, upload.ranges, digests=digests):
        _wait(link, SEND_WINDOW - 1, stopped)
        link.publish(upload.topic(index), frame)
        count += 1
    # Some brokers keep no order between topics: what is announced next should find the chunks
    # there.
    _wait(link, 0, stopped)
    return count


def _wait(link: Transport, unacknowledged: int, stopped: Callable[[], bool]) -> None:
    """Wait until at most so many messages are unacknowledged."""
    while not stopped():
        with contextlib.suppress(TransportError):
            link.drain(time.monotonic() + _PATIENCE_SECONDS, unacknowledged)
            return
    raise TaskStopped
