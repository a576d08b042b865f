"""Downloads from a real server on this machine: what has not its checksum is not kept."""

import gzip
import hashlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fleet_protocol.data.readers import read_idx_file
from fleet_protocol.errors import BlobError, ConfigError, StorageError, TransportError
from simulation.data.datasets import DATASETS
from simulation.data.fetch import ELSEWHERE, SOURCES, RemoteFile, fetch
from tests.simulation.data_folder import FOLDER, needs

CONTENT = b"\0\0\x08\x01\0\0\0\x05" + bytes(range(5))


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and writes nothing to the terminal."""

    def log_message(self, *args):
        """Say nothing."""


@pytest.fixture
def server(tmp_path):
    """A web server for a folder; gives the folder and its URL."""
    folder = tmp_path / "web"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield folder, f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
        thread.join(timeout=10)


def source(url: str, content: bytes = CONTENT) -> dict[str, tuple[RemoteFile, ...]]:
    return {"tiny": (RemoteFile(f"{url}/x.gz", len(content), hashlib.sha256(content).hexdigest()),)}


def test_a_file_is_downloaded_once(server, tmp_path):
    """It is checked, readable, and not asked for again; a damaged one is replaced, whatever its
    compression.
    """
    folder, url = server
    (folder / "x.gz").write_bytes(gzip.compress(CONTENT))
    paths = fetch("tiny", tmp_path, sources=source(url))
    assert paths == [tmp_path / "tiny" / "x.gz"]
    assert read_idx_file(paths[0]).tolist() == [0, 1, 2, 3, 4]
    (folder / "x.gz").unlink()
    assert fetch("tiny", tmp_path, sources=source(url)) == paths
    paths[0].write_bytes(b"damaged")
    (folder / "x.gz").write_bytes(gzip.compress(CONTENT, 0))
    fetch("tiny", tmp_path, sources=source(url))
    assert read_idx_file(paths[0]).tolist() == [0, 1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["x.gz"]


@pytest.mark.parametrize(
    "served",
    [
        gzip.compress(CONTENT[:-1] + b"!"),
        gzip.compress(CONTENT + b"more"),
        gzip.compress(CONTENT)[:-9],
        b"<html>not found</html>",
        b"",
        b"\0" * 2_000_000,
        gzip.compress(b"\0" * 50_000_000),
    ],
    ids=["changed", "longer", "cut", "page", "empty", "too large", "bomb"],
)
def test_wrong_content_is_refused_and_not_kept(server, tmp_path, served):
    """Nothing is left behind of what is not the file."""
    folder, url = server
    (folder / "x.gz").write_bytes(served)
    with pytest.raises(BlobError):
        fetch("tiny", tmp_path, sources=source(url))
    assert list((tmp_path / "tiny").iterdir()) == []


def test_servers_that_fail_are_named(server, tmp_path):
    """A missing file and a closed port are transport errors; other schemes are not opened."""
    _, url = server
    with pytest.raises(TransportError, match=r"x\.gz.*404"):
        fetch("tiny", tmp_path, sources=source(url))
    with pytest.raises(TransportError, match="cannot download"):
        fetch("tiny", tmp_path, sources=source("http://127.0.0.1:9"), timeout_seconds=5)
    with pytest.raises(ConfigError, match="neither http nor https"):
        fetch("tiny", tmp_path, sources=source("file:///etc"))


def test_a_folder_that_cannot_be_made(server, tmp_path):
    """A file stands where the folder should be."""
    folder, url = server
    (folder / "x.gz").write_bytes(gzip.compress(CONTENT))
    (tmp_path / "root").write_text("a file")
    with pytest.raises(StorageError, match="cannot write"):
        fetch("tiny", tmp_path / "root", sources=source(url))


def test_every_set_can_be_fetched_or_says_where_it_is(tmp_path):
    """No data set is without an answer; unknown names list all."""
    assert set(DATASETS) == {*SOURCES, *ELSEWHERE}
    for name in ELSEWHERE:
        with pytest.raises(
            ConfigError, match=f"data set {name} cannot be downloaded automatically: "
        ):
            fetch(name, tmp_path)
    with pytest.raises(ConfigError, match="unknown data set 'imagenet'; choose from mnist, digits"):
        fetch("imagenet", tmp_path)


@needs("mnist")
def test_the_checksums_are_those_of_mnist(monkeypatch):
    """The files the loader reads are the files `fetch` would accept: nothing is downloaded."""
    monkeypatch.setattr(
        "urllib.request.urlopen", lambda *_, **__: pytest.fail("a file was asked for")
    )
    assert len(fetch("mnist", FOLDER)) == 4
