"""What the server publishes of a blob, and how often it reads a file to see whether it is still what it was."""

import math
import time
from collections.abc import Iterable

import pytest

from broker_server.service.blob_service import BlobService
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import DEFAULT_CHUNK_BYTES, decode_chunk
from fleet_protocol.digests import matches
from fleet_protocol.messages import NeedChunks
from fleet_protocol.topics import Topics

HEAD = {"fleet": "lab", "run": "r", "round": 1, "task": "t", "device": "attic"}


class Broker:
    """A transport that keeps the payload of each chunk."""

    def __init__(self) -> None:
        self.chunks: dict[int, bytes] = {}

    authentic = False

    def publish_stream(self, messages: Iterable[tuple[str, bytes]], deadline: float) -> int:
        del deadline
        count = 0
        for _, frame in messages:
            chunk = decode_chunk(frame)
            self.chunks[chunk.index] = bytes(chunk.payload)
            count += 1
        return count


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def service(broker) -> BlobService:
    return BlobService(broker, Topics("lab"), DEFAULT_CHUNK_BYTES)


def ask(service, digest, *ranges) -> list[str]:
    service.need(NeedChunks.model_validate({**HEAD, "digest": digest, "ranges": ranges}))
    return service.flush(math.inf)


def test_a_file_that_is_damaged_is_found_when_a_device_asks_again(service, broker, tmp_path):
    blobs = BlobStore(tmp_path)
    data = bytes(range(256)) * 1024
    digest = blobs.put(data)
    blobs.path(digest).write_bytes(bytes(len(data)))
    service.serve({digest: blobs.path(digest)})
    assert ask(service, digest, (0, 3)) == []
    assert not matches(b"".join(broker.chunks[index] for index in range(3)), digest), "the device sees it, too"
    (problem,) = ask(service, digest, (0, 3))
    assert "was changed on disk; it no longer has the digest that was offered" in problem
    assert "attic" in problem


def test_chunks_are_sent_as_asked_and_a_whole_file_again(service, broker, tmp_path):
    blobs = BlobStore(tmp_path)
    data = bytes(range(256)) * 1024
    digest = blobs.put(data)
    service.serve({digest: blobs.path(digest)})
    assert ask(service, digest, (1, 2)) == []
    assert list(broker.chunks) == [1]
    assert service.take_payload_bytes() == DEFAULT_CHUNK_BYTES
    assert ask(service, digest, (0, 3)) == []
    assert matches(b"".join(broker.chunks[index] for index in range(3)), digest)
    assert service.take_payload_bytes() == len(data) - DEFAULT_CHUNK_BYTES, "what was sent before counts once"


@pytest.mark.parametrize(("devices", "seconds"), [(1, 0.005), (1000, 5.2)])
def test_what_is_on_its_way_to_many_is_not_published_again_for_each(service, broker, tmp_path, devices, seconds):
    """A repeated request waits as long as a broker takes to hand the blob to everybody who asked; for one, no time."""
    blobs = BlobStore(tmp_path)
    digest = blobs.put(bytes(range(256)) * 1024)
    service.serve({digest: blobs.path(digest)})

    def ask_as(number: int) -> None:
        service.need(NeedChunks.model_validate({**HEAD, "device": f"d{number}", "digest": digest, "ranges": ((0, 3),)}))

    for number in range(devices):
        service.expect(digest, f"d{number}")
    for number in range(devices):
        ask_as(number)
    now = time.monotonic()
    assert service.flush(now) == []
    assert len(broker.chunks) == 3
    ask_as(0)
    due = service.next_due()
    assert due is not None
    assert due - now == pytest.approx(seconds, abs=0.1)
