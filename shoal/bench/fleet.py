"""A benchmark of rounds: the server runs in this process, light devices run in a few others.

It also measures the bare broker for comparison.
"""

import contextlib
import os
import resource
import secrets
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from broker_server.service.membership import hosted_broker
from broker_server.service.receivers import Receivers
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig, ModelConfig
from broker_server.settings.rounds import RoundConfig
from fleet_protocol import control
from fleet_protocol.errors import ConfigError
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress
from shoal.bench.architecture import ARCH, write_architecture
from shoal.bench.bare import BareRound, BareServer
from shoal.bench.processes import device_processes
from shoal.bench.settings import FleetBench


@dataclass(frozen=True)
class FleetFigures:
    """The results; times are medians over the counted rounds.

    Attributes:
        devices: number of light devices.
        update_bytes: size of one update.
        round_seconds: time from the offers to the new version.
        paho_seconds: time of the bare fan-out and fan-in of the same bytes with paho clients.
        cpu_ms_per_update: processor time of the server, including its network thread and its
            receivers.
        paho_cpu_ms_per_update: processor time of the process that sends and counts in the baseline.
        merged: updates merged in the counted rounds.
        asked: updates asked for in the counted rounds.
        resident_bytes: peak memory of the process that ran first the baseline and then the server,
            and of its receivers.
        wire_bytes: bytes that the server exchanged in all rounds.
        payload_bytes: the part of them that was blobs that a receiver needed.
        bytes_by_kind: bytes that the devices exchanged in all rounds, by kind of topic and
            direction.
    """

    devices: int
    update_bytes: int
    round_seconds: float
    paho_seconds: float
    cpu_ms_per_update: float
    paho_cpu_ms_per_update: float
    merged: int
    asked: int
    resident_bytes: int
    wire_bytes: int
    payload_bytes: int
    bytes_by_kind: dict[str, int]


@dataclass
class _RoundClock:
    """Observes a run, and reads the processor clock when a round begins and ends.

    Attributes:
        began: processor time when the current round began.
        rounds: the closed rounds.
        cpu_seconds: processor time of each round.
        update_bytes: size of the last update.
        receivers: receiver processes of the server, whose processor time is included.
    """

    began: float = 0.0
    rounds: list[control.RoundClosed] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    update_bytes: int = 0
    receivers: Receivers | None = None

    def __call__(self, event: control.RunEvent) -> None:
        if isinstance(event, control.RunStarted):
            self.began = self._processor_seconds()
        elif isinstance(event, control.UpdateReceived):
            self.update_bytes = event.size
        elif isinstance(event, control.RoundClosed):
            now = self._processor_seconds()
            self.rounds.append(event)
            self.cpu_seconds.append(now - self.began)
            self.began = now

    def _processor_seconds(self) -> float:
        seconds = time.process_time()
        if self.receivers is not None:
            seconds += self.receivers.cpu_seconds
        return seconds

    def cpu_ms_per_update(self) -> list[float]:
        """Return the processor time for each update, by round."""
        figures: list[float] = []
        # A round may merge nothing.
        for seconds, closed in zip(self.cpu_seconds, self.rounds, strict=True):
            figures.append(1000 * seconds / max(1, len(closed.merged)))
        return figures


@dataclass(frozen=True)
class _FleetRun:
    """The measurements of the light devices and their server."""

    clock: _RoundClock
    finished: control.RunFinished
    exchanged: dict[str, int]  # bytes by kind of topic and direction
    resident_bytes: int


