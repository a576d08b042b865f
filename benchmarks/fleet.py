"""A server under 60 light devices: its processor time for an update, and how often a device gets what it lacks.

python -m benchmarks.fleet
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from shoal.bench.fleet import FleetBench, bench_fleet
from tests.brokers import free_port

__all__ = ["rows"]

DEVICES, ROUNDS = 60, 4
CPU_BUDGET_MS = 5.0
WIRE_BUDGET = 1.03
COPIES_BUDGET = 1.02


def rows() -> list[dict[str, Any]]:
    """Measure over the embedded broker.

    Returns:
        Rows with name, value, unit, budget and ok; the ratio of wall times has no budget, since cores are shared.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = bench_fleet(FleetBench(Path(folder), devices=DEVICES, rounds=ROUNDS, port=free_port()))
    copies = found.bytes_by_kind["blobs received"] / (ROUNDS * DEVICES * found.update_bytes)
    wire = found.wire_bytes / found.payload_bytes
    ratio = found.round_seconds / found.bare_seconds
    what = f"{DEVICES} light devices, {found.update_bytes / 1e3:.0f} kB"

    def row(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
        return {
            "name": f"{what}: {name}",
            "value": value,
            "unit": unit,
            "budget": budget,
            "ok": budget is None or value <= budget,
        }

    return [
        row("server", found.cpu_ms_per_update, "ms CPU an update", CPU_BUDGET_MS),
        row("received weights", copies, "x what it lacks", COPIES_BUDGET),
        row("wire of the server", wire, "x payload", WIRE_BUDGET),
        row("round", ratio, "x bare paho", None),
    ]


if __name__ == "__main__":
    print(json.dumps(rows(), indent=1))
