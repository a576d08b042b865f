"""The client gives back what the store holds, as the very types of the server, and says what the
server refuses.
"""

import http.server
import json
import re
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command

pytest.importorskip("fastapi")

from broker_server.rounds.advice import find_advice
from broker_server.rounds.best import read_versions
from broker_server.rounds.coverage import Coverage, count_coverage
from broker_server.rounds.tier_version import stored_context
from broker_server.service.rollout import read_rollouts
from broker_server.settings.fleet import ViewConfig
from broker_server.store import Store, TaskRecord, queries
from broker_server.store.explaining import explain_round
from fleet_protocol.errors import ConfigError, StorageError, TransportError
from shoal.cli.main import app
from shoal.client import Client
from shoal.view.serving import serving
from tests.shoal.view.stores import RUN, TIERS, made

PAGE = Path(__file__).parents[2] / "docs" / "page.md"
PATIENCE = 60.0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return made(tmp_path_factory.mktemp("fleet"), hostile=True)


@pytest.fixture(scope="module")
def address(store):
    with serving(store, ViewConfig(port=0)) as address:
        yield address


def test_every_answer_is_what_the_store_holds(store, address):
    """Equal to the values that the server made it of: types, tuples, enums and numbers included."""
    client = Client(address)
    with closing(Store(store, read_only=True)) as opened:
        context = stored_context(opened, RUN)
        asked = [
            replace(status, as_of=0.0) for status in (client.status(), client.status(RUN[:10]))
        ]
        assert asked == [replace(queries.status(opened), as_of=0.0)] * 2
        assert [replace(view, seconds=0) for view in client.runs()] == [
            replace(view, seconds=0) for view in queries.runs(opened)
        ]
        assert client.rounds() == queries.rounds(opened)
        assert client.rounds(RUN, first=2, last=3, tasks=0) == queries.rounds(
            opened, first=2, last=3, tasks=False
        )
        assert client.explained(2) == client.explained(2, RUN[:10]) == explain_round(opened, 2, RUN)
        assert client.devices() == queries.devices(opened)
        asked = client.ask(list[TaskRecord], f"/runs/{RUN}/devices/pi-0000")
        assert asked == opened.device_tasks(RUN, "pi-0000") != []
        assert client.versions() == read_versions(opened, RUN)
        assert client.rollouts() == read_rollouts(opened) != []
        assert client.advice() == find_advice(opened, RUN)
        asked = client.ask(Coverage, f"/runs/{RUN}/coverage", last=2, tier=TIERS[1])
        assert asked == count_coverage(opened, context, upto=2, tier=TIERS[1])
        assert client.compare(RUN, RUN[:10]) == queries.compare(opened, RUN, RUN)
        assert client.compare("newest", RUN) == queries.compare(
            opened, queries.find_run(opened).id, RUN
        )
        assert client.runs("newest")[0].run == queries.find_run(opened)
        lines = queries.log(opened)
        following = client.events(PATIENCE)
        assert (
            [next(following) for _ in lines] == client.log() == client.log(run=RUN) == lines != []
        )
        assert client.log(last=1) == lines[-1:]


def test_every_method_is_on_the_page():
    """With its name, as a program writes it."""
    assert [
        name for name in vars(Client) if name[0] != "_" and f"{name}`" not in PAGE.read_text()
    ] == []


def commands(group, *before):
    """Every command that does something, by what is typed."""
    context = group.context_class(group)
    found = []
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])
        inner = commands(command, *before, name) if hasattr(command, "list_commands") else []
        found += (
            inner
            if inner and not command.invoke_without_command
            else [" ".join([*before, name]), *inner]
        )
    return found


