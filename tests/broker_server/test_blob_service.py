"""What the server publishes of a blob, and how often it reads a file to see whether it is still
what it was.
"""

import math
import os
import time
from collections.abc import Iterable

import pytest

from broker_server.service import served_file
from broker_server.service.blob_service import BlobService
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import BARE_OVERHEAD, DEFAULT_CHUNK_BYTES, decode_chunk
from fleet_protocol.digests import blob_digest, matches, pieces_match
from fleet_protocol.errors import TransportError
from fleet_protocol.topics import Topics
from fleet_protocol.transport import SEND_WINDOW


class Broker:
    """A transport that keeps the payload of each chunk."""

    def __init__(self) -> None:
        self.chunks: dict[int, bytes] = {}
        self.digests = 0  # chunks that came with one of their own
        self.bytes = 0
        self.away = False

    authentic = False

    def publish_stream(self, messages: Iterable[tuple[str, bytes]], deadline: float) -> int:
        del deadline
        if self.away:
            raise TransportError("it takes nothing")
        count = 0
        for _, frame in messages:
            chunk = decode_chunk(frame)
            self.chunks[chunk.index] = bytes(chunk.payload)
            self.bytes += len(frame)
            self.digests += frame.startswith(b"SHC2")
            count += 1
        return count


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def service(broker) -> BlobService:
    return BlobService(broker, Topics("lab"), DEFAULT_CHUNK_BYTES)


def ask(service, digest, *ranges) -> list[str]:
    service.request("attic", digest, ranges)
    return service.flush(math.inf)


def test_nothing_of_a_file_that_is_damaged_goes_out(service, broker, tmp_path):
    """It has the size that was offered, and was damaged before it was offered; its first chunk is
    never published.
    """
    blobs = BlobStore(tmp_path)
    data = bytes(range(256)) * 1024
    digest = blobs.put(data)
    blobs.path(digest).write_bytes(bytes(len(data)))
    service.serve({digest: blobs.path(digest)})
    (problem,) = ask(service, digest, (0, 3))
    assert "was changed on disk; it no longer has the digest that was offered" in problem
    assert "attic" in problem
    assert broker.chunks == {}


@pytest.mark.attack(
    "file",
    "A file of a set is replaced after the set was read",
    "the server publishes no part of the new file",
    "2026-11-28",
)
def test_nothing_of_a_file_that_was_replaced_goes_out(service, broker, tmp_path):
    """Also where nobody has asked for it before: what lies there now may be another file of this
    machine.
    """
    blobs = BlobStore(tmp_path)
    digest = blobs.put(bytes(range(256)) * 1024)
    service.serve({digest: blobs.path(digest)})
    blobs.path(digest).unlink()
    (tmp_path / "secret").write_bytes(b"secret" * 1000)
    blobs.path(digest).symlink_to(tmp_path / "secret")
    (problem,) = ask(service, digest, (0, 3))
    assert "it is a link" in problem
    assert broker.chunks == {}


def with_times_of(path, about):
    """Give a file the times of another one; a set of somebody else can say any."""
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def linked_to(secret, path):
    path.symlink_to(secret)


def linked_hard_to(secret, path):
    path.hardlink_to(secret)


def copied_from(secret, path):
    path.write_bytes(secret.read_bytes())
    with_times_of(path, secret.stat())


@pytest.mark.parametrize(
    "offered_before", [True, False], ids=["after it was offered", "before it is offered"]
)
@pytest.mark.parametrize(
    "published_before", [False, True], ids=["never published", "published once"]
)
@pytest.mark.parametrize(
    "replaced", [linked_to, linked_hard_to, copied_from], ids=lambda way: way.__name__
)
def test_a_file_of_the_same_size_and_time_does_not_go_out_instead(
    service, broker, tmp_path, replaced, published_before, offered_before
):
    """Whatever takes the place of a file that had the digest: none of its bytes reaches a
    device.
    """
    blobs = BlobStore(tmp_path)
    data = bytes(range(256)) * 1024
    digest = blobs.put(data)
    path = blobs.path(digest)
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * len(data))
    with_times_of(secret, path.stat())
    if offered_before:
        service.serve({digest: path})
    if offered_before and published_before:
        assert ask(service, digest, (0, 3)) == []
        broker.chunks.clear()
    path.unlink()
    replaced(secret, path)
    service.serve({digest: path})
    for _ in range(2):
        (problem,) = ask(service, digest, (0, 3))
        assert (
            "it is a link" in problem or "it no longer has the digest that was offered" in problem
        )
    assert broker.chunks == {}


