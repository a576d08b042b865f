"""How the command line talks: tables and progress on standard output, errors on standard error, JSON when asked."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

PIPE_WIDTH, _WIDEST = 160, 10_000


def output_console() -> Console:
    """The console of standard output; where it is no terminal, lines are not cut at 80 columns."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def error_console() -> Console:
    """The console of standard error, as wide as that of standard output."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH)


def say(text: str) -> None:
    """Print a sentence as it is: no markup, no colours, and cut nowhere."""
    output_console().print(text, highlight=False, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value for a program to read."""
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def print_rows(title: str, rows: Sequence[Mapping[str, str]], *, empty: str) -> None:
    """Print a table whose columns are the keys of the first row; a [word] in a cell is no markup.

    On a terminal too narrow for its words each row is a list of its own.
    """
    console = output_console()
    if not rows:
        console.print(empty)
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    for name, value in rows[0].items():
        numeric = value[:1].isdigit() or value in {"-", ""}
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    if Measurement.get(console, console.options.update(max_width=_WIDEST), table).minimum <= console.width:
        console.print(table)
        return
    for row in rows:
        say("\n  ".join(f"{name}: {value}" for name, value in row.items()))


def bytes_text(count: float) -> str:
    """A number of bytes for people.

    Example:
        >>> bytes_text(1_234_567)
        '1.23 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError


def count_text(count: float) -> str:
    """A large count for people.

    Example:
        >>> count_text(80_500_000)
        '80.50 M'
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= limit:
            return f"{count / (1e3 if unit == 'k' else limit):.2f} {unit}"
    return f"{count:.0f}"


def seconds_text(seconds: float | None) -> str:
    """A duration for people.

    Example:
        >>> seconds_text(75)
        '1 min 15 s'
    """
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def release_text(version: str, record: str | None, sets: str | None = None) -> str:
    """What a board runs: a version, the releases that it has had in hand, and why one failed."""
    said = version
    for kind, line in (("", record), ("sets ", sets)):
        phase, number, _, _, *why = (line or "running 0 0 0").split(" ", 4)
        if number != "0":
            said += f", {kind}{phase} {number}" + ("".join(f": {each}" for each in why) if phase == "failed" else "")
    return said