def test_every_command_has_a_path_and_a_method_or_a_reason_for_none():
    """By the table of docs/page.md, whose paths are in the document of the API."""
    rows = re.findall(r"^\| (`shoal .*?) \| (.*?) \| (.*?) ?\|$", PAGE.read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`shoal ([a-z -]+)`", row[0])]
    assert sorted(named) == sorted(commands(get_command(app)))
    paths = json.loads((PAGE.parent / "openapi.json").read_text())["paths"]
    for row in rows:
        given = re.findall(r"`(/[^`]*)`", row[1])
        assert {f"/api/v1{path}" for path in given} <= paths.keys()
        methods = re.findall(r"`(\w+)`", row[2])
        assert all(callable(getattr(Client, name)) for name in methods)
        assert bool(methods) == (not row[1].startswith("none: "))


def test_what_is_refused_is_an_error_with_the_words_of_the_server(address, tmp_path):
    """An unknown run, a wrong token, a store that went away, nobody who listens, and what is no
    address.
    """
    with pytest.raises(ConfigError, match="has no run nothing; its runs: "):
        Client(address).rounds("nothing")
    with pytest.raises(ConfigError, match="set SHOAL_TOKEN to the operator's token"):
        Client(address).act("pause")
    with pytest.raises(ConfigError, match="set SHOAL_TOKEN to the operator's token"):
        Client(address).act_on_rollout("stop")
    with pytest.raises(ConfigError, match="use the form http://"):
        Client("localhost:8420")
    Store(tmp_path / "store").close()
    with serving(tmp_path / "store", ViewConfig(port=0), tmp_path / "token") as other:
        with pytest.raises(ConfigError, match="set SHOAL_TOKEN to the server's token"):
            Client(other).status()
        client = Client(other, (tmp_path / "token").read_text().strip())
        assert client.devices() == client.rounds() == client.runs() == []
        with pytest.raises(ConfigError, match="contains no runs yet; `shoal run` starts one"):
            client.explained(1)
        (tmp_path / "store" / "shoal.db").unlink()
        with pytest.raises(StorageError, match="there is no store"):
            client.runs()
    with pytest.raises(
        TransportError,
        match=r"cannot be reached: .*check that `shoal view` or `up --view` of this version runs",
    ):
        client.runs()


@contextmanager
def answering(text, status=200, asked=None):
    """Somebody who is no server of this version."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if asked is not None:
                asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (b"<html>hello</html>", 200, "of this version runs there"),
        (b'[{"run": 1}]', 200, "of this version runs there"),
        (b"<html>moved</html>", 301, "answers /runs with 301"),
        (b'{"detail": "oh"}', 502, "oh"),
        (b"[]", 500, "answers /runs with 500"),
    ],
)
def test_whoever_is_no_server_of_this_version_is_told(text, status, said):
    """Whatever a stranger answers is an error of the tree."""
    with answering(text, status=status) as address, pytest.raises(TransportError, match=said):
        Client(address).runs()


def test_a_field_that_lacks_is_named_and_a_proxy_may_put_the_page_anywhere():
    """The path before the API's is kept."""
    asked = []
    refused = pytest.raises(TransportError, match=r"run\.id Field required")
    with answering(b'{"run": {}}', asked=asked) as address, refused:
        Client(f"{address}/lab/").status()
    assert asked == ["/lab/api/v1/runs/newest?"]


def test_events_come_until_the_deadline_or_the_end_of_the_server(tmp_path):
    """Lines after the known one, None for the rest; an ended stream is an error, a deadline is
    none.
    """
    store = tmp_path / "store"
    with closing(Store(store)) as written:
        for said in ("one", "two"):
            written.log("said", said)
        written.flush()
        with serving(store, ViewConfig(port=0)) as address:
            following = Client(address).events(PATIENCE, after=1)
            assert next(following).detail == "two"
            assert next(following) is None
            written.log("said", "three")
            written.flush()
            assert next(line for line in following if line).detail == "three"
            assert all(line is None for line in Client(address, seconds=9000).events(0.5, after=3))
        with pytest.raises(TransportError, match=r"the connection was closed.*runs there"):
            list(following)


def test_an_operator_acts(tmp_path):
    """Verbs are done once, on the run that is meant; what cannot be done now is an error."""
    store = made(tmp_path)
    asked = []

    def steer(wish, run):
        asked.append((wish, run))
        return "another" if wish == "start" else run

    with serving(store, ViewConfig(port=0, actions=True), steer=steer) as address:
        client = Client(address, (store / "operator.token").read_text().strip())
        assert [client.act("pause"), client.act("stop", RUN[:10]), client.act("start")] == [
            RUN,
            RUN,
            "another",
        ]
        assert asked == [("pause", RUN), ("stop", RUN), ("start", RUN)]
        with pytest.raises(ConfigError, match="no version given"):
            client.act("promote")


def test_it_needs_neither_torch_nor_a_runtime(tmp_path):
    """Whoever only asks installs little."""
    names = {"torch", "onnx", "onnxruntime", "fastapi", "uvicorn"}
    code = f"import sys, shoal.client; print(sorted({names} & {{*sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_example_of_the_page_runs(tmp_path):
    """Word for word, but for the address; it follows until a line has come that the store holds."""
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    store = made(tmp_path)
    said = []

    def note(*words):
        said.append(words)
        if words[0] == "round-started":
            raise KeyboardInterrupt

    with serving(
        store, ViewConfig(port=0, actions=True), steer=lambda *wanted: f"{wanted[0]}ed"
    ) as address:
        names = {"token": (store / "operator.token").read_text().strip(), "print": note}
        with pytest.raises(KeyboardInterrupt):
            exec(example.replace("http://127.0.0.1:8420", address), names)
    assert said[0][:2] == (RUN, "fedrolex")
    assert said[0][2].startswith("accuracy 0.7800")
    assert said[1] == ("started",)
    assert said[-1] == ("round-started", "devices asked")
