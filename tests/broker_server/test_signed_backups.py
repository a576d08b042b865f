"""Backups say whose they are: one's own is restored, and one that is changed, unsigned or another's
is refused.
"""

import contextlib
import json
import os
import re
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from broker_server.service.authority import found_fleet
from broker_server.service.backup_keys import known_keys, signers, user_key_path, user_signer
from broker_server.service.new_fleet import NewFleet
from broker_server.settings.named import list_named_settings
from broker_server.store import Store
from broker_server.store.backup import back_up
from broker_server.store.backup_signature import (
    INVENTORY,
    SIGNATURES,
    Member,
    sign,
    write_inventory,
)
from broker_server.store.records import RunRecord, VersionRecord
from broker_server.store.restoring import restore
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.digests import blob_digest, blob_path
from fleet_protocol.errors import BlobError, ConfigError
from shoal.cli.main import main

ROOT = Path(__file__).parents[2]
CALLED = "/usr/lib/python3.11/subprocess.py:getoutput"

MEASURED = """
import resource, sys
from pathlib import Path
from broker_server.store.restoring import restore
from fleet_protocol.errors import ShoalError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    restore(Path(sys.argv[1]), Path(sys.argv[2]), known=sys.argv[3:])
    print("restored")
except ShoalError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.fixture(autouse=True)
def own_configuration(tmp_path, monkeypatch):
    """A user without a key yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "me"))


def config_json(**evaluation):
    settings = {
        "fleet": "lab",
        "store": "/srv/store",
        "model": {"artifacts": "/srv/artifacts", "arch": "tiny"},
    }
    return json.dumps(
        {**settings, "broker": {"url": "mqtt://broker.example:1883"}, "evaluation": evaluation}
    )


def make_store(folder, config=None):
    """A store with a run and two blobs."""
    with contextlib.closing(Store(folder)) as store:
        run = RunRecord(
            "r1", "lab", "tiny", config or config_json(), "running", None, 1.0, None, 0, 0
        )
        store.add_run(run, VersionRecord("r1", 0, 0, "b" * 64, None, None, 1.0, None))
    blobs = BlobStore(folder / "blobs")
    return [blobs.put(content) for content in (b"one" * 1000, b"two" * 1000)]


@pytest.fixture
def given(tmp_path):
    """A signed backup of a store, and the digests of its blobs."""
    digests = make_store(tmp_path / "store")
    back_up(tmp_path / "store", tmp_path / "good.zip", signers(tmp_path / "store"))
    return tmp_path / "good.zip", digests


def members_of(file):
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(file, members, comment=b""):
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.comment = comment


def changed_database(tmp_path, database):
    """The same database with a program in the configuration of its run."""
    path = tmp_path / "changed.db"
    path.write_bytes(database)
    with contextlib.closing(sqlite3.connect(path)) as opened:
        opened.execute("UPDATE runs SET config = replace(config, 'tiny', 'evil')")
        opened.commit()
        opened.execute("PRAGMA journal_mode=DELETE")
    return path.read_bytes()


def a_changed_database(tmp_path, members):
    return {**members, "shoal.db": changed_database(tmp_path, members["shoal.db"])}, b""


def a_comment_made_anew(tmp_path, members):
    database = changed_database(tmp_path, members["shoal.db"])
    return {**members, "shoal.db": database}, blob_digest(database).encode()


def a_comment_alone(_, members):
    return members, blob_digest(members["shoal.db"]).encode()


def one_byte_of_a_blob(_, members):
    name = next(name for name in members if "objects" in name)
    return {**members, name: members[name][:-1] + b"?"}, b""


def an_added_blob(_, members):
    return {**members, f"blobs/objects/{blob_path(blob_digest(b'more')).as_posix()}": b"more"}, b""


def an_added_file(_, members):
    return {**members, "fleet.toml": b"fleet = 'evil'"}, b""


def a_missing_blob(_, members):
    name = next(name for name in members if "objects" in name)
    return {key: value for key, value in members.items() if key != name}, b""


