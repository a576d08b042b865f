"""Changed files of operators are used or refused by name: some of what `python -m
tests.operator_fuzz` does.
"""

import json
import re
import secrets
import subprocess
import sys

import pytest

from fleet_protocol.errors import ShoalError
from tests.operator_files import file_kinds

FOUND = {
    "an infinite size in a layout": (
        "sets",
        "layout.json of a set",
        rb'"hidden",\s+1\s',
        rb'"hidden", 1e999',
    ),
    "revocations that are no hexadecimal": (
        "enrolments",
        "registry.json",
        rb'"revoked": ?"..',
        rb'"revoked": "=9',
    ),
    "a key of an unknown kind": (
        "enrolments",
        "operator.pem",
        rb"MC4CAQAwBQYDK2Vw",
        rb"MC4CAQAwBQYDK0Vw",
    ),
    "a key that OpenSSL cannot hold": (
        "enrolments",
        "operator.pem",
        rb"MC4CAQAwBQYDK2Vw",
        rb"MC4CAQAwBQYDK2Vv",
    ),
    "a size beyond all floats": (
        "sets",
        "layout.json of a set",
        rb'"size": 8,',
        b'"size": ' + b"9" * 400 + b",",
    ),
    "a number below all": (
        "enrolments",
        "registry.json",
        rb'"epoch": ?\d+',
        rb'"epoch": "-1"',
    ),
    "a table whose name is no text": (
        "backups",
        "shoal.db of a stranger",
        rb"tabletasks",
        b"table\xcfasks",
    ),
    "a version that no certificate has": (
        "enrolments",
        "ca.pem",
        rb"AwIBAgIU",
        rb"AwIBAwIU",
    ),
    "a folder with U+0000": (
        "configurations",
        "fleet.toml",
        rb'"strategies"',
        rb'"a\\u0000b"',
    ),
}


@pytest.mark.attack(
    "file",
    "Corrupted layouts, registries, keys, databases and configurations that once raised an error "
    "without the file's name",
    "refused with an error that names the file",
    "2026-11-29",
)
@pytest.mark.parametrize("case", FOUND)
def test_what_the_fuzz_has_found_is_refused_by_name(case, tmp_path):
    """Each once raised an error that has no name."""
    group, name, old, new = FOUND[case]
    kinds = {kind.name: kind for kind in file_kinds(tmp_path / "files", group)}
    samples = [sample for sample in kinds[name].samples if re.search(old, sample)]
    assert samples
    with pytest.raises(ShoalError):
        kinds[name].use(re.sub(old, new, samples[0], count=1))


def _fuzzed(*arguments):
    """In a process of its own, since nothing removes what watches a process."""
    command = [sys.executable, "-m", "tests.operator_fuzz", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.attack(
    "file",
    "Artifact sets, backups, bundles, enrolments and configurations that were corrupted at random",
    "used safely, or refused with an error that names the file; no other file is opened, and no "
    "program is started",
    "2026-11-28",
)
def test_changed_files_of_operators_are_used_or_refused_by_name():
    """Other changes every time; what breaks a reader is printed."""
    seed = secrets.randbits(32)
    done = _fuzzed("--count", 300, "--seconds", 60, "--seed", seed)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    record = json.loads(done.stdout)
    assert record["count"] >= 300 or record["seconds"] > 50
    assert sum(record["refused"].values()) > 80


BROKEN = """
import subprocess, sys, tempfile
from pathlib import Path
from fleet_protocol.errors import ConfigError

from tests.operator_files import FileKind

from tests import operator_fuzz

def of(use):
    def kinds(folder, group):
        folder.mkdir()
        yield FileKind("broken", group, 1, (b"whole 1",), use)
    return kinds


def after_the_first(act):
    def use(data):
        if data != b"whole 1":
            act()
    return use

def nameless():
    raise IndexError("no name")

def reading():
    Path("/etc/hostname").read_bytes()

def writing():
    Path(tempfile.gettempdir(), "written").write_bytes(b"")

def starting():
    subprocess.run(["true"], check=True)

def refusing():
    raise ConfigError("by name")

for act in (nameless, reading, writing, starting, refusing):
    operator_fuzz.file_kinds = of(after_the_first(act))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ground").mkdir()
        try:
            operator_fuzz.fuzz(20, 30.0, 1, Path(folder) / "ground", "sets")
        except (AssertionError, IndexError):
            print(act.__name__, "is seen")
        else:
            print(act.__name__, "passes")
"""


def test_the_fuzz_sees_a_reader_that_is_broken():
    """An error without a name, a file elsewhere that is read or written, and a program."""
    done = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == [
        "nameless is seen",
        "reading is seen",
        "writing is seen",
        "starting is seen",
        "refusing passes",
    ], done.stderr
