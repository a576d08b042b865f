"""What devices and the store say is text, never markup."""

import io
import signal
import subprocess
import sys
import types

import pytest
from rich.console import Console

import shoal.__main__
from fleet_protocol import control
from fleet_protocol.errors import ConfigError, RefusalReason
from shoal.cli import console
from shoal.cli.console import print_rows, release_text
from shoal.cli.progress import RunDisplay
from tests.marking import mostly_slow

DETAIL = "name its set in [own_model] of this board [/bold]"


def test_what_a_device_says_is_shown_as_it_is():
    """A word in brackets is neither swallowed nor an error."""
    file = io.StringIO()
    display = RunDisplay(Console(file=file, width=200), "run")
    refused = control.UpdateRefused(
        run="r",
        seconds=1.0,
        round=1,
        device="d",
        by="device",
        reason=RefusalReason.UNSUPPORTED,
        detail=DETAIL,
    )
    display.show(refused)
    display.show(control.RoundAbandoned(run="r", seconds=1.0, round=1, reason=DETAIL, again=True))
    assert file.getvalue().count(DETAIL) == 2


def test_where_nobody_watches_a_terminal_the_wait_for_devices_is_a_line():
    """Each time it changes; a run that waits is not silent in a file."""
    file = io.StringIO()
    display = RunDisplay(Console(file=file, width=200), "run")
    for online in ((), ("attic",)):
        display.show(
            control.FleetChanged(
                run="r", seconds=1.0, online=online, eligible=len(online), needed=3
            )
        )
    assert file.getvalue().splitlines() == [
        f"waiting for devices: {count} of 3 ready, {count} online" for count in range(2)
    ]


def test_cells_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]):
    """So are the notes of a round in a table."""
    print_rows("rounds", [{"note": DETAIL}], empty="none")
    assert DETAIL in capsys.readouterr().out


def test_a_table_that_is_too_wide_is_a_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """No cell is without its words on a terminal of 40 columns; one that fits, folded, stays a
    table.
    """
    monkeypatch.setattr(console, "PIPE_WIDTH", 40)
    wide = {f"column {at}": f"value{at} and-more" for at in range(14)}
    print_rows("devices", [wide, wide], empty="none")
    shown = capsys.readouterr().out
    assert shown.count("column 13: value13 and-more\n") == 2
    assert max(map(len, shown.splitlines())) <= 40
    print_rows("few", [{"note": "several words in a cell that is folded"}], empty="none")
    assert "┃" in capsys.readouterr().out


def test_a_narrow_terminal_leaves_columns_out_before_it_breaks_a_date(capsys, monkeypatch):
    """Columns that matter less give way, and are named; a date is in one line."""
    row = {"device": "attic", "board": "aarch64, 4 cores", "last seen": "2026-11-28 20:20:25"}
    monkeypatch.setattr(console, "PIPE_WIDTH", 60)
    print_rows("devices", [row], empty="none", optional=("board",))
    assert "aarch64, 4 cores" in capsys.readouterr().out
    monkeypatch.setattr(console, "PIPE_WIDTH", 40)
    print_rows("devices", [row], empty="none", optional=("board",))
    shown = capsys.readouterr().out
    assert "│ attic  │ 2026-11-28 20:20:25 │" in shown
    assert "columns omitted: board; a wider terminal or --json shows them" in shown


@pytest.mark.parametrize(
    ("words", "has_hint"),
    mostly_slow(
        [
            (["export", "--models", "mine.py", "--arch", "a"], True),
            (["export", "--arch", "no-such"], False),
            (["export", "--models", "refused.py", "--arch", "a"], False),
        ],
        lambda case: case[1],
    ),
)
def test_a_failure_of_the_users_own_code_has_a_traceback_that_can_be_seen(
    tmp_path, words, has_hint
):
    """One line hides where it came from; who asks for it twice as loudly sees that."""
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text("def inner():\n    raise ValueError('a')\n\n\ninner()\n")

    (tmp_path / "refused.py").write_text(
        "import shoal\n@shoal.architecture()\ndef a(cut):\n    pass\n"  # Shoal says what it lacks
    )

    def run(*options):
        command = [sys.executable, "-m", "shoal", *options, *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == ConfigError.exit_code
        return done.stderr

    plain = run()
    assert "Traceback" not in plain
    assert ("`shoal -vv`" in plain) is has_hint
    assert "Traceback" not in run("-v")
    loud = run("-vv")
    assert "Traceback" in loud
    assert ("in inner" in loud) is has_hint
    assert "`shoal -vv`" not in loud
    assert ("model file mine.py, line 5 failed" in plain) is has_hint


def test_output_that_nobody_takes_is_no_bug(monkeypatch):
    """Closed it is not missed, on a full disk it is said with the code of one; and Ctrl-C may come
    while it loads.
    """
    command = f"{sys.executable} -m shoal --version"
    closed = subprocess.run(["sh", "-c", f"{command} >&- 2>&-"], timeout=120, check=False)
    full = subprocess.run(
        ["sh", "-c", f"{command} >/dev/full"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert closed.returncode == 0
    assert (full.returncode, full.stderr) == (
        7,
        "error: cannot write the output: No space left on device\n",
    )

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "shoal.cli.main", types.SimpleNamespace(main=interrupted))
    with pytest.raises(SystemExit, match="130"):
        shoal.__main__.main()


def test_a_release_is_told_with_why_it_failed():
    """A path of a file that is on its way is nobody's business."""
    assert release_text("0.1.0", None) == release_text("0.1.0", "running 0 0 0") == "0.1.0"
    assert release_text("0.1.0", "fetched 7 0 0 /a file") == "0.1.0, fetched 7"
    assert release_text("0.1.0", "failed 7 3 0 its self-test failed: no numpy") == (
        "0.1.0, failed 7: its self-test failed: no numpy"
    )
    assert (
        release_text("0.1.0", "running 7 0 0", "running 8 0 0")
        == "0.1.0, running 7, sets running 8"
    )


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    """By the system's word for it, whoever opens it."""
    (tmp_path / "sim.toml").write_text(
        'out = "sim.toml/below"\n[model]\narch = "conv"\n[data]\nname = '
        '"digits"\n[devices]\ncount = 2\n'
    )
    command = [sys.executable, "-m", "shoal", "simulate", "--config", "sim.toml"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    said = f"error: cannot use {tmp_path}/sim.toml/below: Not a directory"
    assert (ended.returncode, " ".join(ended.stderr.split())) == (7, said)


WAITS = """
import time
from shoal.__main__ import main as start
from shoal.cli import main

def app(**_):
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("tidied up", flush=True)

main.app = app
start()
"""


def test_a_command_that_is_terminated_tidies_up():
    """What it had started, as the processes of a simulation, went on without it."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout.readline() == "begun\n"
        command.send_signal(signal.SIGTERM)
        assert command.communicate(timeout=20)[0] == "tidied up\n"
    assert command.returncode == 143
