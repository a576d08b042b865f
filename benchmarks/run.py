"""Run every benchmark, print one table beside earlier figures, and report regressions.

python -m benchmarks.run [name ...]

Each row is added to benchmarks/history.csv. Exit code 1 when a budget is missed.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import history
from benchmarks.row import Row
from fleet_protocol.errors import ConfigError

BENCHMARKS = (
    "merge",
    "reslicing",
    "fleet",
    "identity",
    "step_time",
    "shares",
    "device_memory",
    "threads",
    "simulation",
    "export",
)
SHOWN = 3  # entries of the history
COLUMNS = ("benchmark", "value", "quartiles", "unit", "budget", "ok", "before")

History = Mapping[str, Sequence[Mapping[str, str]]]
"""Earlier entries by name of the row, oldest first."""


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:.3f}"


def measured(name: str) -> list[Row]:
    """Return the rows of a benchmark, or one row that says why it cannot run here."""
    try:
        rows: list[Row] = importlib.import_module(f"benchmarks.{name}").rows()
    except (ModuleNotFoundError, ConfigError) as error:
        return [Row(name, None, f"skipped: {error}")]
    return rows


def main(names: Sequence[str]) -> int:
    """Run the named benchmarks, or all.

    Returns:
        0 when every budget is met, 1 when one is missed, 2 for an unknown name.
    """
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(
            f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}",
            file=sys.stderr,
        )
        return 2
    # Read before the first new entry is written.
    past = history.before()
    rows: list[Row] = []
    for name in names or BENCHMARKS:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        new_rows = measured(name)
        history.keep(new_rows)
        rows += new_rows
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(_table(rows, past))
    _print_worse(console, rows, past)
    return 0 if all(row.ok for row in rows) else 1


def _table(rows: Sequence[Row], past: History) -> Table:
    table = Table(*COLUMNS, title="budgets")
    for row in rows:
        newest = past.get(row.name, ())[-SHOWN:]
        table.add_row(
            f"{row.name} ({row.note})" if row.note else row.name,
            _shown(row.value),
            "" if row.low is None else f"{_shown(row.low)} to {_shown(row.high)}",
            row.unit,
            _shown(row.budget),
            _verdict(row),
            ", ".join(_shown(float(entry["value"])) for entry in newest),
        )
    return table


def _verdict(row: Row) -> str:
    if row.budget is None:
        return ""
    return "[green]yes[/]" if row.ok else "[bold red]NO[/]"


def _print_worse(
    console: Console,
    rows: Sequence[Row],
    past: History,
) -> None:
    """Print the rows that became worse since their last entry."""
    for row in rows:
        entries = past.get(row.name)
        if not entries or not history.worse(row, entries[-1]):
            continue
        last = entries[-1]
        since = f"{last['date']} ({last['commit']}, load {last['load']})"
        console.print(
            f"[bold red]worse[/] {row.name}: {float(last['value']):.4g} on {since},"
            f" now {row.value:.4g}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
