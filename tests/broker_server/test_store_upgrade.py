"""Stores of earlier versions are brought up with all that is in them; whatever goes wrong leaves
them as they were.
"""

import contextlib
import re
import sqlite3
import subprocess
import sys
import threading

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store, TaskPhase, queries
from broker_server.store.machine import RoundEvent, RoundState
from broker_server.store.schema import SCHEMA_VERSION, metadata
from fleet_protocol.errors import RefusalReason, StorageError
from tests.broker_server.peer import Peer, honest
from tests.broker_server.store_fixture import restore
from tests.broker_server.test_folding import metrics
from tests.brokers import any_broker
from tests.marking import mostly_slow

EARLIER = range(3, SCHEMA_VERSION)
TABLES = ("runs", "devices", "rounds", "tasks", "versions", "events", "refusals")


def ask(path, query):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def rows_of(path):
    """Every row of every table, by the names of its columns."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return {
            table: [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]
            for table in TABLES
        }


def text_of(path):
    """Everything that is in a database."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def stamped(path):
    return ask(path, "SELECT version_num FROM alembic_version")


@pytest.mark.parametrize("version", EARLIER)
def test_every_row_survives_the_upgrade(version, tmp_path):
    """A row has what it had, and nothing in the columns that came later."""
    path = restore(version, tmp_path)
    before = rows_of(path)
    assert all(before.values())
    Store(tmp_path).close()
    assert stamped(path) == [(str(SCHEMA_VERSION),)]
    for table, rows in rows_of(path).items():
        assert len(rows) == len(before[table])
        for row, old in zip(rows, before[table], strict=True):
            assert row == dict.fromkeys(row) | old


@pytest.mark.parametrize("version", EARLIER)
@pytest.mark.parametrize("read_only", [False, True])
def test_an_earlier_version_is_read_through_the_store(version, read_only, tmp_path):
    """Each message that is stored as JSON is read by this version, the configurations among
    them.
    """
    lines = rows_of(restore(version, tmp_path))["events"]
    with contextlib.closing(Store(tmp_path, read_only=read_only)) as store:
        unfinished, finished = store.runs()
        assert (unfinished.status, finished.status) == ("running", "finished")
        for run in store.runs():
            assert FleetConfig.stored(run.config).fleet == "lab"
        assert [item.state for item in store.rounds(finished.id)] == [RoundState.CLOSED] * 2
        assert [item.evaluation.examples for item in store.versions(finished.id)[1:]] == [40, 40]
        tasks = {task.device: task for task in store.tasks(finished.id, 1, "train")}
        assert {name: task.phase for name, task in tasks.items()} == {
            "wide": TaskPhase.MERGED,
            "narrow": TaskPhase.MERGED,
            "full": TaskPhase.DECLINED,
            "broken": TaskPhase.REFUSED,
        }
        assert tasks["wide"].metrics.labels == (0, 1, 2, 3)
        assert [choice.tier for choice in tasks["narrow"].choices] == ["w0.50-d1"]
        assert {device.id: device.profile.max_width for device in store.devices("lab")} == {
            "wide": 1.0,
            "full": 1.0,
            "narrow": 0.5,
            "broken": 0.5,
        }
        shown = queries.status(store, finished.id)
        assert (shown.closed, shown.rounds, shown.refusals["no-space"]) == (2, 2, 4)
        of_finished = [line["detail"] for line in lines if line["run"] == finished.id]
        assert [line.detail for line in queries.log(store, finished.id)] == of_finished
        assert len(of_finished) > 20
        assert [view.merged for view in queries.devices(store, finished.id)] == [0, 0, 2, 2]


def test_what_version_three_offered_is_still_offered(tmp_path):
    """The sub-models that a device may take instead are read as they were stored."""
    restore(3, tmp_path)
    with contextlib.closing(Store(tmp_path)) as store:
        wide = next(task for task in store.tasks(store.runs()[0].id, 1) if task.device == "wide")
        assert [choice.tier for choice in wide.choices] == ["w1.00-d1", "w0.50-d1"]
        store.choose_tier(wide.with_tier("w0.50-d1"))
        assert store.task(wide.id).choices[0] == wide.choices[1]


