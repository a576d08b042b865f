"""Runs every benchmark, prints one table and writes benchmarks/out/bench.json; exit code 1 when a budget is missed.

python -m benchmarks.run [name ...]
"""

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.row import Row

BENCHMARKS = ("merge", "reslicing", "fleet", "identity", "step_time", "device_memory", "simulation", "export")
OUT = Path(__file__).parent / "out" / "bench.json"


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:.3f}"


def main(names: Sequence[str]) -> int:
    """Run the named benchmarks, or all; 0 when every budget is met, 1 when one is missed, 2 for an unknown name."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for name in names or BENCHMARKS:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"benchmarks.{name}").rows()
    table = Table("benchmark", "value", "unit", "budget", "ok", title="budgets")
    for row in rows:
        verdict = "" if row.budget is None else ("[green]yes[/]" if row.ok else "[bold red]NO[/]")
        table.add_row(row.name, _shown(row.value), row.unit, _shown(row.budget), verdict)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps([asdict(row) | {"ok": row.ok} for row in rows], indent=1))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