def bench_fleet(bench: FleetBench) -> FleetFigures:
    """Measure the fleet over one broker, and the baseline before and after it.

    The speed of a machine changes over time, so the baseline is measured before and after.

    Raises:
        ConfigError: there are fewer than two rounds.
        ShoalError: a round could not be closed.
    """
    if bench.rounds < 2:
        raise ConfigError("the first round is a warm-up: run at least two rounds")
    bench.folder.mkdir(parents=True, exist_ok=True)
    write_architecture(bench.folder / "artifacts", bench.payload_bytes)
    # Both use one broker, so that only the clients differ.
    with contextlib.ExitStack() as stack:
        url = bench.broker
        settings = BrokerConfig(url=url, port=bench.port)
        hosted = hosted_broker(settings, ARCH, bench.folder / "broker")
        if hosted is not None:
            url = stack.enter_context(hosted).url
        # Before and after the fleet, never beside it: both would compete for the processor.
        baseline = _run_baseline(bench, url)
        run = _run_fleet(bench, url)
        baseline += _run_baseline(bench, url)
    return _figures(bench, baseline, run)


def _figures(bench: FleetBench, baseline: list[BareRound], run: _FleetRun) -> FleetFigures:
    counted = run.clock.rounds[1:]  # the first round warms up
    bare_cpu = [1000 * bare.cpu_seconds / bench.devices for bare in baseline]
    merged = sum(len(closed.merged) for closed in counted)
    return FleetFigures(
        devices=bench.devices,
        update_bytes=run.clock.update_bytes,
        round_seconds=statistics.median(closed.round_seconds for closed in counted),
        paho_seconds=statistics.median(bare.seconds for bare in baseline),
        cpu_ms_per_update=statistics.median(run.clock.cpu_ms_per_update()[1:]),
        paho_cpu_ms_per_update=statistics.median(bare_cpu),
        merged=merged,
        asked=merged + sum(len(closed.missing) for closed in counted),
        resident_bytes=run.resident_bytes,
        wire_bytes=run.finished.wire_bytes,
        payload_bytes=run.finished.payload_bytes,
        bytes_by_kind=run.exchanged,
    )


def _run_baseline(bench: FleetBench, url: str) -> list[BareRound]:
    fleet = f"bare-{secrets.token_hex(4)}"
    # The baseline uses the chunk size of the rounds, so both send the same number of packets.
    size = RoundConfig().chunk_bytes
    # Random bytes, because a broker or a network may compress.
    data = os.urandom(bench.payload_bytes)
    chunks = tuple(data[start : start + size] for start in range(0, len(data), size))
    with (
        BareServer(Topics(fleet), BrokerAddress.parse(url)) as server,
        device_processes("bare", fleet, url, bench.devices, bench.processes),
    ):
        return server.rounds(bench.devices, chunks, bench.rounds)


def _run_fleet(bench: FleetBench, url: str) -> _FleetRun:
    clock = _RoundClock()
    config = _fleet_config(bench, url)
    fleet = config.fleet
    with (
        device_processes("light", fleet, url, bench.devices, bench.processes) as exchanged,
        Server(fleet, config.store, config.broker, listener=clock) as server,
    ):
        # The devices run in separate processes, so that the server's processor time excludes
        # theirs.
        clock.receivers = server.receivers
        finished = server.run(config)
        # Linux counts it in kilobytes.
        resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if server.receivers is not None:
            resident_bytes += sum(map(_peak_bytes, server.receivers.pids))
    # The devices report their bytes when the context ends.
    return _FleetRun(clock, finished, dict(sorted(exchanged.items())), resident_bytes)


def _fleet_config(bench: FleetBench, url: str) -> FleetConfig:
    fleet = f"bench-{secrets.token_hex(4)}"
    return FleetConfig(
        fleet=fleet,
        store=bench.folder / fleet,
        broker=BrokerConfig(url=url, receivers=bench.receivers),
        model=ModelConfig(artifacts=bench.folder / "artifacts", arch=ARCH),
        round=RoundConfig(
            rounds=bench.rounds,
            min_devices=bench.devices,
            deadline_seconds=bench.deadline_seconds,
            quorum=0.5,  # late devices cost updates, but not the round
        ),
        keep_versions=1,  # older versions would only fill the disk
    )


def _peak_bytes(pid: int) -> int:
    """Return the peak memory of a process.

    The value that `resource` reports for a child starts at its parent's value.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