def a_blob_of_another_name(_, members):
    first, second = [name for name in members if "objects" in name]
    return {**members, first: members[second], second: members[first]}, b""


def an_inventory_made_anew(tmp_path, members):
    changed, _ = a_changed_database(tmp_path, members)
    listed = [
        Member(name, blob_digest(data), len(data))
        for name, data in changed.items()
        if "/" in name or "db" in name
    ]
    return {**changed, INVENTORY: write_inventory(listed)}, b""


def no_inventory(_, members):
    return {name: data for name, data in members.items() if name != INVENTORY}, b""


def signatures_of_nothing(_, members):
    return {**members, SIGNATURES: b"{}"}, b""


@pytest.mark.attack(
    "file",
    "A backup has modified members or a new signature",
    "refused even with `--trust`; the error names the backup",
    "2026-11-28",
)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (a_changed_database, "shoal.db"),
        (a_comment_made_anew, "a comment, which is not signed|shoal.db"),
        (a_comment_alone, "a comment, which is not signed"),
        (one_byte_of_a_blob, "'blobs/objects/.*' in .* is damaged"),
        (an_added_blob, "'blobs/objects/.*' was added after it was signed"),
        (an_added_file, "'fleet.toml' was added after it was signed"),
        (a_missing_blob, "'blobs/objects/.*' is missing"),
        (a_blob_of_another_name, "'blobs/objects/.*' in .* is damaged"),
        (an_inventory_made_anew, "its inventory was changed after it was signed"),
        (no_inventory, "no member 'inventory'"),
        (signatures_of_nothing, "its signatures are malformed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("trust", [False, True])
def test_a_backup_that_was_changed_is_refused_by_name(change, said, trust, given, tmp_path):
    """With `trust`, too: it is neither what was signed nor what it says it is. Nothing is left
    behind.
    """
    file, _ = given
    members, comment = change(tmp_path, members_of(file))
    packed(tmp_path / "bad.zip", members, comment)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BlobError, match=said) as caught:
        restore(
            tmp_path / "bad.zip",
            tmp_path / "made",
            known=known_keys(tmp_path / "made"),
            trust=trust,
        )
    assert "bad.zip" in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    restore(file, tmp_path / "made", known=known_keys(tmp_path / "made"))


