"""A bench of light devices speaks the whole protocol with a real server, beside the bare broker."""

from shoal.bench.fleet import bench_fleet
from shoal.bench.settings import FleetBench
from tests.brokers import mosquitto_broker

UPDATE = 40_000


def test_light_devices_close_their_rounds(tmp_path):
    """Every update of every device is merged, and what the devices count is what was asked of them."""
    with mosquitto_broker(tmp_path) as broker:
        bench = FleetBench(6, 3, UPDATE, broker=broker.url, folder=tmp_path / "bench")
        figures = bench_fleet(bench)
    assert figures.merged == figures.asked == 2 * 6
    assert abs(figures.update_bytes - UPDATE) < 1000
    assert figures.bytes_by_kind["uploads sent"] >= 3 * 6 * figures.update_bytes
    assert figures.paho_seconds > 0
    assert figures.bare_seconds > 0
    assert 0 < figures.paho_cpu_ms_per_update < figures.cpu_ms_per_update
    assert 0 < figures.bare_cpu_ms_per_update < figures.cpu_ms_per_update
