"""Prints for people and for programs: tables, sentences, JSON, and errors."""

import json
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.cells import cell_len
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
_WHOLE_LETTERS = 20
"""Columns with cells up to this length, such as dates, are never wrapped."""
_MOST_SHOWN = 8000  # characters shown of an error


class ShoalConsole(Console):
    """A console that removes control characters from text; only rich's own output keeps them.

    Stores, messages, files and their names may be untrusted. See `visible`. Highlighting is off:
    rich's search for numbers, paths and addresses takes time quadratic in the length of a text.
    Words between colons, such as ``:key:``, may be names, so they are not replaced by pictures.
    """

    def __init__(self, **options: Any) -> None:
        """Create a console with the options of rich's `Console`."""
        super().__init__(highlight=False, emoji=False, **options)

    @override
    # Rich parses this text as markup, so characters are removed before that.
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
    """Return the console of standard output; without a terminal, lines have 160 columns."""
    # Output into a file or a pipe must not depend on a terminal's width.
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return ShoalConsole(width=width)


def error_console() -> Console:
    """Return the console of standard error, as wide as that of standard output."""
    width = None if sys.stderr.isatty() else PIPE_WIDTH
    return ShoalConsole(stderr=True, width=width)


def print_text(text: str) -> None:
    """Print a sentence unchanged: without markup, colours or truncation."""
    output_console().print(text, highlight=False, markup=False, soft_wrap=True)


def cut(text: str, most: int = _MOST_SHOWN) -> str:
    """Return the beginning of a text, with a note of how many characters are not shown."""
    if len(text) <= most:
        return text
    return f"{text[:most]} ... ({len(text) - most} more characters are not shown)"


def print_error(text: str) -> None:
    """Print on standard error why a command ends; a long text is truncated."""
    error_console().print(f"[bold red]error:[/] {escape(cut(text))}", soft_wrap=True)


def print_json(value: Any, *, line: bool = False) -> None:
    """Print a value as flat JSON (see `flat`), on one line or indented."""
    print(json.dumps(flat(value), indent=None if line else 2, default=str), flush=True)


def flat(value: Any) -> Any:
    """Return a record, or a list of records, without nesting.

    Nested values get dotted names, and lists hold only plain values. Entries of other lists are
    named by their ``name`` or their number. The records of a list have the same names, with None
    for a value that a record lacks.

    Example:
        >>> records = [{"id": 1, "of": {"tiers": [1, 0.5], "blocks": [{"no": 3}]}}]
        >>> flat([*records, {"id": 2, "of": None}])
        [{'id': 1, 'of.tiers': [1, 0.5], 'of.blocks.0.no': 3},
         {'id': 2, 'of.tiers': None, 'of.blocks.0.no': None}]
    """
    if isinstance(value, Mapping):
        return dict(_plain_values("", value))
    if not _is_nested(value):
        return value
    records = [flat(record) for record in value]
    # A dictionary serves as a set that keeps the order of first occurrence.
    names: dict[str, None] = {}
    for record in records:
        names |= dict.fromkeys(record)
    common = _without_prefixes(names)
    return [_with_names(record, common) for record in records]


