"""Measure a server under light devices: a round without training, processor time, and the wire."""

import tempfile
from pathlib import Path

from benchmarks.row import Row
from shoal.bench.fleet import bench_fleet
from shoal.bench.settings import FleetBench
from tests.brokers import free_port

ROUNDS = 4
SMALL = 400_000
LARGE = 4_000_000
CASES = (
    (6, SMALL, 1.05, 0.3),
    (60, SMALL, 1.03, 1.2),
    (200, SMALL, 1.05, None),
    (6, LARGE, 1.01, None),
)
"""Devices, bytes of an update, budget of wire to payload, and budget of a round in seconds."""

CPU_BUDGET_MS = 5.0
COPIES_BUDGET = 1.02
PAHO_BUDGET = 2.0


def rows() -> list[Row]:
    """Measure over Mosquitto."""
    rows: list[Row] = []
    for case in CASES:
        rows += _measured(*case)
    return rows


def _measured(
    devices: int,
    size: int,
    wire_budget: float,
    seconds: float | None,
) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        result = bench_fleet(
            FleetBench(devices, ROUNDS, size, port=free_port(), folder=Path(folder))
        )
    title = f"{devices} light devices, {size / 1e3:.0f} kB"
    tasks = ROUNDS * devices
    note = f"bare paho {result.paho_seconds:.2f} s"
    ratio_budget = PAHO_BUDGET if devices >= 200 else None  # DESIGN's is for 200 to 1,000
    by_kind = []
    for kind, count in result.bytes_by_kind.items():
        by_kind.append(Row(f"{title}: {kind}", count / tasks, "bytes a device and round"))
    return [
        Row(
            f"{title}: round without training",
            result.round_seconds,
            "s, clock",
            seconds,
            note=note,
        ),
        Row(
            f"{title}: round",
            result.round_seconds / result.paho_seconds,
            "x bare paho",
            ratio_budget,
        ),
        Row(
            f"{title}: server",
            result.cpu_ms_per_update,
            "ms CPU an update",
            CPU_BUDGET_MS if devices > 6 else None,
        ),
        Row(
            f"{title}: received weights",
            result.bytes_by_kind["blobs received"] / (tasks * result.update_bytes),
            "x what it lacks",
            COPIES_BUDGET,
        ),
        Row(
            f"{title}: wire of the server",
            result.wire_bytes / result.payload_bytes,
            "x payload",
            wire_budget,
        ),
        *by_kind,
    ]
