"""Commands with ``--url``: the page of a store says, and does, what the store itself would."""

import json
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing, redirect_stdout
from io import StringIO

import pytest
from typer import BadParameter

pytest.importorskip("fastapi")

from broker_server.service.rollout import read_rollout
from broker_server.settings.fleet import ViewConfig
from broker_server.store import Store, promotion
from fleet_protocol.errors import ConfigError, StorageError, TransportError
from shoal.cli.main import app as command
from shoal.view.serving import serving
from tests.brokers import free_port
from tests.shoal.view.stores import RUN, made
from tests.shoal.view.test_actions import store as held

LISTED = [
    "status", "devices", "rounds", "rounds show 2", "rounds show 5", "versions", "advice", "log", "log --last 1",
    "rollout show", f"compare {RUN} {RUN[:10]}", f"status --run {RUN[:9]}", f"log --run {RUN}",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch):
    for name in ("SHOAL_URL", "SHOAL_TOKEN", "SHOAL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return made(tmp_path_factory.mktemp("fleet"), hostile=True)


@pytest.fixture(scope="module")
def address(store):
    with serving(store, ViewConfig(port=0)) as address:
        yield address


def typed(words, *more):
    """What a command prints, without the time at which it read a status."""
    with redirect_stdout(StringIO()) as out:
        command([*words.split(), *map(str, more)], standalone_mode=False)
    return re.sub(r'"as_of": [0-9.]+', '"as_of": 0', out.getvalue())


def here(words, store):
    """Where it lies: a rollout in the folder around the store."""
    return [*(["--folder", store.parent] if words.startswith("rollout") else []), "--store", store]


@pytest.mark.parametrize("words", LISTED)
@pytest.mark.parametrize("how", [["--json"], []], ids=["json", "table"])
def test_a_page_is_shown_as_its_store_is(store, address, words, how):
    """Word for word, as JSON and as a table."""
    assert typed(words, *how, *here(words, store)) == typed(words, *how, "--url", address) != ""


@pytest.mark.parametrize("of", [[], ["--run", RUN[:9]]], ids=["all", "one"])
def test_runs_are_those_of_the_store(store, address, of):
    """But for how long the one in progress has taken by now."""
    shown = [
        json.loads(typed("runs", "--json", *of, *more))
        for more in (["--store", store], ["--url", address])
    ]
    for run_row in shown[0] + shown[1]:
        run_row["seconds"] = 0
    assert shown[0] == shown[1] != []


@pytest.mark.parametrize(
    "words", ["status", "devices", "rounds", "versions", "advice", "log", "runs"]
)
def test_a_store_without_a_run_is_one_over_the_page_too(tmp_path, words):
    """Nothing, and no error; but what is asked of a run has none."""
    Store(tmp_path / "store").close()
    with serving(tmp_path / "store", ViewConfig(port=0)) as address:
        assert typed(words, "--json", "--store", tmp_path / "store") == typed(
            words, "--json", "--url", address
        )
        for command_line in ("rounds show 1", "export-weights"):
            with pytest.raises(ConfigError, match="no runs yet"):
                typed(command_line, "--url", address)
        with pytest.raises(ConfigError, match="no rollout; start one with `shoal rollout start`"):
            typed("rollout show", "--url", address)


def test_what_is_typed_counts_before_what_is_set(store, address, monkeypatch, tmp_path):
    """SHOAL_URL where nothing is typed, not where a store is; and --url before a store."""
    monkeypatch.setenv("SHOAL_URL", address)
    assert json.loads(typed("status --json"))["run.id"] == RUN
    with pytest.raises(StorageError, match="no store"):
        typed("status", "--store", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no\.toml"):
        typed("pause", "--config", tmp_path / "no.toml")
    assert RUN in typed("status", "--store", tmp_path / "none", "--url", address)


@pytest.mark.parametrize("words", ["status", "log"])
def test_a_page_is_watched(tmp_path, words):
    """A line at first, one after each write, and the end with the run that is named."""
    store = held.__wrapped__(tmp_path)
    seen = []

    class Out(StringIO):
        def write(self, text):
            seen.append(text)
            if "\n" in text and len(seen) < 50:
                with closing(Store(store)) as opened:
                    opened.log("said", "something", run=RUN)
                    if len(seen) > 3:
                        opened.end_run(RUN, "finished", None)
            return len(text)

    with closing(Store(store)) as opened:
        opened.log("said", "at first", run=RUN)
    with serving(store, ViewConfig(port=0)) as address, redirect_stdout(Out()):
        command(
            [words, "--url", address, "--run", RUN[:8], "--watch", "--json"], standalone_mode=False
        )
    lines = [json.loads(line) for line in "".join(seen).splitlines()]
    assert len(lines) >= 2
    if words == "status":
        assert [line["run.status"] for line in (lines[0], lines[-1])] == ["paused", "finished"]
    else:
        assert [line["id"] for line in lines] == list(range(1, len(lines) + 1))


def test_a_watch_is_interrupted(address, tmp_path, request):
    """While it waits for the network: what was printed stays, and nothing is said of a bug."""
    words = [sys.executable, "-m", "shoal", "status", "--watch", "--json", "--url", address]
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which the tests' shell may have had ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        try:
            assert json.loads(watching.stdout.readline())["run.id"] == RUN
            watching.send_signal(signal.SIGINT)
            _, printed = watching.communicate(timeout=60)
        finally:
            watching.kill()
    assert watching.returncode in {0, 130}  # the latter while it still prints
    assert printed in {"", "interrupted\n"}


@pytest.fixture
def acting(tmp_path, monkeypatch):
    """Twice the same held run, one of them on a page for operators."""
    local_store, page_store = (
        held.__wrapped__(tmp_path / name / "store") for name in ("one", "other")
    )
    with serving(page_store, ViewConfig(port=0, actions=True)) as address:
        monkeypatch.setenv("SHOAL_TOKEN_FILE", str(page_store / "operator.token"))
        yield local_store, page_store, address


def test_versions_are_chosen_and_devices_released(acting):
    """The same words, and the same in the store."""
    local_store, page_store, address = acting
    for words in ("promote 0", "rollback 0 --json", "devices release pi"):
        printed = [typed(words, *more) for more in (["--store", local_store], ["--url", address])]
        assert len({re.sub(r'"created_at": .*', "", text) for text in printed}) == 1, printed
    for store in (local_store, page_store):
        with closing(Store(store, read_only=True)) as opened:
            assert promotion.marked_versions(opened, RUN) == {
                "newest": 2,
                "repeats": 0,
                "promoted": 0,
            }
            assert opened.marked_rounds(RUN, "released") == {"pi": 1}
    with pytest.raises(ConfigError, match="has no version 9; it has versions 0 to 2"):
        typed("promote 9", "--url", address)
    with pytest.raises(BadParameter, match="Input should be less than or equal to"):
        typed("promote 99999999999", "--url", address)


@pytest.mark.parametrize("words", ["", "--version 0", "--run 2026"])
def test_weights_are_the_very_bytes(acting, tmp_path, words):
    """By default of the version that is promoted; and JSON says which."""
    local_store, _, address = acting
    printed = []
    out = tmp_path / "file"
    for more in (["--store", local_store], ["--url", address]):
        typed("promote 0", *more)
        printed.append(
            (
                json.loads(typed(f"export-weights {words} --json", "--out", out, *more)),
                out.read_bytes(),
            )
        )
    assert printed[0] == printed[1]
    assert printed[0][0]["number"] == 0
    for more in (["--store", local_store], ["--url", address]):
        with pytest.raises(ConfigError, match=f"--best: no version of run {RUN} was evaluated"):
            typed("export-weights --best", *more)
        with pytest.raises(ConfigError, match="has no version 7"):
            typed("export-weights --version 7", *more)


def test_a_rollout_is_steered(store, tmp_path, monkeypatch):
    """In the folder around the store of the page, by the operator."""
    shutil.copytree(store.parent, tmp_path / "fleet")
    lab = tmp_path / "fleet"
    newest = json.loads((lab / "rollout.json").read_text()) | {"ended": 0.0, "stopped": ""}
    (lab / "rollout.json").write_text(json.dumps(newest))
    with serving(lab / "store", ViewConfig(port=0, actions=True)) as address:
        monkeypatch.setenv("SHOAL_TOKEN", (lab / "store" / "operator.token").read_text())
        for verb, then in (
            ("pause", "is paused"),
            ("resume", "continues"),
            ("stop", "does not ask any further boards"),
        ):
            number = read_rollout(lab).release.number
            printed = typed(f"rollout {verb}", "--url", address)
            assert printed.startswith(f"release {number} ")
            assert then in printed
        assert read_rollout(lab).stopped
        with pytest.raises(ConfigError, match="nothing is left to resume"):
            typed("rollout resume", "--url", address)


def test_a_page_that_no_server_stands_behind_says_so(acting):
    """`shoal view` steers no run."""
    with pytest.raises(ConfigError, match="use a page of `shoal up --view`"):
        typed("stop", "--url", acting[2])


def test_whoever_has_no_token_or_a_wrong_one_is_told(tmp_path, monkeypatch):
    """With where it is, and where it goes; none of it is printed."""
    Store(tmp_path / "store").close()
    with serving(tmp_path / "store", ViewConfig(port=0), tmp_path / "token") as address:
        for token in (None, "wrong"):
            if token:
                monkeypatch.setenv("SHOAL_TOKEN", token)
            with pytest.raises(
                ConfigError, match=r"set SHOAL_TOKEN to the server's token"
            ) as refused:
                typed("status", "--url", address)
            assert "wrong" not in str(refused.value)
        for bad in ("two\nlines", "sch\u00f6n"):
            monkeypatch.setenv("SHOAL_TOKEN", bad)
            with pytest.raises(
                ConfigError, match="the token in SHOAL_TOKEN or in the file"
            ) as refused:
                typed("status", "--url", address)
            assert bad not in str(refused.value)
        monkeypatch.delenv("SHOAL_TOKEN")
        monkeypatch.setenv("SHOAL_TOKEN_FILE", str(tmp_path / "nothing"))
        with pytest.raises(
            ConfigError, match=r"SHOAL_TOKEN_FILE: cannot read a token from .*nothing"
        ):
            typed("status", "--url", address)
        monkeypatch.setenv("SHOAL_TOKEN_FILE", str(tmp_path / "token"))
        assert "no run yet" in typed("status", "--url", address)


def test_what_is_no_page_is_told(store, address):
    """An unknown run, nobody who listens, no address, no TLS."""
    with pytest.raises(ConfigError, match="has no run nothing; its runs: "):
        typed("rounds --run nothing", "--url", address)
    with pytest.raises(
        TransportError, match="check that `shoal view` or `up --view` of this version runs there"
    ):
        typed("status", "--url", f"http://127.0.0.1:{free_port()}")
    for wrong in ("localhost:8420", "http://127.0.0.1:eight", "http://[::1", "http://"):
        with pytest.raises(ConfigError, match="is not the address of a page; use the form http://"):
            typed("status", "--url", wrong)
    with pytest.raises(
        TransportError, match=r"cannot be reached over TLS.*SSL_CERT_FILE.*use http://"
    ):
        typed("status", "--url", address.replace("http", "https"))
