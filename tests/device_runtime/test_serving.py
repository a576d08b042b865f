"""Other programs on a board ask its model over a socket, while rounds replace it."""

import base64
import contextlib
import io
import json
import select
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from device_runtime.predictions.local_socket import LocalSocket
from device_runtime.predictions.predictor import Predictor
from device_runtime.predictions.requests import answer
from device_runtime.settings import PredictConfig, load_device_config
from fleet_protocol.errors import ConfigError, DataError
from tests.device_runtime.test_predicting import board, keep, told
from tests.device_runtime.tiny_set import SHAPE, initial_weights, samples

__all__ = ["board"]


@pytest.fixture
def served(board):
    """A board that serves; a path of a socket has 107 bytes at most, a folder of pytest more."""
    with tempfile.TemporaryDirectory() as folder:
        text = (board / "device.toml").read_text()
        rules = (
            f'[predict]\nsocket = "{folder}/run/predict.sock"\nmax_bytes = 4000\nmax_clients = 2\n'
        )
        (board / "device.toml").write_text(text.replace("predict = true\n", "") + rules)
        config = load_device_config(board / "device.toml")
        serving = LocalSocket(
            Predictor(config, config.predict.seconds), config.predict, config.predict.socket
        )
        try:
            yield config.predict.socket
        finally:
            serving.close()
            assert not config.predict.socket.exists()


class Client:
    """One who asks."""

    def __init__(self, path: Path) -> None:
        self.link = socket.socket(socket.AF_UNIX)
        self.link.settimeout(60)
        self.link.connect(str(path))
        self.file = self.link.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        self.link.close()

    def send(self, line: bytes):
        self.link.sendall(line + b"\n")
        return json.loads(self.file.readline())

    def ask(self, **fields):
        return self.send(json.dumps(fields).encode())


def npy(array):
    data = io.BytesIO()
    np.save(data, array)
    return base64.b64encode(data.getvalue()).decode()


def test_lists_and_arrays_are_judged_by_the_newest_model(board, served):
    """As the same model in numpy does; what is newer answers from its first moment on, on the same
    connection.
    """
    x, _ = samples(3, seed=3)
    keep(board, initial_weights(1))
    with Client(served) as client:
        said = client.ask(x=x.tolist(), id=7)
        assert (said["id"], said["model"]["version"]) == (7, 1)
        wanted = told(initial_weights(1), x, samples(30)[0])
        np.testing.assert_allclose(
            [row["logits"] for row in said["predictions"]], wanted, rtol=1e-4, atol=1e-4
        )
        assert [row["label"] for row in said["predictions"]] == wanted.argmax(1).tolist()
        assert client.ask(npy=npy(x))["predictions"] == said["predictions"]
        keep(board, initial_weights(2), version=5)
        said = client.ask(npy=npy(x))
        assert said["model"]["version"] == 5
        wanted = told(initial_weights(2), x, samples(30)[0])
        np.testing.assert_allclose(
            [row["logits"] for row in said["predictions"]], wanted, rtol=1e-4, atol=1e-4
        )


BAD = [
    (b"", "JSONDecodeError"),
    (b"\xff\xff", "UnicodeDecodeError"),
    (b"[1]", "a request is"),
    (b'{"x": [], "npy": ""}', "a request is"),
    (b'{"x": [[1]], "file": "/etc/passwd"}', "a request is"),
    (b'{"x": [[1, 2], [3]]}', "ValueError"),
    (b'{"x": ["a"]}', "do not form an array of numbers"),
    (b'{"x": 5}', "do not form an array of numbers"),
    (b'{"x": [[[1e999]]]}', "have shape [1, 1], which cannot become"),
    (b'{"x": ' + json.dumps(np.full((1, *SHAPE), np.inf).tolist()).encode() + b"}", "not finite"),
    (b'{"x": ' + b"[" * 3900, "RecursionError"),
    (b'{"npy": "!"}', "Error"),
    (b'{"x": [[1]], "id": NaN}', "string or a whole number"),
    (b'{"x": {"a": [[1]], "b": [[1], [2]]}}', "all must have the same samples"),
    (
        b'{"npy": "' + base64.b64encode(b"\x93NUMPY\x01\x00\x02\x00{}").decode().encode() + b'"}',
        "ValueError",
    ),
]


def test_a_bad_request_is_told_so(board, served):
    """In one line; the next request of the same client is answered."""
    keep(board, initial_weights())
    with Client(served) as client:
        for line, words in BAD:
            assert words in client.send(line)["error"], line
            assert len(client.ask(x=np.zeros((1, *SHAPE)).tolist())["predictions"]) == 1


