"""Chunks and stores: what arrives is verified, what is missing is known, what was good stays
good.
"""

import errno
import hashlib
import os
import struct
import subprocess
import tracemalloc
import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.blobs import (
    FRAME_OVERHEAD,
    blob_ref,
    decode_chunk,
    encode_chunk,
    indices_of,
    iter_chunks,
    ranges_of,
)
from fleet_protocol.digests import blob_digest, blob_path, matches
from fleet_protocol.errors import BlobError, StorageError
from fleet_protocol.messages import BlobRef
from fleet_protocol.part_file import PartFile

CHUNK = 1024


def sample(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@given(st.binary(min_size=1, max_size=5000), st.randoms())
def test_any_order_and_duplicates_give_the_blob_back(tmp_path_factory, data, rng):
    """Chunks may come in any order and more than once."""
    ref = blob_ref(data, CHUNK)
    frames = [frame for _, frame in iter_chunks(data, CHUNK, ((0, ref.chunks),))] * 2
    rng.shuffle(frames)
    part = PartFile(ref, tmp_path_factory.mktemp("part") / "p")
    for frame in frames:
        part.add(decode_chunk(frame))
    assert part.finish().read_bytes() == data


@given(st.sets(st.integers(0, 40)))
def test_ranges_and_indices_are_inverse(indices):
    """A missing list survives its compressed form, and ranges never touch each other."""
    ranges = ranges_of(indices)
    assert indices_of(ranges, 41) == indices
    assert all(a[1] < b[0] for a, b in pairwise(ranges))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: f[:30], "shorter than its header"),
        (lambda f: b"XXXX" + f[4:], "not one of Shoal's"),
        (lambda f: f[:-1], "has 1023 bytes instead of 1024"),
        (lambda f: f[:-1] + bytes([f[-1] ^ 1]), "does not match its digest"),
        (lambda f: f[:4] + b"\x00\x00\x00\x09" + f[8:], "instead of"),
    ],
)
def test_damaged_frames_are_refused(damage, says):
    """Truncated, foreign and corrupted frames each have their own words."""
    frame = encode_chunk(sample(3000), 0, CHUNK)
    with pytest.raises(BlobError, match=says):
        decode_chunk(damage(frame))


def test_what_repeats_itself_travels_packed(monkeypatch):
    """Graphs and manifests do, weights do not; where a chunk has its own digest it is as it is."""
    named = b"".join(b"/conv1/weight_%d Reshape" % i for i in range(90))[: 2 * CHUNK]
    for data, packs in ((named, True), (sample(2 * CHUNK), False)):
        for pack, digest in ((True, False), (False, False), (True, True)):
            frame = encode_chunk(data, 1, CHUNK, digest=digest, pack=pack)
            assert (frame[:4] == b"SHC4") == (packs and pack and not digest)
            assert (len(frame) < CHUNK // 2) == (packs and pack and not digest)
            assert decode_chunk(frame).payload == data[CHUNK:]
    monkeypatch.setattr(zlib, "compress", pytest.fail)
    encode_chunk(
        sample(2 * CHUNK), 1, CHUNK, digest=False, pack=True
    )  # that it would not pay is seen without a try


@given(st.binary(max_size=4 * CHUNK), st.integers(0, 2 * CHUNK), st.integers(0, 3))
def test_a_packed_chunk_unpacks_to_what_its_header_says_or_is_refused(data, size, index):
    """Another number of bytes, many more of them, what no packer made, and an end that is cut."""
    deflate = zlib.compressobj(wbits=-15)
    packed = deflate.compress(data) + deflate.flush()
    header = struct.pack(">4sIQI", b"SHC4", index, size, CHUNK)
    expected = min(CHUNK, size - index * CHUNK)
    if len(data) == expected:
        assert decode_chunk(header + packed).payload == data
    else:
        with pytest.raises(BlobError, match=f"chunk {index} "):
            decode_chunk(header + packed)
    for damaged in (packed[:-1], packed + b"x", b"\xff" + packed, header):
        with pytest.raises(BlobError, match="chunk"):
            decode_chunk(header + damaged)


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (CHUNK, "chunk 0 does not unpack to 1024 bytes"),
        (1 << 26, f"a chunk announces a size of {1 << 26} bytes; at most {1 << 24} are accepted"),
    ],
)
def test_a_packed_flood_is_not_unpacked(chunk, words):
    """64 MB of zeros in 64 kB cost no more than the chunk it claims to be, and it cannot claim to
    be as many.
    """
    packed = zlib.compress(bytes(1 << 26), 9)[2:-4]
    tracemalloc.start()
    try:
        with pytest.raises(BlobError, match=words):
            decode_chunk(struct.pack(">4sIQI", b"SHC4", 0, 4 * chunk, chunk) + packed)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_frame_overhead_is_as_documented():
    """The header is what the byte layout says."""
    assert len(encode_chunk(b"x", 0, CHUNK)) == FRAME_OVERHEAD + 1


