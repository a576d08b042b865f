"""Updates on their way in: small ones wait in memory, what finds no room there on disk, and both
come out the same.
"""

import pytest

from broker_server.service import partial_uploads
from broker_server.service.partial_uploads import PartialUploads
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref, encode_chunk
from fleet_protocol.errors import BlobError, RefusedError

CHUNK = 1024


def add(partial, task, data, *indices):
    for index in indices:
        partial.add(task, encode_chunk(data, index, CHUNK), 10_000)


def test_an_update_without_room_in_memory_goes_to_the_disk_and_survives_there(
    tmp_path, monkeypatch
):
    """Of two only the second is on the disk, and alone goes on with the next server; both come out
    whole.
    """
    monkeypatch.setattr(partial_uploads, "_HELD_BYTES", 3000)
    first = bytes(range(250)) * 10
    second = bytes(reversed(range(250))) * 10
    partial = PartialUploads(BlobStore(tmp_path), BlobStore(tmp_path))
    add(partial, "a", first, 2, 0)
    add(partial, "b", second, 1)
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {"b"}
    partial.close()
    monkeypatch.undo()  # what was begun on the disk goes on there, although there is room
    partial = PartialUploads(BlobStore(tmp_path), BlobStore(tmp_path))
    assert partial.missing("a", blob_ref(first, CHUNK)) == ((0, 3),)
    assert partial.missing("b", blob_ref(second, CHUNK)) == ((0, 1), (2, 3))
    add(partial, "b", second, 0, 2)
    assert partial.finish("b", blob_ref(second, CHUNK)) == second
    assert not list((tmp_path / "objects").rglob("*"))
    partial.keep("b", blob_ref(second, CHUNK).digest, second)
    assert partial.blobs.read(blob_ref(second, CHUNK).digest) == second
    partial.drop("a")
    add(partial, "a", first, 2, 0, 1, 1)
    assert partial.finish("a", blob_ref(first, CHUNK)) == first
    assert not list((tmp_path / "parts").iterdir())


def test_an_update_in_memory_whose_digest_is_wrong_is_dropped(tmp_path):
    """Nothing of it stays, in memory or on disk, so all of it is asked for again."""
    right = bytes(2500)
    wrong = bytes(2499) + b"1"
    partial = PartialUploads(BlobStore(tmp_path), BlobStore(tmp_path))
    ref = blob_ref(right, CHUNK)
    add(partial, "a", wrong, 0, 1, 2)
    with pytest.raises(RefusedError, match="arrived for blob"):
        add(partial, "a", bytes(2000), 0)
    with pytest.raises(BlobError, match="does not have the digest"):
        partial.finish("a", ref)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert partial.missing("a", ref) == ((0, 3),)
    add(partial, "a", right, 0)
    partial.drop("a")
    assert partial.missing("a", ref) == ((0, 3),)