def _with_names(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a record with these names, and None for values that it lacks."""
    return {name: record.get(name) for name in names}


def _without_prefixes(names: Iterable[str]) -> list[str]:
    """Return dotted names in their order, without those that are prefixes of others."""
    ordered = sorted(names)
    complete = []
    for name in names:
        beginning = f"{name}."
        # A name that extends this one sorts directly after it, so one look at the next name is
        # enough.
        following = bisect_left(ordered, beginning)
        if following == len(ordered) or not ordered[following].startswith(beginning):
            complete.append(name)
    return complete


def _is_nested(value: Any) -> bool:
    """Return whether a list contains records or lists."""
    if not isinstance(value, list | tuple):
        return False
    return any(isinstance(entry, Mapping | list | tuple) for entry in value)


def _plain_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the nested values of a value, each with its dotted name."""
    if _is_nested(value):
        value = _by_name_or_number(value)
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _plain_values(f"{name}.{key}" if name else str(key), inner)


def _by_name_or_number(entries: Sequence[Any]) -> dict[Any, Any]:
    """Return the entries of a list by their ``name`` or, without one, by their number."""
    by_key = {}
    for number, entry in enumerate(entries):
        key = entry.get("name", number) if isinstance(entry, Mapping) else number
        by_key[key] = entry
    return by_key


def print_rows(
    title: str,
    rows: Sequence[Mapping[str, str]],
    *,
    empty: str,
    optional: Sequence[str] = (),
) -> None:
    """Print a table whose columns are the keys of the first row.

    Cells are plain text. If the terminal is too narrow for their words, each row becomes a list.

    Args:
        title: title above the table.
        rows: the cells of each row by the name of their column.
        empty: printed if there are no rows.
        optional: columns that a narrow terminal omits, in this order.
    """
    console = output_console()
    if not rows:
        console.print(empty)
        return
    # Measured without a bound, because rich never reports a minimum above the width that it has.
    unbounded = console.options.update(max_width=_WIDEST)
    left_out: list[str] = []
    table = _table(title, rows, left_out)
    for name in optional:
        if Measurement.get(console, unbounded, table).minimum <= console.width:
            break
        left_out.append(name)
        table = _table(title, rows, left_out)
    if Measurement.get(console, unbounded, table).minimum <= console.width:
        console.print(table)
        if left_out:
            # A person who reads a narrow table must know that it is incomplete.
            print_text(
                f"columns omitted: {', '.join(left_out)}; a wider terminal or --json shows them"
            )
        return
    for row in rows:
        lines = [f"{name}: {value}" for name, value in row.items()]
        print_text("\n  ".join(lines))


def _table(title: str, rows: Sequence[Mapping[str, str]], left_out: Sequence[str]) -> Table:
    """Lay out rows without some columns; only long texts are wrapped."""
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    names = [name for name in rows[0] if name not in left_out]
    for name in names:
        first = rows[0][name]
        # The first row decides for the column.
        numeric = first[:1].isdigit() or first in {"-", ""}
        longest = max(cell_len(name), *(cell_len(row[name]) for row in rows))
        table.add_column(
            name,
            justify="right" if numeric else "left",
            overflow="fold",
            min_width=longest if longest <= _WHOLE_LETTERS else None,
        )
    for row in rows:
        table.add_row(*map(escape, map(row.__getitem__, names)))
    return table


def bytes_text(count: float) -> str:
    """Return a number of bytes as readable text.

    Example:
        >>> bytes_text(1_234_567)
        '1.23 MB'
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB"):
        count /= 1000
        if count < 1000:
            return f"{count:.2f} {unit}"
    return f"{count / 1000:.2f} GB"


def count_text(count: float) -> str:
    """Return a large count as readable text.

    Example:
        >>> count_text(80_500_000)
        '80.50 M'
    """
    if count >= 1e9:
        return f"{count / 1e9:.2f} G"
    if count >= 1e6:
        return f"{count / 1e6:.2f} M"
    if count >= 1e4:
        return f"{count / 1e3:.2f} k"
    return f"{count:.0f}"


def seconds_text(seconds: float | None) -> str:
    """Return a duration as readable text.

    Example:
        >>> seconds_text(75)
        '1 min 15 s'
    """
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def number_text(value: float | None) -> str:
    """Return a number with four decimals, or a dash for None."""
    return "-" if value is None else f"{value:.4f}"


def time_text(seconds: float | None) -> str:
    """Return a time in seconds since 1970 as local date and time, or a dash for None."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def release_text(version: str, record: str | None, sets: str | None = None) -> str:
    """Return what a board runs: its version, its releases, and why a release failed.

    Args:
        version: version of Shoal on the board.
        record: record of its newest runtime, as in `device_runtime.agent.releases`.
        sets: record of its newest artifact sets, in the same form.
    """
    text = version
    for kind, line in (("", record), ("sets ", sets)):
        if not line:
            continue
        # A board reports these records as plain lines; only the reason contains spaces.
        phase, number, _, _, *reason = line.split(" ", 4)
        # Release 0 is what the board was installed with.
        if number == "0":
            continue
        text += f", {kind}{phase} {number}"
        if phase == "failed" and reason:
            text += f": {reason[0]}"
    return text