def test_every_byte_of_a_backup_is_under_the_signature(given, tmp_path):
    """Whatever byte of it is changed, what is restored is what was signed, or nothing is."""
    file, _ = given
    data = file.read_bytes()
    wanted = members_of(file)
    for at in range(0, len(data), max(1, len(data) // 150)):
        changed = bytearray(data)
        changed[at] ^= 0x40
        (tmp_path / "bad.zip").write_bytes(changed)
        target = tmp_path / f"made{at}"
        with contextlib.suppress(BlobError, ConfigError):
            restore(tmp_path / "bad.zip", target, known=known_keys(target))
            restored_files = {
                str(path.relative_to(target)): path.read_bytes()
                for path in target.rglob("*")
                if path.is_file()
            }
            assert {
                name: data for name, data in wanted.items() if name not in {INVENTORY, SIGNATURES}
            } == restored_files


def test_the_users_own_key_is_made_once_for_the_user_alone(given, tmp_path):
    """And is the one that restores without a question."""
    file, digests = given
    path = user_key_path()
    assert path == tmp_path / "me" / "shoal" / "backup.pem"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = user_signer().public
    assert user_signer().public == first
    (statement,) = restore(file, tmp_path / "made", known=known_keys(tmp_path / "made"))
    assert statement.key == first
    assert [BlobStore(tmp_path / "made" / "blobs").has(digest) for digest in digests] == [
        True,
        True,
    ]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read your key: chmod 600"):
        signers(tmp_path / "store")


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0, " ".join("".join(capsys.readouterr()).split())


def unsigned(file, store):
    """A backup as it was made before backups were signed, with the comment made anew."""
    shutil.rmtree(store / "configurations", ignore_errors=True)  # which no backup has
    members = {
        str(path.relative_to(store)): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file()
    }
    packed(file, members, blob_digest(members["shoal.db"]).encode())


@pytest.mark.attack(
    "file",
    "A stranger's backup names a program in the configuration of its run",
    "refused without `--trust`; with `--trust`, the name is shown and ignored",
    "2026-11-28",
)
def test_an_unsigned_backup_needs_trust_which_shows_what_it_names(tmp_path, monkeypatch, capsys):
    """A stranger's store whose run names a program: who takes it is shown all that it names."""
    make_store(
        tmp_path / "theirs",
        config_json(data={"kind": "python", "entry_point": CALLED, "options": {"cmd": "id"}}),
    )
    unsigned(tmp_path / "theirs.zip", tmp_path / "theirs")
    code, printed = command(
        monkeypatch, capsys, "restore", tmp_path / "theirs.zip", tmp_path / "made"
    )
    assert code == ConfigError.exit_code
    assert "is not signed, so its origin is unknown" in printed
    assert "--trust" in printed
    assert not (tmp_path / "made").exists()
    code, printed = command(
        monkeypatch,
        capsys,
        "restore",
        tmp_path / "theirs.zip",
        tmp_path / "made",
        "--trust",
        "--json",
    )
    assert code == 0, printed
    listed = json.loads(printed)
    settings = {
        value: name.rpartition(".")[0]
        for name, value in listed.items()
        if name.endswith(".setting")
    }
    rows = {
        setting: (listed[f"{row}.kind"], listed[f"{row}.names"])
        for setting, row in settings.items()
    }
    assert listed["signed_by"] == []
    assert rows["evaluation.data.entry_point"] == ("program", CALLED)
    assert rows["evaluation.data.options.cmd"] == ("word", "id")
    assert rows["model.artifacts"] == ("path", "/srv/artifacts")
    assert rows["broker.url"] == ("address", "mqtt://broker.example:1883")
    assert "evaluation.data.kind" not in rows  # one of a few words of Shoal's own
    with contextlib.closing(Store(tmp_path / "made", read_only=True)) as store:
        assert [run.id for run in store.runs()] == ["r1"]


def test_a_backup_of_somebody_else_says_whose_it_is(tmp_path, monkeypatch, capsys):
    """Signed well, by another user: the message has the words and the key, and moves no cursor."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "they"))
    monkeypatch.setattr("getpass.getuser", lambda: "mallory\x1b[2J")
    make_store(tmp_path / "theirs")
    assert (
        command(monkeypatch, capsys, "backup", tmp_path / "theirs", tmp_path / "theirs.zip")[0] == 0
    )
    their_key = user_signer().public
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "me"))
    code, printed = command(
        monkeypatch, capsys, "restore", tmp_path / "theirs.zip", tmp_path / "made"
    )
    assert code == ConfigError.exit_code
    assert r"mallory\x1b[2J on" in printed
    assert their_key[:16] in printed
    assert "--trust" in printed
    code, printed = command(
        monkeypatch, capsys, "restore", tmp_path / "theirs.zip", tmp_path / "made", "--trust"
    )
    assert code == 0
    assert "names in its runs" in printed
    assert "/srv/artifacts" in printed


def test_the_operator_restores_a_fleets_backup_anywhere(tmp_path, monkeypatch, capsys):
    """On another machine, with the fleet's folder there: no new step, also where only the public
    key is at hand.
    """
    folder = tmp_path / "lab"
    found_fleet(folder, NewFleet("lab", "127.0.0.1"))
    make_store(folder / "store")
    code, printed = command(monkeypatch, capsys, "backup", folder / "store", tmp_path / "lab.zip")
    assert code == 0
    assert "signed by the operator of fleet lab and " in printed
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another machine"))
    code, printed = command(
        monkeypatch, capsys, "restore", tmp_path / "lab.zip", tmp_path / "elsewhere"
    )
    assert (code, "the operator of fleet lab" in printed) == (ConfigError.exit_code, True)
    for target, options in ((folder / "again", ()), (tmp_path / "elsewhere", ("--folder", folder))):
        code, printed = command(
            monkeypatch, capsys, "restore", tmp_path / "lab.zip", target, *options
        )
        assert code == 0, printed
    (folder / "operator.pem").rename(tmp_path / "in a safe")
    assert command(monkeypatch, capsys, "restore", tmp_path / "lab.zip", folder / "third")[0] == 0
    assert not user_key_path().exists()


def test_a_service_without_a_home_signs_with_the_operators_key_alone(tmp_path, monkeypatch):
    """And without that key it says what is missing."""
    folder = tmp_path / "lab"
    found_fleet(folder, NewFleet("lab", "127.0.0.1"))
    (tmp_path / "me").write_text("no folder")
    assert [signer.words for signer in signers(folder / "store")] == ["the operator of fleet lab"]
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(ConfigError, match="set XDG_CONFIG_HOME"):
        signers(tmp_path / "store")


@pytest.mark.attack(
    "file",
    "A backup's database has a trigger, a view or a virtual table",
    "refused; the error names it",
    "2026-11-28",
)
@pytest.mark.parametrize(
    "harm",
    [
        "CREATE TRIGGER harm AFTER INSERT ON events BEGIN DELETE FROM runs; END",
        "CREATE VIEW harm AS SELECT 1",
        "CREATE VIRTUAL TABLE harm USING fts5(text)",
        "CREATE TABLE harm (a)",
        "CREATE INDEX harm ON runs (hex(id))",
    ],
)
def test_a_database_with_programs_of_its_own_is_no_store(harm, tmp_path):
    """A trigger, a view or a virtual table that somebody put into it, also where it is trusted."""
    make_store(tmp_path / "theirs")
    with contextlib.closing(sqlite3.connect(tmp_path / "theirs" / "shoal.db")) as opened:
        opened.execute("PRAGMA journal_mode=DELETE")
        opened.execute(harm)
        opened.commit()
    unsigned(tmp_path / "theirs.zip", tmp_path / "theirs")
    with pytest.raises(BlobError, match="'harm', which does not occur in a store"):
        restore(tmp_path / "theirs.zip", tmp_path / "made", trust=True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "harm",
    [
        "ALTER TABLE runs ADD COLUMN x GENERATED ALWAYS AS (hex(id)) VIRTUAL",
        "ALTER TABLE runs ADD COLUMN x",
        "ALTER TABLE events ADD COLUMN x INTEGER CHECK (hex(x) != '')",
        "DROP INDEX tasks_by_round; CREATE INDEX tasks_by_round ON tasks (hex(run))",
    ],
)
def test_a_table_that_computes_is_not_of_a_store(harm, tmp_path):
    """A generated column, a check, an index on an expression, or a column that no store has."""
    make_store(tmp_path / "theirs")
    with contextlib.closing(sqlite3.connect(tmp_path / "theirs" / "shoal.db")) as opened:
        opened.execute("PRAGMA journal_mode=DELETE")
        opened.executescript(harm)
        opened.commit()
    unsigned(tmp_path / "theirs.zip", tmp_path / "theirs")
    with pytest.raises(BlobError, match=r"with (a|an) .*, which does not occur in a store"):
        restore(tmp_path / "theirs.zip", tmp_path / "made", trust=True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE runs SET config = x'fffe00'", "table runs, row id 'r1', column config: "),
        (
            "UPDATE runs SET config = replace(hex(zeroblob(50000)), '00', '[')",
            "column config: |nested too deeply",
        ),
        ("UPDATE runs SET id = '`id`'", "column id: '`id`' is not a valid name"),
        (
            "UPDATE versions SET digest = '../x'",
            "table versions, row run 'r1', number '0', column digest: ",
        ),
        ("UPDATE runs SET created_at = 9e999", "column created_at: "),
        ("INSERT INTO devices VALUES ('lab', 'd', 1, 'idle', 'garbage', 1, 1)", "column profile: "),
    ],
)
def test_what_cannot_be_shown_is_not_restored(change, message, tmp_path, monkeypatch, capsys):
    """A stranger's rows are read before the store is in its place; then there is no store, and one
    line says why.
    """
    make_store(tmp_path / "theirs")
    with contextlib.closing(sqlite3.connect(tmp_path / "theirs" / "shoal.db")) as opened:
        opened.execute("PRAGMA journal_mode=DELETE")
        opened.execute(change)
        opened.commit()
    unsigned(tmp_path / "theirs.zip", tmp_path / "theirs")
    monkeypatch.setattr(
        sys,
        "argv",
        ["shoal", "restore", str(tmp_path / "theirs.zip"), str(tmp_path / "made"), "--trust"],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (BlobError.exit_code, 1), error
    assert re.search(message, error), error
    assert not (tmp_path / "made").exists()


def measured(file, target, *keys):
    """What a restore says in a process of its own, and the memory that it took, in MB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, file, target, *keys],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    )
    printed, kilobytes = done.stdout.splitlines()
    return printed, int(kilobytes) / 1000


