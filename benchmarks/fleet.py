"""A server under 60 light devices: its processor time for an update, and how often a device gets what it lacks."""

import tempfile
from pathlib import Path

from benchmarks.row import Row
from shoal.bench.fleet import bench_fleet
from shoal.bench.settings import FleetBench
from tests.brokers import free_port

DEVICES, ROUNDS = 60, 4
CPU_BUDGET_MS = 5.0
WIRE_BUDGET = 1.03
COPIES_BUDGET = 1.02


def rows() -> list[Row]:
    """Measure over Mosquitto; the ratio of wall times has no budget, since cores are shared."""
    with tempfile.TemporaryDirectory() as folder:
        found = bench_fleet(FleetBench(DEVICES, ROUNDS, port=free_port(), folder=Path(folder)))
    copies = found.bytes_by_kind["blobs received"] / (ROUNDS * DEVICES * found.update_bytes)
    wire = found.wire_bytes / found.payload_bytes
    ratio = found.round_seconds / found.bare_seconds
    what = f"{DEVICES} light devices, {found.update_bytes / 1e3:.0f} kB"
    return [
        Row(f"{what}: server", found.cpu_ms_per_update, "ms CPU an update", CPU_BUDGET_MS),
        Row(f"{what}: received weights", copies, "x what it lacks", COPIES_BUDGET),
        Row(f"{what}: wire of the server", wire, "x payload", WIRE_BUDGET),
        Row(f"{what}: round", ratio, "x bare paho"),
    ]
