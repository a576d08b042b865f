"""Bytes from outside, changed at random: for half a minute here, a million of them by `make
fuzz`.
"""

import secrets
import subprocess
import sys

import pytest

from device_runtime.training import own_model_files
from fleet_protocol.identity import papers
from fleet_protocol.identity.chunks import ChunkVerifier
from fleet_protocol.identity.envelope import OpenedMessage, Verifier
from tests import fuzz as fuzzing
from tests import private_fuzz


@pytest.mark.slow
def test_half_a_minute_of_changed_bytes():
    """Other changes every time; what breaks a reader is printed."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    found = fuzzing.fuzz(10**9, 30.0, seed)
    assert found.count > 1000
    assert len(found.refused) == 17


def believing(_verifier, _topic, envelope, **_):
    return OpenedMessage(envelope, None)


@pytest.mark.parametrize(
    ("where", "name", "broken", "seen"),
    [
        (Verifier, "open", believing, fuzzing.Corruption),
        (
            ChunkVerifier,
            "open",
            lambda _verifier, _topic, envelope: OpenedMessage(envelope, None),
            fuzzing.Corruption,
        ),
        (
            papers,
            "read_signed",
            lambda kind, data, _: kind.model_validate_json(data[64:]),
            (fuzzing.Corruption, ValueError),
        ),
        (fuzzing, "unseal", lambda data, *_: data, fuzzing.Corruption),
        (fuzzing, "tensors_in", lambda data: data[10**6], IndexError),
        (private_fuzz, "check_tensors", lambda *_: None, AssertionError),
        (own_model_files, "blob_in", lambda data: data[10**6], IndexError),
    ],
    ids=[
        "an envelope is believed",
        "a chunk is believed",
        "papers are believed",
        "a seal is believed",
        "a reader crashes",
        "a private part is taken",
        "a reader of kept files crashes",
    ],
)
def test_the_fuzz_sees_a_reader_that_is_broken(monkeypatch, where, name, broken, seen):
    """Nearly always within a thousand readings, which differ with the keys that are drawn."""
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(seen):
        fuzzing.fuzz(50_000, 60.0, 1)


FAILING = """
import time
from tests import fuzz

def crash(data):
    raise IndexError

fuzz.tensors_in = crash
fuzz.HANG_SECONDS = 2 / 60
try:
    fuzz.fuzz(1000, 60.0, 1)
except IndexError:
    time.sleep(4)
    print("goes on")
"""


@pytest.mark.slow
def test_a_process_in_which_a_reading_failed_goes_on():
    """What ends a process whose reading hangs once ended pytest's five minutes after a reading that
    had failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "goes on\n"
