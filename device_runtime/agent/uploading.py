"""A finished update on its way to the server, in chunks."""

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

_PATIENCE_SECONDS = 0.5  # between two looks at whether the upload is still wanted while the broker is away


@dataclass(frozen=True)
class Upload:
    """Chunks that are to be sent."""

    update: BlobRef  # the blob
    ranges: Ranges  # half-open ranges of chunk indices
    topic: Callable[[int], str]  # topic of a chunk index
    again: bool = False  # they were sent before, so that each shows now that it is right


def send_chunks(link: Transport, blobs: BlobStore, upload: Upload, *, stopped: Callable[[], bool]) -> int:
    """Send some chunks, a window at a time, waiting out a broker that is away; the number of chunks sent.

    Raises:
        TaskStopped: ``stopped`` said so.
        BlobError: the update is no longer intact on disk.
    """
    count, update = 0, upload.update
    data, digests = blobs.read(update.digest), upload.again and not link.authentic
    for index, frame in iter_chunks(data, update.chunk_bytes, upload.ranges, digests=digests):
        _wait(link, SEND_WINDOW - 1, stopped)
        link.publish(upload.topic(index), frame)
        count += 1
    # Some brokers keep no order between topics: what is announced next should find the chunks there.
    _wait(link, 0, stopped)
    return count


def _wait(link: Transport, unacknowledged: int, stopped: Callable[[], bool]) -> None:
    while not stopped():
        with contextlib.suppress(TransportError):
            link.drain(time.monotonic() + _PATIENCE_SECONDS, unacknowledged)
            return
    raise TaskStopped
