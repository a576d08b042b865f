"""Nothing that is printed moves the cursor of a terminal: not what a store says, a device, a file
or its name.
"""

import contextlib
import io
import json
import re
import sqlite3
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from broker_server.store import Store
from broker_server.store.records import RunRecord, VersionRecord
from fleet_protocol import control
from fleet_protocol.errors import RefusalReason
from shoal.cli import console
from shoal.cli.console import ShoalConsole, print_json, print_rows, print_text
from shoal.cli.main import main
from shoal.cli.progress import RunDisplay

ROOT = Path(__file__).parents[2]
EVIL = "a\x1b[2Jb\x1b]8;;http://evil\x07c\x9b31md\u202ee\rf\x08g\x7fh"
SHOWN = r"a\x1b[2Jb\x1b]8;;http://evil\x07c\x9b31md\u202ee\rf\x08g\x7fh"


def harmless(text: str) -> bool:
    """Whether a text has no control character, but for the ends of lines."""
    return all(
        unicodedata.category(letter) not in {"Cc", "Cf", "Cs"} for letter in text.replace("\n", "")
    )


@pytest.mark.parametrize(
    "what",
    [
        lambda _: EVIL,
        lambda _: escape(EVIL),
        lambda _: Text(EVIL),
        lambda _: Panel(EVIL),
        lambda _: f"[bold]{escape(EVIL)}[/]",
        lambda _: table(EVIL),
    ],
    ids=["text", "escaped", "rich text", "panel", "markup", "table"],
)
def test_what_rich_draws_is_visible(what):
    """Whatever is drawn, and in whatever; what was there can still be told."""
    file = io.StringIO()
    ShoalConsole(file=file, width=200).print(what(None))
    assert harmless(file.getvalue())
    assert r"\x1b" in file.getvalue()


def table(cell: str) -> Table:
    made = Table("name", title=cell)
    made.add_row(cell)
    return made


def test_what_rich_itself_needs_for_colours_is_left(monkeypatch):
    """On a terminal a colour is a sequence of rich's own, and nothing of the text's."""
    file = io.StringIO()
    terminal = ShoalConsole(file=file, width=200, force_terminal=True, color_system="standard")
    terminal.print(f"[red]{escape('x' + EVIL)}[/]", highlight=False)
    assert file.getvalue() == f"\x1b[31mx{SHOWN}\x1b[0m\n"


def test_names_between_colons_are_not_replaced_by_pictures() -> None:
    """As in a message about `--model networks:key`, which ends in a colon."""
    drawn = io.StringIO()
    ShoalConsole(file=drawn, width=80).print("--model networks:key: the package has no key")
    assert drawn.getvalue() == "--model networks:key: the package has no key\n"


def test_sentences_tables_and_json_are_visible(capsys):
    """Cells stay beneath each other, since their widths are those of what is shown; JSON has
    escapes of its own.
    """
    print_text(EVIL)
    print_rows(EVIL, [{"name": EVIL, "other": "x"}, {"name": "plain", "other": "x"}], empty="none")
    print_json({"name": EVIL})
    said = capsys.readouterr().out
    assert harmless(said)
    assert said.count(SHOWN) >= 2
    rows = [line for line in said.splitlines() if line.startswith("│")]
    assert len({len(line) for line in rows}) == 1
    assert len({line.rindex("x") for line in rows}) == 1
    assert json.loads(said[said.index("{") :]) == {"name": EVIL}


def test_the_live_display_is_visible():
    """Of what devices say, also where their names come from another server."""
    file = io.StringIO()
    display = RunDisplay(
        ShoalConsole(file=file, width=200, force_terminal=True, color_system=None), EVIL
    )
    with display:
        refused = control.UpdateRefused(
            run="r",
            seconds=1.0,
            round=1,
            device="d",
            by="device",
            reason=RefusalReason.FAILED,
            detail=EVIL,
        )
        display.show(refused)
        display.show(control.RoundAbandoned(run="r", seconds=1.0, round=1, reason=EVIL, again=True))
    assert "\x1b[2J" not in file.getvalue()
    assert "\x9b" not in file.getvalue()
    assert "\u202e" not in file.getvalue()
    assert file.getvalue().count(SHOWN) >= 2


MARKUP = "[/red] [bold"


@pytest.mark.attack(
    "member",
    "Puts markup of the terminal library into names that a display or a table shows",
    "shown as text; the display keeps working",
    "2026-11-29",
)
def test_markup_is_text(monkeypatch):
    """A closing tag that closes nothing is an error of the library, which ended the display."""
    file = io.StringIO()
    console = ShoalConsole(file=file, width=200, force_terminal=True, color_system=None)
    display = RunDisplay(console, MARKUP)
    about = {"run": "r", "seconds": 1.0, "round": 1, "device": MARKUP}
    events = [
        control.DeviceAccepted(**about, kind="train", tier=MARKUP),
        control.UpdateRefused(**about, by="device", reason=RefusalReason.FAILED, detail=MARKUP),
        control.RoundStarted(
            run="r",
            seconds=1.0,
            round=1,
            version=0,
            devices={MARKUP: MARKUP},
            deadline_seconds=1.0,
        ),
    ]
    with display:
        for event in events:
            display.show(event)
            console.print(display._render())
    assert file.getvalue().count(MARKUP) >= 6
    shown = io.StringIO()
    table = ShoalConsole(file=shown, width=200, force_terminal=True, color_system=None)
    monkeypatch.setattr("shoal.cli.console.output_console", lambda: table)
    print_rows(MARKUP, [{"device": MARKUP}], empty="")
    assert shown.getvalue().count(MARKUP) == 2