@pytest.mark.parametrize("version", EARLIER)
def test_a_round_of_an_earlier_version_is_ended(version, tmp_path):
    """The round that the killed server was in takes an update, is merged and is judged."""
    restore(version, tmp_path)
    with contextlib.closing(Store(tmp_path)) as store:
        run = store.unfinished("lab").id
        record = store.last_round(run)
        (waiting,) = (task for task in store.tasks(run, 1) if task.device == "wide")
        assert (record.state, waiting.phase) == (RoundState.COLLECTING, TaskPhase.OFFERED)
        store.receive([waiting.with_update("c" * 64, 1, metrics())])
        before = sum(item.count for item in store.refusals(run))
        store.count_refusal(run, "broken", RefusalReason.NOT_FINITE, "server")
        record = store.advance_round(record, RoundEvent.ENOUGH)
        assert store.advance_round(record, RoundEvent.MERGED).state is RoundState.CLOSED
        phases = {task.device: task.phase for task in store.tasks(run, 1)}
        assert (phases["wide"], phases["full"]) == (TaskPhase.RECEIVED, TaskPhase.MISSED)
        assert [item.count for item in store.refusals(run)] == [before + 1]
    with contextlib.closing(Store(tmp_path, read_only=True)) as store:
        assert store.task(waiting.id).update_digest == "c" * 64


@pytest.mark.parametrize("version", mostly_slow(EARLIER, lambda version: version == EARLIER[0]))
def test_a_server_works_on_with_the_store_of_an_earlier_version(version, config, running, tmp_path):
    """A whole run on it, beside those it has; the one that was cut short had another configuration
    and is ended.
    """
    settings = config(fleet="lab")
    restore(version, settings.store)
    with any_broker(tmp_path) as broker, Peer("lab", "wide", broker.url, honest()):
        finished = running(settings, broker.url).wait()
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        assert [run.status for run in store.runs()] == ["finished", "stopped", "finished"]
        assert store.runs()[0].id == finished.run
        assert len(store.devices("lab")) == 4


@pytest.mark.parametrize("version", EARLIER)
def test_an_upgraded_store_has_the_tables_of_a_new_one(version, tmp_path):
    """Tables, columns, keys and indexes; how long a text may be is of no account to SQLite."""
    restore(version, tmp_path / "old")
    found = []
    for name in ("old", "new"):
        Store(tmp_path / name).close()
        made = ask(tmp_path / name / "shoal.db", "SELECT sql FROM sqlite_master ORDER BY name")
        texts = (re.sub(r"TEXT|VARCHAR(\(\d+\))?", "text", sql or "") for (sql,) in made)
        found.append([sorted(text.replace(",", " ").split()) for text in texts])
    assert found[0] == found[1]


def test_every_field_of_a_record_is_a_column_of_its_type():
    """A new store has the tables that version 4 had, written out here for one of each kind of
    column.
    """
    assert [
        (item.name, str(item.type), item.nullable, item.primary_key)
        for item in metadata.tables["devices"].c
    ] == [
        ("fleet", "VARCHAR", False, True),
        ("id", "VARCHAR", False, True),
        ("online", "BOOLEAN", False, False),
        ("state", "VARCHAR", False, False),
        ("profile", "VARCHAR", True, False),
        ("first_seen_at", "FLOAT", False, False),
        ("last_seen_at", "FLOAT", False, False),
    ]
    assert str(metadata.tables["rounds"].c.number.type) == "INTEGER"


