"""Measure cutting, encoding, hashing, storing and announcing five tiers, beside memcpy.

As in the server, all tiers are stored before they are announced. They are not synced to the disk,
because a server cuts them again after a power failure. The first row is a multiple of memcpy of the
same bytes, in processor time. The second row is the time by the clock.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from benchmarks.merge import conv_layout, plans_of
from benchmarks.row import Row
from broker_server.service.blob_service import BlobService
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import DEFAULT_CHUNK_BYTES
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.topics import Topics
from fleet_protocol.weights import weights_parts

WIDTHS = (1.0, 0.5, 0.25, 0.125, 0.0625)
BUDGET = 8.0
REPEATS = 5


class _Sink:
    """A transport that counts payloads and sends nothing."""

    taken = 0
    authentic = False

    def publish_stream(
        self,
        messages: Iterable[tuple[str, bytes]],
        deadline: float,
    ) -> int:
        """Count the bytes of payloads, and return how many they are."""
        del deadline
        sizes = [len(payload) for _, payload in messages]
        self.taken += sum(sizes)
        return len(sizes)


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _measure(folder: Path) -> tuple[list[float], list[float], int]:
    """Cut and announce the tiers several times.

    Returns:
        Processor time of each repeat as a multiple of memcpy, its seconds by the clock, and the
        bytes of all tiers.
    """
    layout = conv_layout()
    rng = np.random.default_rng(0)
    blobs = BlobStore(folder)
    weights = {}
    for parameter in layout.parameters:
        weights[parameter.name] = rng.standard_normal(parameter.shape, np.float32)
    version = blobs.put(*weights_parts(weights))
    model = open_tensors(blobs.path(version))
    plans = plans_of(layout, "static", WIDTHS)
    link = _Sink()
    service = BlobService(link, Topics("bench"), DEFAULT_CHUNK_BYTES)  # type: ignore[arg-type]

    def announce(number: int) -> None:
        link.taken = 0
        digests = []
        for plan in plans:
            # With a number in it no slice is a blob already: that of the whole model would be the
            # version itself.
            slice_parts = weights_parts(plan.slice(model), {"number": str(number)})
            digests.append(blobs.put(*slice_parts, durable=False))
        for digest in digests:
            service.serve({digest: blobs.path(digest)})
            service.request("d", digest)
            while service.next_due() is not None:
                problems = service.flush(math.inf)
                if problems:
                    raise RuntimeError(problems[0])
            service.withdraw([digest])
        announced.extend(digests)

    ratios = []
    seconds = []
    announced = list[str]()
    for number in range(REPEATS):
        began = time.monotonic()
        ours = _cpu(lambda number=number: announce(number))  # type: ignore[misc]
        seconds.append(time.monotonic() - began)
        for digest in announced:
            blobs.remove(digest)
        source = np.ones(link.taken, np.uint8)
        target = np.zeros_like(source)
        bare = min(_cpu(lambda: np.copyto(target, source)) for _ in range(5))  # noqa: B023
        ratios.append(ours / bare)
    return ratios, seconds, link.taken


def rows() -> list[Row]:
    """Measure."""
    with tempfile.TemporaryDirectory() as folder:
        ratios, seconds, size = _measure(Path(folder))
    name = f"cut, encode, hash, store and announce five tiers, {size / 1e6:.0f} MB"
    return [
        Row.from_values(name, ratios, "x memcpy, CPU", BUDGET),
        Row.from_values(f"{name}: by the clock", seconds, "seconds"),
    ]