def test_a_restart_goes_on_where_it_stopped(tmp_path):
    """Chunks written before a crash are not asked for again."""
    data = sample(5 * CHUNK + 1)
    ref = blob_ref(data, CHUNK)
    part = PartFile(ref, tmp_path / "p")
    for index in (0, 3):
        part.add(decode_chunk(encode_chunk(data, index, CHUNK)))
    part.close()
    again = PartFile(ref, tmp_path / "p")
    assert again.missing() == ((1, 3), (4, 6))
    for index in (1, 2, 4, 5):
        again.add(decode_chunk(encode_chunk(data, index, CHUNK)))
    assert again.finish().read_bytes() == data


def test_a_crash_before_the_mark_costs_one_chunk_only(tmp_path):
    """A crash after the bytes of a chunk were written, and before its mark was, leaves a usable
    part.
    """
    data = sample(3 * CHUNK)
    part = PartFile(blob_ref(data, CHUNK), tmp_path / "p")
    part.add(decode_chunk(encode_chunk(data, 1, CHUNK)))
    part.close()
    with (tmp_path / "p").open("r+b") as file:
        file.write(data[:CHUNK])
    again = PartFile(blob_ref(data, CHUNK), tmp_path / "p")
    assert again.missing() == ((0, 1), (2, 3))
    for index in (0, 2):
        again.add(decode_chunk(encode_chunk(data, index, CHUNK)))
    assert again.finish().read_bytes() == data


def test_chunks_of_another_blob_do_not_enter(tmp_path):
    """A blob of another size cannot write into this one."""
    part = PartFile(blob_ref(sample(3000), CHUNK), tmp_path / "p")
    with pytest.raises(BlobError, match="arrived for blob"):
        part.add(decode_chunk(encode_chunk(sample(4000), 0, CHUNK)))
    part.close()


def test_a_wrong_whole_is_dropped_and_can_be_fetched_again(tmp_path):
    """Chunks that verify one by one but make up another blob are thrown away as a whole."""
    right = sample(3000, 1)
    wrong = sample(3000, 2)
    store = BlobStore(tmp_path)
    part = store.part(blob_ref(right, CHUNK))
    for index in range(3):
        part.add(decode_chunk(encode_chunk(wrong, index, CHUNK)))
    with pytest.raises(BlobError, match="fetch it again"):
        store.place(part.finish(), part.ref.digest)
    part = store.part(blob_ref(right, CHUNK))
    assert part.missing() == ((0, 3),)
    for index in range(3):
        part.add(decode_chunk(encode_chunk(right, index, CHUNK)))
    assert store.place(part.finish(), part.ref.digest).read_bytes() == right


def test_store_finds_damage_and_never_serves_it(tmp_path):
    """A blob that rotted on disk is an error that says to fetch it again, and is removed."""
    store = BlobStore(tmp_path)
    digest = store.put(b"weights")
    store.path(digest).write_bytes(b"weightz")
    with pytest.raises(BlobError, match="damaged"):
        store.read(digest)
    assert not store.has(digest)


