"""Runs every benchmark, prints one table with what was measured before, and says what got worse
since.

python -m benchmarks.run [name ...]

Each row is added to benchmarks/history.csv. Exit code 1 when a budget is missed.
"""

import importlib
import sys
from collections.abc import Sequence

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
    "device_memory",
    "simulation",
    "export",
)
SHOWN = 3  # entries of the history


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:.3f}"


def measured(name: str) -> list[Row]:
    """The rows of a benchmark, or one that says what it lacks."""
    try:
        rows: list[Row] = importlib.import_module(f"benchmarks.{name}").rows()
    except (ModuleNotFoundError, ConfigError) as error:
        return [Row(name, None, f"skipped: {error}")]
    return rows


def main(names: Sequence[str]) -> int:
    """Run the named benchmarks, or all; 0 when every budget is met, 1 when one is missed, 2 for an
    unknown name.
    """
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(
            f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}",
            file=sys.stderr,
        )
        return 2
    past = history.before()
    rows = list[Row]()
    for name in names or BENCHMARKS:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        found = measured(name)
        history.keep(found)
        rows += found
    table = Table(
        "benchmark",
        "value",
        "quartiles",
        "unit",
        "budget",
        "ok",
        "before",
        title="budgets",
    )
    for row in rows:
        verdict = "" if row.budget is None else ("[green]yes[/]" if row.ok else "[bold red]NO[/]")
        spread = "" if row.low is None else f"{_shown(row.low)} to {_shown(row.high)}"
        earlier = ", ".join(
            _shown(float(entry["value"])) for entry in past.get(row.name, ())[-SHOWN:]
        )
        name = f"{row.name} ({row.note})" if row.note else row.name
        table.add_row(
            name,
            _shown(row.value),
            spread,
            row.unit,
            _shown(row.budget),
            verdict,
            earlier,
        )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for row in rows:
        last = past.get(row.name, [None])[-1]
        if last is not None and history.worse(row, last):
            since = f"{last['date']} ({last['commit']}, load {last['load']})"
            console.print(
                f"[bold red]worse[/] {row.name}: {float(last['value']):.4g} on {since}, now {row.value:.4g}"
            )
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