@pytest.mark.attack(
    "file",
    "A file of a set is overwritten or truncated while it is published",
    "the server stops publishing the file, and keeps running",
    "2026-11-28",
)
@pytest.mark.parametrize("change", ["other bytes", "fewer bytes", "no bytes", "more bytes"])
def test_a_file_that_is_changed_in_place_on_its_way_goes_no_further(
    service, broker, tmp_path, change
):
    """A file that was truncated ended a server that had mapped it; other bytes were published."""
    data = bytes(range(256)) * 384 * (SEND_WINDOW + 1)
    path = tmp_path / "train.onnx"
    path.write_bytes(data)
    digest = blob_digest(data)
    service.serve({digest: path})
    assert ask(service, digest, (0, 99)) == []
    with path.open("r+b") as file:
        if change == "other bytes":
            file.seek(-100, os.SEEK_END)
            file.write(b"secret" * 10)
        else:
            kept = {"fewer bytes": len(data) - 9, "no bytes": 0, "more bytes": len(data) + 9}
            file.truncate(kept[change])
    (problem,) = service.flush(time.monotonic())
    assert "train.onnx was changed on disk" in problem
    assert sorted(broker.chunks) == list(range(SEND_WINDOW))


def test_a_pipe_in_the_place_of_a_file_holds_up_nobody(service, broker, tmp_path):
    """It is a problem of this blob at once, and not a server that waits for a writer."""
    blobs = BlobStore(tmp_path)
    digest = blobs.put(bytes(range(256)) * 1024)
    service.serve({digest: blobs.path(digest)})
    blobs.path(digest).unlink()
    os.mkfifo(blobs.path(digest))
    (problem,) = ask(service, digest, (0, 3))
    assert "it is not a regular file" in problem
    assert broker.chunks == {}


def test_a_file_is_hashed_once_for_as_long_as_it_stays_the_same(
    service, broker, tmp_path, monkeypatch
):
    """A thousand rounds ask for the same graph; only a file that was written again is hashed
    again.
    """
    hashed = []

    def counting(pieces, digest):
        hashed.append(digest)
        return pieces_match(pieces, digest)

    monkeypatch.setattr(served_file, "pieces_match", counting)
    blobs = BlobStore(tmp_path)
    data = bytes(range(256)) * 1024
    digest = blobs.put(data)
    service.serve({digest: blobs.path(digest)})
    for _ in range(3):
        assert ask(service, digest, (0, 3)) == []
    assert hashed == [digest]
    blobs.path(digest).unlink()
    blobs.path(digest).write_bytes(data)
    assert ask(service, digest, (0, 3)) == []
    assert hashed == [digest, digest]
    assert len(broker.chunks) == 3


def test_a_graph_travels_packed_and_counts_as_it_travels(service, broker, tmp_path):
    """And once more as it is, with digests, where it did not arrive whole."""
    blobs = BlobStore(tmp_path)
    data = b"".join(b"/layers.%d/Conv_output_0" % index for index in range(10_000))
    digest = blobs.put(data)
    service.serve({digest: blobs.path(digest)})
    assert ask(service, digest, (0, 99)) == []
    assert b"".join(broker.chunks.values()) == data
    assert broker.bytes == service.take_payload_bytes() + BARE_OVERHEAD * len(broker.chunks)
    assert broker.bytes < 0.4 * len(data)
    assert ask(service, digest, (0, 99)) == []
    assert broker.digests == len(broker.chunks)
    assert service.take_payload_bytes() == 0


def test_chunks_are_sent_as_asked_and_a_whole_file_again(service, broker, tmp_path):
    blobs = BlobStore(tmp_path)
    data = os.urandom(256 * 1024)
    digest = blobs.put(data)
    service.serve({digest: blobs.path(digest)})
    assert ask(service, digest, (1, 2)) == []
    assert list(broker.chunks) == [1]
    assert broker.digests == 0, "every byte is hashed once: the digest of the blob must do"
    assert service.take_payload_bytes() == DEFAULT_CHUNK_BYTES
    assert ask(service, digest, (0, 3)) == []
    assert matches(b"".join(broker.chunks[index] for index in range(3)), digest)
    assert service.take_payload_bytes() == len(data) - DEFAULT_CHUNK_BYTES, (
        "what was sent before counts once"
    )
    assert broker.digests == 3, "where something was wrong, each chunk shows that it is right"