def test_bounds(board, served):
    """A line that is too long ends the connection, and a third client waits until one has gone."""
    with Client(served) as first, Client(served) as second:
        assert "shoal device run" in first.ask(x=[1], id="a")["error"]  # there is no model yet
        assert first.ask(x=[1], id="a")["id"] == "a"
        assert "error" in second.ask(x=[1])
        with Client(served) as third:
            third.link.sendall(b"[]\n")
            assert not select.select([third.link], [], [], 0.2)[0]
            assert first.send(b" " * 4001)["error"] == "longer than 4000 bytes"
            assert first.file.read() == b""
            assert "a request is" in json.loads(third.file.readline())["error"]
    assert oct(served.stat().st_mode)[-3:] == "660"


def test_requests_in_a_row_and_a_last_one_without_an_end(board, served):
    """What comes at once is answered one by one, also by `printf '{...}' | nc -U`."""
    with Client(served) as client:
        client.link.sendall(b'{"id": 1}\n{"id": 2}\n\n[]')
        client.link.shutdown(socket.SHUT_WR)
        assert [json.loads(line)["error"][:9] for line in client.file] == ["a request"] * 2 + [
            "JSONDecod",
            "a request",
        ]


def test_one_that_is_slow_is_let_go(board, monkeypatch):
    """A request must be whole in time, however often a part of it comes; the place is free
    again.
    """
    config = load_device_config(board / "device.toml")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        serving = LocalSocket(Predictor(config), PredictConfig(max_clients=1, seconds=0.3), path)
        try:
            with Client(path) as slow, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(1000):
                    slow.link.sendall(b" ")
                    if select.select([slow.link], [], [], 0.05)[0]:
                        break
                else:
                    pytest.fail("it was never let go")
                assert slow.file.read() == b""
        finally:
            serving.close()


def test_no_time_for_all(board):
    """Samples that take longer than there is time are an error that says how many there was time
    for.
    """
    keep(board, initial_weights())
    predictor = Predictor(load_device_config(board / "device.toml"), 1e-9)
    with pytest.raises(DataError, match="no time for more than 0 of the samples"):
        predictor(samples(40)[0])
    predictor._lock.acquire()
    with pytest.raises(DataError, match="send the request again"):
        predictor(samples(1)[0])


def test_a_model_is_swapped_while_many_ask(board):
    """Every answer is wholly of the version that it names, and later ones are of no earlier
    version.
    """
    x, _ = samples(2, seed=3)
    versions = {
        version: told(initial_weights(version), x, samples(30)[0]) for version in range(1, 7)
    }
    keep(board, initial_weights(1))
    predictor = Predictor(load_device_config(board / "device.toml"))
    request = json.dumps({"x": x.tolist()}).encode()
    over = threading.Event()

    def ask():
        seen = []
        while not over.is_set() or len(seen) < 2:
            said = json.loads(answer(predictor, request))
            found = [row["logits"] for row in said["predictions"]]
            np.testing.assert_allclose(
                found, versions[said["model"]["version"]], rtol=1e-4, atol=1e-4
            )
            seen.append(said["model"]["version"])
        return seen

    with ThreadPoolExecutor(3) as pool:
        askers = [pool.submit(ask) for _ in range(3)]
        for version in range(2, 7):
            keep(board, initial_weights(version), version=version)
        over.set()
        for asker in askers:
            seen = asker.result(60)
            assert seen == sorted(seen)
    assert json.loads(answer(predictor, request))["model"]["version"] == 6


def test_a_socket_that_cannot_be(board):
    """A path that is too long, or that is another file, is told with what to do; the file stays."""
    config = load_device_config(board / "device.toml")
    for path in (board / ("x" * 120), board / "device.toml"):
        with pytest.raises(ConfigError, match="choose another path"):
            LocalSocket(Predictor(config), config.predict, path)
    assert (board / "device.toml").is_file()


def test_the_example_of_the_documents(board, served, capsys):
    """The program of docs/device.md, with the path of this test."""
    keep(board, initial_weights())
    page = (Path(__file__).parents[2] / "docs" / "device.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    np.save(board / "new.npy", samples(3)[0])
    for there, here in (("/run/shoal/predict.sock", served), ("new.npy", board / "new.npy")):
        assert there in program
        program = program.replace(there, str(here))
    exec(program, {})
    assert [line[:2] for line in capsys.readouterr().out.splitlines()] == ["0:", "1:", "2:"]
