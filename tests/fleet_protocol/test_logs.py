"""A log that programs collect: an object a line, with the ids that a line is about; for people it
stays as it was.
"""

import json
import os
import socket
import subprocess
import sys

import pytest

BOARD = """
import logging
from device_runtime.agent.journal import Journal
from fleet_protocol.logs import log_to_stderr
from fleet_protocol.messages import Offer
log_to_stderr(logging.INFO, "%(levelname)s %(message)s")
journal = Journal("pi-1")
journal.info("state=idle")
journal.follow(Offer.model_construct(round=3, task="t3-abc"))
try:
    raise ValueError("no such \\u00fcnit")
except ValueError as error:
    journal.error('a "line"\\nof two', error)
logging.getLogger("other").warning("%s devices", 2)
"""


def lines(code, **given):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **given}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stderr.splitlines()


def test_a_board_says_device_round_and_task_in_fields_of_their_own():
    """With the sentence alone as message, and where something failed with where."""
    idle, failed, other = map(json.loads, lines(BOARD, SHOAL_LOG="json"))
    assert idle.pop("at") > 1.7e9
    assert idle == {
        "level": "info",
        "logger": "shoal.device",
        "device": "pi-1",
        "message": "state=idle",
    }
    ids = {key: failed[key] for key in ("level", "device", "round", "task", "message")}
    assert ids == {
        "level": "error",
        "device": "pi-1",
        "round": 3,
        "task": "t3-abc",
        "message": 'a "line" of two',
    }
    assert failed["error"].endswith("ValueError: no such ünit")
    assert (other["message"], other.keys() & {"device", "round", "task", "error"}) == (
        "2 devices",
        set(),
    )


def test_people_read_lines():
    """Unless it is asked for by name."""
    for given in ({"SHOAL_LOG": ""}, {"SHOAL_LOG": "text"}):
        found = lines(BOARD, **given)
        assert found[0] == "INFO device=pi-1 state=idle"
        assert 'ERROR device=pi-1 round=3 task=t3-abc a "line" of two' in found


@pytest.mark.parametrize("program", [["-m", "device_runtime"], ["-m", "shoal", "device", "run"]])
def test_both_programs_of_a_board_log_so(tmp_path, program):
    """What comes before an error that ends it."""
    config = tmp_path / "device.toml"
    config.write_text(
        'fleet = "lab"\ndevice = "pi-1"\nbroker = "mqtt://127.0.0.1:1"\nstate_dir = "state"\n'
        "connect_timeout_seconds = 1\n"
        '[data]\nkind = "npz"\npath = "none.npz"\n'
    )
    typed = [sys.executable, *program, "--config", str(config)]
    done = subprocess.run(
        typed,
        env={**os.environ, "SHOAL_LOG": "json"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    *said, error = done.stderr.splitlines()
    assert {json.loads(line)["device"] for line in said} == {"pi-1"}, said
    assert error.startswith("error: ")


def test_the_journal_gets_level_and_ids_as_fields(tmp_path):
    """Where standard error is systemd's; other lines have no ids. Without its socket they are lines
    as ever.
    """
    own = """
import os, sys
import fleet_protocol.logs as logs
logs._JOURNAL = os.environ["PLACE"]
about = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{about.st_dev}:{about.st_ino}"
"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.settimeout(60)
        journal.bind(str(tmp_path / "socket"))
        assert lines(own + BOARD, PLACE=str(tmp_path / "socket")) == []
        said = [journal.recv(1 << 16) for _ in range(3)]
    found = []
    for data in said:
        fields = {}
        left = data
        while left:
            name, _, rest = left.partition(b"\n")
            size = int.from_bytes(rest[:8], "little")
            fields[name.decode()], left = rest[8 : 8 + size].decode(), rest[8 + size + 1 :]
        found.append(fields)
    idle, failed, other = found
    assert idle == {
        "MESSAGE": "device=pi-1 state=idle", "PRIORITY": "6", "SYSLOG_IDENTIFIER": "shoal", "SHOAL_DEVICE": "pi-1"
    }  # fmt: skip
    assert (failed["PRIORITY"], failed["SHOAL_ROUND"], failed["SHOAL_TASK"]) == ("3", "3", "t3-abc")
    assert failed["MESSAGE"].endswith("ValueError: no such ünit")
    assert (other["PRIORITY"], "SHOAL_DEVICE" in other) == ("4", False)
    assert lines(own + BOARD, PLACE=str(tmp_path / "none"))[0] == "INFO device=pi-1 state=idle"