@pytest.mark.attack(
    "file",
    "A backup of half a megabyte unpacks to 500 MB",
    "refused, using less than 150 MB of memory",
    "2026-11-28",
)
@pytest.mark.slow
def test_a_bomb_is_refused_in_little_memory(tmp_path):
    """Half a megabyte that unpacks to 500: a backup is never larger unpacked than packed."""
    bomb = tmp_path / "bomb.zip"
    with (
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("shoal.db", "w") as member,
    ):
        for _ in range(500):
            member.write(bytes(1_000_000))
    assert bomb.stat().st_size < 600_000
    printed, megabytes = measured(bomb, tmp_path / "made")
    assert "unpacks to 500,000,000, more than 1 times as many" in printed
    assert megabytes < 150
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_large_backup_of_ones_own_is_restored_in_little_memory(tmp_path):
    """300 MB in one blob go from file to file in pieces."""
    make_store(tmp_path / "store")
    BlobStore(tmp_path / "store" / "blobs").put(os.urandom(1_000_000) * 300)
    assert back_up(tmp_path / "store", tmp_path / "large.zip", [user_signer()]) == 3
    printed, megabytes = measured(tmp_path / "large.zip", tmp_path / "made", user_signer().public)
    assert printed == "restored"
    assert megabytes < 150