@pytest.fixture
def foreign(tmp_path):
    """A store whose every text somebody wrote."""
    with contextlib.closing(Store(tmp_path / "store")) as store:
        config = {"fleet": "lab", "model": {"artifacts": "/srv/a", "arch": "tiny"}}
        run = RunRecord("r1", "lab", EVIL, json.dumps(config), "running", EVIL, 1.0, None, 0, 0)
        store.add_run(run, VersionRecord("r1", 0, 0, "b" * 64, None, None, 1.0, None))
        store.log("said", "detail", run="r1", device="d")
    with contextlib.closing(sqlite3.connect(tmp_path / "store" / "shoal.db")) as opened:
        opened.execute(
            "UPDATE events SET kind = ?, detail = ?, device = ?",
            (EVIL, f"{EVIL}\nanother line", EVIL),
        )
        opened.commit()
    return tmp_path / "store"


@pytest.mark.attack(
    "file",
    "A store contains escape sequences in events, names and reasons",
    "every command prints the sequences in escaped form",
    "2026-11-28",
)
@pytest.mark.parametrize(
    "command",
    [
        ["log"],
        ["runs"],
        ["status"],
        ["rounds"],
        ["devices"],
        ["advice"],
        ["versions"],
        ["log", "--json"],
    ],
)
def test_commands_show_a_foreign_store(command, foreign, monkeypatch, capsys):
    """Each prints what the store says, and nothing that a terminal obeys; an event is a line."""
    monkeypatch.setattr(sys, "argv", ["shoal", *command, "--store", str(foreign)])
    with pytest.raises(SystemExit):
        main()
    said = "".join(capsys.readouterr())
    assert harmless(said)
    if command == ["log"]:
        assert len(said.splitlines()) == 1
        assert SHOWN in said


def test_errors_show_names_of_files(tmp_path, monkeypatch, capsys):
    """A file whose name has an escape sequence, and a header of a table that has one."""
    evil = tmp_path / f"{EVIL.replace('/', '')}.zip"
    evil.write_text("no zip")
    monkeypatch.setattr(sys, "argv", ["shoal", "restore", str(evil), str(tmp_path / "made")])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert harmless(said)
    assert r"\x1b[2J" in said


def test_a_board_prints_what_is_visible(tmp_path):
    """Its doctor and its errors, where no rich is: names of arrays, of files and of columns."""
    np.savez(tmp_path / "data.npz", **{EVIL.replace("/", ""): np.zeros(3)})
    (tmp_path / "data.csv").write_text(f"{EVIL},label\n1,x\n")
    for data in (
        'kind = "npz"\npath = "data.npz"',
        'kind = "csv"\npath = "data.csv"\nlabel_column = "none"',
    ):
        config = (
            f'fleet = "lab"\ndevice = "d"\nstate_dir = "state"\nbroker = '
            f'"mqtt://127.0.0.1:1"\n[data]\n{data}\n'
        )
        (tmp_path / "device.toml").write_text(config)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "device_runtime",
                "doctor",
                "--config",
                str(tmp_path / "device.toml"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert r"\x1b[2J" in done.stdout, done.stdout + done.stderr
        assert harmless(done.stdout)


LOGGED = """
import logging, sys
from fleet_protocol.logs import log_to_stderr
log_to_stderr(logging.INFO, "%(levelname)s %(message)s")
evil = sys.argv[1] + chr(10) + "ERROR forged"
logging.getLogger("x").warning("device %s", evil)
try:
    raise ValueError(evil)
except ValueError:
    logging.getLogger("x").exception("it failed")
"""


@pytest.mark.parametrize("form", ["", "json"])
def test_logs_are_lines(form):
    """A message that somebody else's text is part of is one line, in either form."""
    done = subprocess.run(
        [sys.executable, "-c", LOGGED, EVIL],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"SHOAL_LOG": form, "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
    )
    assert harmless(done.stderr)
    first = done.stderr.splitlines()[0]
    if form:
        assert json.loads(first)["message"] == f"device {EVIL}\nERROR forged"
    else:
        assert first == rf"WARNING device {SHOWN}\nERROR forged"


def test_every_console_of_the_command_line_is_such_a_one():
    """No module makes a plain one of its own."""
    assert isinstance(console.output_console(), ShoalConsole)
    assert isinstance(console.error_console(), ShoalConsole)
    made = [
        path
        for path in (ROOT / "shoal").rglob("*.py")
        if re.search(r"(?<!Shoal)\bConsole\(", path.read_text())
    ]
    assert made == []