def test_the_newest_migration_is_the_version_of_the_schema():
    """A schema that was changed without a migration, or the other way round, is noticed here."""
    config = Config()
    config.set_main_option("script_location", "broker_server.store:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [str(SCHEMA_VERSION)]


@pytest.mark.parametrize("version", EARLIER)
def test_an_upgrade_that_fails_leaves_the_store_as_it_was(version, tmp_path):
    """The last step fails after the others were taken; not a column is left of them, and the store
    is still good.
    """
    path = restore(version, tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE INDEX runs_by_name ON runs (id)")
        connection.commit()
    before = text_of(path)
    for read_only in (False, True):
        with pytest.raises(
            StorageError,
            match=rf"version {version} to {SCHEMA_VERSION}; it is unchanged: .*index runs_by_name"
            rf" already exists",
        ):
            Store(tmp_path, read_only=read_only)
    assert text_of(path) == before
    ask(path, "DROP INDEX runs_by_name")
    with contextlib.closing(Store(tmp_path)) as store:
        assert len(store.runs()) == 2


def test_servers_that_open_the_same_store_at_once_upgrade_it_once(tmp_path):
    """Whoever comes second waits and finds it done; stores of others are upgraded at the same
    time.
    """
    folders = [tmp_path / str(number % 2) for number in range(8)]
    for folder in set(folders):
        restore(3, folder)
    errors = []
    together = threading.Barrier(len(folders))

    def open_it(folder):
        together.wait()
        try:
            Store(folder).close()
        except StorageError as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it, args=[folder]) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for folder in set(folders):
        assert stamped(folder / "shoal.db") == [(str(SCHEMA_VERSION),)]
        assert len(rows_of(folder / "shoal.db")["runs"]) == 2


@pytest.mark.parametrize("read_only", [False, True])
def test_a_store_of_a_newer_version_is_left_alone(read_only, tmp_path):
    """The error names both versions and the way out."""
    Store(tmp_path).close()
    path = tmp_path / "shoal.db"
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '99'")
    connection.close()
    before = text_of(path)
    with pytest.raises(
        StorageError,
        match=rf"schema version 99.*reads up to {SCHEMA_VERSION}; use the newer version",
    ):
        Store(tmp_path, read_only=read_only)
    assert text_of(path) == before


@pytest.mark.parametrize(
    "made",
    [
        "CREATE TABLE something (a)",
        (
            "CREATE TABLE shoal_store (schema_version INTEGER NOT NULL); INSERT INTO shoal_store "
            "VALUES (2)"
        ),
        "CREATE TABLE alembic_version (version_num); INSERT INTO alembic_version VALUES ('1d9f')",
    ],
)
def test_a_database_without_the_mark_of_a_store_is_left_alone(made, tmp_path):
    """Another program's, or that of a Shoal older than any that is read: never filled with our
    tables.
    """
    path = tmp_path / "shoal.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(made)
    before = text_of(path)
    with pytest.raises(
        StorageError, match=r"not the mark.*before schema version 3.*use another store folder"
    ):
        Store(tmp_path)
    assert text_of(path) == before


def test_a_server_that_is_killed_while_it_makes_a_store_leaves_none(tmp_path):
    """The tables come in one transaction with their mark, so that what is there is empty or
    whole.
    """
    script = """
import os, signal, sys
from pathlib import Path
from alembic import command
from broker_server.store import Store
done = command.stamp
command.stamp = lambda *given: (done(*given), os.kill(os.getpid(), signal.SIGKILL))
Store(Path(sys.argv[1]))
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
    assert (tmp_path / "shoal.db").exists()
    assert ask(tmp_path / "shoal.db", "SELECT name FROM sqlite_master") == []
    with contextlib.closing(Store(tmp_path)) as store:
        assert store.runs() == []


def test_a_store_of_this_version_is_opened_without_alembic(tmp_path):
    """It is not needed there, and takes longer to load than a store to open."""
    Store(tmp_path).close()
    script = """
import sys
from pathlib import Path
from broker_server.store import Store
from tests.marking import mostly_slow
for read_only in (False, True):
    Store(Path(sys.argv[1]), read_only=read_only).close()
print("alembic" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False"