def test_more_than_the_bounds_is_restored_where_it_is_asked_for(
    given, tmp_path, monkeypatch, capsys
):
    """The message says what the bound is, and which option raises it."""
    file, _ = given
    size = file.stat().st_size
    for option, low, high in (("--most-bytes", 1000, size), ("--most-files", 1, 2)):
        code, printed = command(
            monkeypatch, capsys, "restore", file, tmp_path / option, option, low
        )
        assert (code, option in printed, "the limit is" in printed) == (
            BlobError.exit_code,
            True,
            True,
        ), printed
        assert (
            command(monkeypatch, capsys, "restore", file, tmp_path / option, option, high)[0] == 0
        )


def test_a_configuration_that_cannot_be_read_shows_every_text():
    """Of another version, or no JSON at all."""
    assert [
        (setting.setting, setting.kind)
        for setting in list_named_settings('{"a": {"b": ["/bin/sh", "x"]}}')
    ] == [
        ("a.b.0", "path"),
        ("a.b.1", "word"),
    ]
    assert list_named_settings("no json")[0].value == "no json"


def test_two_signers_are_each_enough(tmp_path, monkeypatch):
    """One of them known is enough; a signature that another has made of the same inventory changes
    nothing.
    """
    make_store(tmp_path / "store")
    mine = user_signer()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    theirs = user_signer()
    back_up(tmp_path / "store", tmp_path / "both.zip", [mine, theirs])
    for number, signer in enumerate((mine, theirs)):
        assert (
            len(restore(tmp_path / "both.zip", tmp_path / f"made{number}", known=[signer.public]))
            == 2
        )
    members = members_of(tmp_path / "both.zip")
    members[SIGNATURES] = sign(members[INVENTORY], [theirs])
    packed(tmp_path / "theirs.zip", members)
    with pytest.raises(ConfigError, match="not by you or the operator"):
        restore(tmp_path / "theirs.zip", tmp_path / "made", known=[mine.public])