def test_store_takes_no_path_for_a_digest(tmp_path):
    """A digest from the wire cannot lead out of the store."""
    with pytest.raises(BlobError, match="not a digest of a blob"):
        BlobStore(tmp_path).read("../../etc/passwd")


def test_failed_write_leaves_the_old_file(tmp_path):
    """When the new content cannot be written, the old stays and no temporary file is left."""
    target = tmp_path / "f"
    target.write_bytes(b"old")
    with pytest.raises(StorageError, match="cannot write"):
        write_atomically(target / "below-a-file", b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("problem", [None, OSError(errno.EOPNOTSUPP, "not on this file system")])
def test_the_blocks_of_a_large_file_are_asked_for_at_once(tmp_path, monkeypatch, problem):
    """What is kept is what was given, also where a file system cannot allocate before it is written
    to.
    """
    asked = []

    def allocate(descriptor: int, start: int, size: int) -> None:
        asked.append((os.fstat(descriptor).st_size, start, size))
        if problem is not None:
            raise problem

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    store = BlobStore(tmp_path)
    data = sample(1 << 20)
    assert store.read(store.put(data[:1000])) == data[:1000]
    assert asked == [], "of a small one it costs what it saves"
    assert store.read(store.put(data[:9], data[9:])) == data
    assert asked == [(0, 0, 1 << 20)]


def test_a_store_that_need_not_survive_a_power_cut_does_not_wait_for_the_disk(
    tmp_path, monkeypatch
):
    waited = []
    monkeypatch.setattr(os, "fsync", waited.append)
    for durable in (False, True):
        store = BlobStore(tmp_path / str(durable), durable=durable)
        store.put(b"x", durable=False)
        assert not waited
        store.keep(blob_digest(b"y"), b"y")
        store.sync([blob_digest(b"y")])
        assert len(waited) == durable
        store.put(b"x")  # which is here already, but for as long as there is power
        assert len(waited) == 2 * durable


def test_what_a_power_cut_left_is_written_again(tmp_path):
    """By whoever needs it to stay: its name alone says nothing of what is in it."""
    store = BlobStore(tmp_path)
    digest = store.put(b"sent", durable=False)
    store.path(digest).write_bytes(bytes(4))
    assert store.read(store.put(b"sent")) == b"sent"


def test_a_full_disk_is_a_storage_error_and_what_was_there_stays(tmp_path):
    """A chunk that does not fit is refused in words, closing works, and the chunks before it are
    still known.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        data = sample(40 * CHUNK)
        part = PartFile(blob_ref(data, CHUNK), disk / "p")
        part.add(decode_chunk(encode_chunk(data, 0, CHUNK)))
        frames = iter_chunks(data, CHUNK, ((1, 40),))
        with pytest.raises(StorageError, match="the disk is full"):
            any(not part.add(decode_chunk(frame)) for _, frame in frames)
        part.close()
        again = PartFile(blob_ref(data, CHUNK), disk / "p")
        assert again.missing()[0][0] >= 1
        again.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_blobs_named_before_keep_their_names(tmp_path):
    """A blob that an earlier store named by its sha256 is read, checked, and found again under that
    name.
    """
    store = BlobStore(tmp_path)
    data = sample(3000)
    old = hashlib.sha256(data).hexdigest()
    part = store.part(BlobRef(digest=old, size=len(data), chunk_bytes=CHUNK))
    for index in range(3):
        part.add(decode_chunk(encode_chunk(data, index, CHUNK)))
    assert store.place(part.finish(), part.ref.digest) == tmp_path / "objects" / old[:2] / old
    assert store.read(old) == data
    store.path(old).write_bytes(data[1:])
    with pytest.raises(BlobError, match="damaged"):
        store.read(old)


def test_a_digest_says_how_it_was_made():
    """New blobs are named by BLAKE3: the published digest of nothing, as a multihash."""
    assert (
        blob_digest(b"") == "1e20af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    )
    assert matches(b"", hashlib.sha256(b"").hexdigest())
    assert not matches(b"x", blob_digest(b""))
    with pytest.raises(ValueError, match="not a digest"):
        blob_path("../" + "a" * 61)