@pytest.mark.parametrize(("devices", "seconds"), [(1, 0.005), (1000, 5.2)])
def test_what_is_on_its_way_to_many_is_not_published_again_for_each(
    service, broker, tmp_path, devices, seconds
):
    """A repeated request waits as long as a broker takes to hand the blob to everybody who asked;
    for one, no time.
    """
    blobs = BlobStore(tmp_path)
    digest = blobs.put(bytes(range(256)) * 1024)
    service.serve({digest: blobs.path(digest)})

    def ask_as(number: int) -> None:
        service.request(f"d{number}", digest, ((0, 3),))

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


def offered(service, tmp_path, *devices) -> str:
    """A blob of three chunks that some devices were offered."""
    blobs = BlobStore(tmp_path)
    digest = blobs.put(bytes(range(256)) * 1024)
    service.serve({digest: blobs.path(digest)})
    for device in devices:
        service.expect(digest, device)
    return digest


def want(service, digest, *devices, ranges=((0, 3),)) -> None:
    for device in devices:
        service.request(device, digest, ranges)


def test_a_long_blob_goes_out_a_window_at_a_time(service, broker, tmp_path):
    """Between two windows what came in is handled, the acknowledgements among it that the next one
    waits for.
    """
    blobs = BlobStore(tmp_path)
    data = os.urandom(256 * 384 * (2 * SEND_WINDOW + 1))
    digest = blobs.put(data)
    service.serve({digest: blobs.path(digest)})
    assert ask(service, digest, (0, 99)) == []
    assert len(broker.chunks) == SEND_WINDOW
    asked = time.monotonic()
    want(service, digest, "cellar")
    for most in (2 * SEND_WINDOW, 2 * SEND_WINDOW + 1):
        due = service.next_due()
        assert due is not None
        assert due < time.monotonic(), "the rest is due at once"
        assert service.flush(time.monotonic()) == []
        assert len(broker.chunks) == most
    assert matches(b"".join(broker.chunks[index] for index in range(most)), digest)
    assert service.take_payload_bytes() == len(data)
    due = service.next_due()
    assert due is not None
    assert due > asked + 0.1, "who asked meanwhile may still get it from what is on its way"


def test_a_blob_that_is_removed_on_its_way_arrives_whole(service, broker, tmp_path):
    """Its file is opened once: what is removed, or takes its place, changes nothing of what is
    under way.
    """
    blobs = BlobStore(tmp_path)
    data = bytes(range(256)) * 384 * (SEND_WINDOW + 1)
    digest = blobs.put(data)
    service.serve({digest: blobs.path(digest)})
    assert ask(service, digest, (0, 99)) == []
    blobs.remove(digest)
    assert service.flush(time.monotonic()) == []
    assert matches(b"".join(broker.chunks[index] for index in range(SEND_WINDOW + 1)), digest)
    (problem,) = ask(service, digest, (0, 1))
    assert "cannot read" in problem, "afterwards it is not held open"


def test_what_a_broker_does_not_take_is_tried_again_and_then_given_up(service, broker, tmp_path):
    digest = offered(service, tmp_path, "attic")
    want(service, digest, "attic")
    broker.away, now = True, time.monotonic()
    assert service.flush(now) == []
    assert service.flush(now + 9) == []
    (problem,) = service.flush(now + 11)
    assert "attic" in problem
    assert service.next_due() is None, "the devices ask again"
    want(service, digest, "attic")
    broker.away = False
    assert service.flush(now + 12) == []
    assert len(broker.chunks) == 3


def test_a_device_that_has_begun_to_work_wants_nothing_more(service, broker, tmp_path):
    digest = offered(service, tmp_path, "attic", "cellar")
    want(service, digest, "attic", "cellar")
    assert service.flush(time.monotonic()) == []
    broker.chunks.clear()
    want(service, digest, "attic")
    service.note_work("attic")
    assert service.flush(math.inf) == []
    assert not broker.chunks
    want(service, digest, "cellar", ranges=((2, 3),))
    assert service.flush(math.inf) == []
    assert list(broker.chunks) == [2], "what is still missing is sent"


def test_as_long_as_a_blob_arrives_it_is_not_sent_again(service, tmp_path):
    """A broker that is slower than thought still hands it out; a gap between two arrivals ends
    that.
    """
    names = [f"d{number}" for number in range(150)]  # 0.8 seconds as it is thought
    digest = offered(service, tmp_path, *names)
    want(service, digest, *names)
    now = time.monotonic()
    assert service.flush(now) == []
    want(service, digest, "d0")
    thought = service.next_due()
    assert thought is not None
    assert thought - now < 1.0
    service.note_work("d1")
    due = service.next_due()
    assert due is not None
    assert due >= now + 1.0
