"""A database that somebody changed: one line names table, row and column, whoever looks, and a
server goes on.
"""

import contextlib
import json
import shutil
import sqlite3
import sys
import threading
import time

import pytest
from fastapi.testclient import TestClient

from broker_server.rounds.advice import find_advice
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.named import list_named_settings
from broker_server.store import Store
from broker_server.store.configurations import save_config
from broker_server.store.queries import devices
from broker_server.store.remedies import remedy
from broker_server.store.rows import DamagedRowError
from fleet_protocol.errors import ConfigError, ShoalError, StorageError
from shoal.cli import console
from shoal.cli.main import main
from shoal.view.app import make_app
from tests.broker_server.artifacts import ARCH
from tests.brokers import embedded_broker
from tests.shoal.view.stores import RUN, made

COMMANDS = {
    "runs": (
        ("runs",),
        ("status",),
        ("rounds",),
        ("devices",),
        ("advice",),
        ("versions",),
        ("log", "--run", RUN),
    ),
    "devices": (("status",), ("devices",), ("advice",)),
    "rounds": (("status",), ("rounds",), ("advice",), ("rounds", "show", "1")),
    "tasks": (("rounds",), ("devices",), ("advice",), ("rounds", "show", "1")),
    "versions": (("status",), ("runs",), ("versions",), ("advice",)),
    "events": (("log",), ("rounds", "show", "1"), ("devices",)),
}
PATHS = {
    "runs": (
        "status",
        "runs",
        f"runs/{RUN}/rounds",
        f"runs/{RUN}/versions",
        f"runs/{RUN}/advice",
        "log?run=newest",
    ),
    "devices": ("status", f"runs/{RUN}/devices"),
    "rounds": ("status", f"runs/{RUN}/rounds"),
    "tasks": (f"runs/{RUN}/rounds", f"runs/{RUN}/devices"),
    "versions": ("status", "runs", f"runs/{RUN}/versions"),
    "events": ("log",),
}
DAMAGE = [
    ("runs", "id", "x`id>/tmp/x`;id #"),
    ("runs", "arch", "../../x"),
    ("runs", "wire_bytes", "abc"),
    ("runs", "created_at", 1e300),
    ("runs", "status", "asleep"),
    ("runs", "config", b"\xff\xfe\x00"),
    ("devices", "id", "$(id)"),
    ("devices", "profile", "garbage"),
    ("devices", "profile", "[" * 50_000),
    ("devices", "last_seen_at", "today"),
    ("rounds", "state", "nonsense"),
    ("rounds", "ending", "nonsense"),
    ("rounds", "quorum", 2**62),
    ("rounds", "evaluation", "{}"),
    ("tasks", "weights", "garbage"),
    ("tasks", "artifact_set", "{}"),
    ("tasks", "phase", "nonsense"),
    ("tasks", "tier", "w1; id"),
    ("tasks", "device", "a b"),
    ("versions", "digest", "../../../../etc/passwd"),
    ("versions", "statistics_digest", "../x"),
    ("versions", "evaluation", "[]"),
    ("events", "at", "late"),
    ("events", "detail", b"\x00"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return made(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def store(whole, tmp_path):
    """A copy of a store, as a file that may be changed."""
    folder = tmp_path / "store"
    shutil.copytree(whole / "configurations", folder / "configurations")
    with (
        contextlib.closing(sqlite3.connect(whole / "shoal.db")) as source,
        contextlib.closing(sqlite3.connect(folder / "shoal.db")) as copy,
    ):
        source.backup(copy)
    return folder


def sign_again(store):
    """Save the run's configuration for this copy of a store: that of the first counts only
    there.
    """
    with contextlib.closing(sqlite3.connect(store / "shoal.db")) as opened:
        ((run, config),) = opened.execute("SELECT id, config FROM runs").fetchall()
    save_config(store, run, config)


def damage(store, table, column, value):
    with contextlib.closing(sqlite3.connect(store / "shoal.db")) as opened:
        if column == "id" and table == "runs":
            opened.execute("UPDATE runs SET id = ?", (value,))
        else:
            newest = f"SELECT max(rowid) FROM {table}"
            if table == "tasks":
                newest += " WHERE round = 1"
            opened.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ({newest})", (value,))
        opened.commit()


def said(monkeypatch, capsys, store, command):
    """What a command writes to standard error, and how it ends."""
    monkeypatch.setattr(sys, "argv", ["shoal", *command, "--store", str(store)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.attack(
    "file",
    "A database has programs, paths and escape sequences in its rows",
    "refused; a one-line error names the table, the row and the column",
    "2026-11-28",
)
@pytest.mark.parametrize(("table", "column", "value"), DAMAGE, ids=lambda value: str(value)[:20])
def test_what_no_server_wrote_is_one_line(table, column, value, store, monkeypatch, capsys):
    """On the command line and on the page; it names table, row and column, and nothing of it is a
    command to copy.
    """
    damage(store, table, column, value)
    page = TestClient(make_app(store), base_url="http://localhost")
    named = f"table {table}, row "
    refused = 0
    for command in COMMANDS[table]:
        code, error = said(monkeypatch, capsys, store, command)
        assert "Traceback" not in error
        if code:
            assert (code, error.count("\n")) == (StorageError.exit_code, 1), command
            assert named in error, command
            assert f"column {column}: " in error, command
            refused += 1
    assert refused >= 1
    answers = [page.get(f"/api/v1/{path}") for path in PATHS[table]]
    assert {answer.status_code for answer in answers} <= {200, 503}
    problems = [answer.json()["detail"] for answer in answers if answer.status_code == 503]
    assert problems
    assert all(f"column {column}: " in problem for problem in problems)


def test_measurements_that_the_database_itself_reads_are_named(store):
    """It sums them up, and says of garbage no more than that it is no JSON; a word in place of a
    number stays none.
    """
    damage(store, "tasks", "metrics", "garbage")
    message = r"table tasks, row id '[^']+', column metrics: it is not valid JSON"
    with (
        contextlib.closing(Store(store, read_only=True)) as opened,
        pytest.raises(DamagedRowError, match=message),
    ):
        devices(opened, RUN)
    with contextlib.closing(sqlite3.connect(store / "shoal.db")) as opened:
        opened.execute("UPDATE tasks SET metrics = NULL")
        word = json.dumps({"resident_bytes": "much"})
        opened.execute("UPDATE tasks SET metrics = ? WHERE round = 1", (word,))
        opened.commit()
    message = "column metrics: "
    with (
        contextlib.closing(Store(store, read_only=True)) as opened,
        pytest.raises(DamagedRowError, match=message),
    ):
        opened.device_parts(RUN)


@pytest.mark.parametrize(
    "config", ["garbage", '{"a":' * 900 + "1" + "}" * 900, "[" * 50_000 + "]" * 50_000]
)
def test_a_configuration_that_cannot_be_shown_is_named(config, store, monkeypatch, capsys):
    """Of another run than the one that is shown, too, and for programs."""
    with contextlib.closing(sqlite3.connect(store / "shoal.db")) as opened:
        opened.execute(
            "INSERT INTO runs SELECT 'older', fleet, arch, ?, 'finished', detail, 1.0, 2.0, 0, 0, NULL "
            "FROM runs",
            (config,),
        )
        opened.execute("UPDATE runs SET rowid = -1 WHERE id = 'older'")
        opened.commit()
    code, error = said(monkeypatch, capsys, store, ("status", "--json"))
    assert (code, error.count("\n")) == (StorageError.exit_code, 1)
    assert "table runs, row id 'older', column config: it is " in error
    code, error = said(monkeypatch, capsys, store, ("compare", RUN, "older"))
    assert code == StorageError.exit_code


def test_a_device_that_cannot_be_read_keeps_nobody_away(store, caplog):
    """A server that begins goes on with the others; what the device says next is written over
    it.
    """
    with contextlib.closing(Store(store)) as opened:
        before = {device.id for device in opened.devices()}
    damage(store, "devices", "profile", "garbage")
    with contextlib.closing(Store(store)) as opened:
        after = {device.id for device in opened.known_devices("lab")}
    assert len(before - after) == 1
    assert "table devices, row " in caplog.text


@pytest.mark.attack(
    "file",
    "A database contains names that a shell would execute if somebody copied a printed command",
    "the names are quoted for the shell",
    "2026-11-28",
)
def test_commands_to_copy_are_words_for_a_shell(store, tmp_path):
    """A folder may have any name, and a device says what it likes about why it cannot train."""
    strange = tmp_path / "a `id`; b"
    store.rename(strange)
    with contextlib.closing(sqlite3.connect(strange / "shoal.db")) as opened:
        opened.execute("UPDATE versions SET evaluation = NULL WHERE number < 3")
        opened.commit()
    with contextlib.closing(Store(strange)) as opened:
        for version in opened.versions(RUN):
            place = strange / "blobs" / "objects" / version.digest[:2] / version.digest
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b"")
        opened.end_run(RUN, "finished", None)
        remedies = [item.remedy for item in find_advice(opened)]
    assert any(f"--store '{strange}' --run {RUN}" in text for text in remedies), remedies
    assert remedy("pi", "round `id`: missed") == ""
    assert remedy("a;id", "offline; its last report: x") == remedy("b", "offline")
    assert "`shoal devices release 'a;id'`" in remedy("a;id", "in quarantine")


def test_names_in_looks_at_long_texts_in_little_time():
    """A text of a megabyte is as quick as a short one; what it is does not change."""
    for long in ("x" * 10**6, "a:" * 500_000, "a://" * 250_000, "a" * 10**6 + "://", ":" * 10**6):
        began = time.monotonic()
        (named,) = list_named_settings(json.dumps({"a": long}))
        assert time.monotonic() - began < 2
        assert named.value == long
    kinds = {
        "mqtt://broker:1883": "address",
        "broker.example:1883": "address",
        "see http://x": "address",
        "/a/b.py:function": "program",
        "my_models:Net": "program",
        "a/b": "path",
        "word": "word",
    }
    assert {text: list_named_settings(json.dumps([text]))[0].kind for text in kinds} == kinds


def test_names_in_refuses_what_is_nested_too_deeply():
    """By name, and no traceback."""
    with pytest.raises(ConfigError, match="nested too deeply"):
        list_named_settings("[" * 50_000 + "]" * 50_000)


def test_a_long_error_is_cut(monkeypatch, capsys):
    """A message with a text of another is printed at once, with a note of how much of it is not
    shown.
    """

    def fails(**_):
        raise ShoalError("broken: " + "x" * 500_000 + "end")

    monkeypatch.setattr("shoal.cli.main.app", fails)
    began = time.monotonic()
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err
    assert time.monotonic() - began < 2
    assert error.startswith("error: broken: xxx")
    assert "more characters are not shown" in error
    assert len(error) < 10_000


def test_nothing_that_is_printed_is_highlighted(capsys):
    """Rich's highlighter takes a time that grows with the square of a text."""
    began = time.monotonic()
    console.output_console().print("x" * 300_000)
    console.print_rows("rows", [{"name": "x" * 300_000}], empty="")
    assert time.monotonic() - began < 5
    assert capsys.readouterr().out.count("x") == 600_000


def test_flat_names_of_many_parts_take_little_time():
    """A name of another with 100,000 dots."""
    began = time.monotonic()
    (record,) = console.flat([{"a." * 100_000: 1, "b": {"c": 2}}])
    assert time.monotonic() - began < 2
    assert record["b.c"] == 2


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("rounds", "state", "nonsense"),
        ("versions", "digest", "../../etc/passwd"),
        ("runs", "wire_bytes", "abc"),
    ],
)
def test_a_server_holds_a_run_that_it_cannot_read(table, column, value, store, tmp_path, caplog):
    """It stays up, and its warning names the row; the devices that it cannot read it leaves out."""
    sign_again(store)
    damage(store, table, column, value)
    damage(store, "devices", "profile", "garbage")
    with embedded_broker(tmp_path) as broker:
        settings = BrokerConfig(url=broker.url, insecure=True)
        own = FleetConfig.model_validate(
            {
                "fleet": "lab",
                "store": store,
                "broker": {"url": broker.url},
                "model": {"artifacts": store.parent / "artifacts", "arch": ARCH},
            }
        )
        with Server("lab", store, settings, own=own) as server:
            worker = threading.Thread(target=server.serve)
            worker.start()
            deadline = time.monotonic() + 20
            while "cannot resume yet" not in caplog.text and time.monotonic() < deadline:
                worker.join(0.05)
            alive = worker.is_alive()
            server.stop()
            worker.join(20)
    assert alive
    assert f"table {table}, row " in caplog.text
    assert f"column {column}: " in caplog.text
    assert "column profile: " in caplog.text


@pytest.mark.attack(
    "file",
    "A database has a schema whose names are not text",
    "refused with a one-line error",
    "2026-11-28",
)
@pytest.mark.parametrize("read_only", [True, False])
def test_a_schema_with_a_name_that_is_no_text_is_one_line(read_only, tmp_path):
    """SQLite says the name in its error, which Python cannot read either."""
    Store(tmp_path / "store").close()
    path = tmp_path / "store" / "shoal.db"
    with contextlib.closing(sqlite3.connect(path)) as opened:
        opened.execute("PRAGMA journal_mode=DELETE")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"tabletasks", b"table\xcfasks"))
    with pytest.raises(StorageError, match="cannot open the store"):
        Store(tmp_path / "store", read_only=read_only)
