"""How the command line talks: tables and progress on standard output, errors on standard error,
JSON when asked.
"""

import json
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from fleet_protocol.errors import visible

PIPE_WIDTH = 160
_WIDEST = 10_000
_MOST_SHOWN = 8000  # characters of one error


class ShoalConsole(Console):
    """A console on which no text can move the cursor; only rich's own drawing passes unchanged.

    Stores, messages, files and their names may come from others. See `visible`. Nothing is
    highlighted: rich searches a text for numbers, paths and addresses in a time that grows with the
    square of its length.
    """

    def __init__(self, **options: Any) -> None:
        """Make a console with the options of rich's own."""
        super().__init__(highlight=False, **options)

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    @override
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def output_console() -> Console:
    """The console of standard output; where it is no terminal, lines are not cut at 80 columns."""
    return ShoalConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def error_console() -> Console:
    """The console of standard error, as wide as that of standard output."""
    return ShoalConsole(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH)


def say(text: str) -> None:
    """Print a sentence as it is: no markup, no colours, and cut nowhere."""
    output_console().print(text, highlight=False, markup=False, soft_wrap=True)


def cut(text: str, most: int = _MOST_SHOWN) -> str:
    """The beginning of a text that another may have written, with a note of how much of it is not
    shown.
    """
    if len(text) <= most:
        return text
    return f"{text[:most]} ... ({len(text) - most} more characters are not shown)"


def print_error(text: str) -> None:
    """Print why a command ends, on standard error; of a long text its beginning alone."""
    error_console().print(f"[bold red]error:[/] {escape(cut(text))}", soft_wrap=True)


def print_json(value: Any, *, line: bool = False) -> None:
    """Print a value `flat` for a program to read, on a line of its own or spread."""
    print(json.dumps(flat(value), indent=None if line else 2, default=str), flush=True)


def flat(value: Any) -> Any:
    """A record, or a list of them, without nesting: what is inside has dotted names, and lists hold
    plain values alone.

    Items of any other list go by their name or number. The records of a list have the same names,
    None where they lack what it says.

    Example:
        >>> flat([{"id": 1, "of": {"tiers": [1, 0.5], "blocks": [{"no": 3}]}}, {"id": 2, "of": None}])
        [{'id': 1, 'of.tiers': [1, 0.5], 'of.blocks.0.no': 3}, {'id': 2, 'of.tiers': None, 'of.blocks.0.no': None}]
    """
    if isinstance(value, Mapping):
        return dict(_leaves("", value))
    if not _nested(value):
        return value
    records = [flat(item) for item in value]
    names = dict.fromkeys(name for record in records for name in record)
    kept = _without_wholes(names)
    return [{name: record.get(name) for name in kept} for record in records]


def _without_wholes(names: Iterable[str]) -> list[str]:
    """Dotted names without those that others have in parts, in their order."""
    ordered = sorted(names)
    kept = []
    for name in names:
        at = bisect_left(ordered, f"{name}.")
        if at == len(ordered) or not ordered[at].startswith(f"{name}."):
            kept.append(name)
    return kept


def _nested(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(
        isinstance(item, Mapping | list | tuple) for item in value
    )


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if _nested(value):
        value = {
            item.get("name", at) if isinstance(item, Mapping) else at: item
            for at, item in enumerate(value)
        }
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, item in value.items():
        yield from _leaves(f"{name}.{key}" if name else str(key), item)


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
    if (
        Measurement.get(console, console.options.update(max_width=_WIDEST), table).minimum
        <= console.width
    ):
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
    return f"{seconds:.2f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def number_text(value: float | None) -> str:
    """Return a number with four decimals, or a dash without one."""
    return "-" if value is None else f"{value:.4f}"


def time_text(seconds: float | None) -> str:
    """Return a time in seconds since 1970 as local date and time, or a dash without one."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def release_text(version: str, record: str | None, sets: str | None = None) -> str:
    """What a board runs: a version, the releases that it has had in hand, and why one failed."""
    said = version
    for kind, line in (("", record), ("sets ", sets)):
        phase, number, _, _, *why = (line or "running 0 0 0").split(" ", 4)
        if number != "0":
            said += f", {kind}{phase} {number}" + (
                "".join(f": {each}" for each in why) if phase == "failed" else ""
            )
    return said
