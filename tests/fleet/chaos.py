"""Chaos: rounds of light devices over a network that loses, repeats, swaps and breaks, a broker
that dies, and churn.

python -m tests.fleet.chaos --devices 50 --rounds 30

Every connection, the server's too, goes through `tests.fleet.faults`. Mosquitto is killed every 5
to 15 s and comes back with the sessions it wrote last; a fifth of the devices is away at any time.
One line a round, then the figures: every round must close with a quorum, and no device's update may
count twice.
"""

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig, ModelConfig
from broker_server.settings.rounds import RoundConfig
from broker_server.store import Store, TaskPhase
from fleet_protocol import control
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress
from shoal.bench.architecture import ARCH, write_architecture
from shoal.bench.light_device import light_client
from shoal.bench.processes import device_name
from shoal.bench.swarm import Swarm
from tests.brokers import TestBroker, free_port, mosquitto_broker

FLEET = "chaos"
AWAY, AWAY_SECONDS = 0.2, (2.0, 10.0)  # share of the devices at any time, and for how long each
KILL_SECONDS = (5.0, 15.0)
CHUNK_BYTES = 16 * 1024


@dataclass
class Figures:
    """What came of it.

    Attributes:
        status: of the run.
        closed: seconds that each closed round took.
        merged: updates merged in each.
        asked: devices asked in each.
        abandoned: why rounds were.
        twice: updates that versions were told to be made of, beyond those that the store says were
            merged.
        kills: of the broker.
        faults: what the proxy did.
        refused: what the server refused, by reason.
    """

    status: str = ""
    closed: list[float] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    twice: int = 0
    kills: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)


def swarm(url: str, devices: int, seed: str) -> None:
    """Devices that leave without a word and come back, until standard input closes."""
    ended = threading.Event()
    draw = random.Random(seed)
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), ended.set()), daemon=True).start()
    topics = Topics(FLEET)
    whole = dict[str, bytes]()
    members = [light_client(topics, device_name(index), whole) for index in range(devices)]
    mean_away = sum(AWAY_SECONDS) / 2
    looked = time.monotonic()

    def stop() -> bool:
        nonlocal looked
        now = time.monotonic()
        # Out of a share 1 - AWAY that is here as many leave in a second as come back.
        chance = (now - looked) * AWAY / (1 - AWAY) / mean_away
        looked = now
        for member in members:
            if member.watched is not None and draw.random() < chance:
                member.away_until = now + draw.uniform(*AWAY_SECONDS)
                with contextlib.suppress(
                    OSError
                ):  # the broker, which is killed, too, may have been first
                    member.watched.shutdown(socket.SHUT_RDWR)
        return ended.is_set()

    Swarm(members, BrokerAddress.parse(url)).run(stop)


@contextlib.contextmanager
def child(told: list[bytes], module: str, *arguments: str) -> Iterator[None]:
    """A module in a process of its own, until its standard input closes; what it prints then is
    told.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield
    finally:
        try:
            told.append(process.communicate(b"", timeout=20)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{module} ended with {process.returncode}")


@contextlib.contextmanager
def killed_now_and_then(
    broker: TestBroker, draw: random.Random, figures: Figures
) -> Iterator[None]:
    """Kill the broker and start it again, every few seconds."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(draw.uniform(*KILL_SECONDS)):
            broker.stop()
            over.wait(draw.uniform(0, 1))
            broker.start()
            figures.kills += 1

    thread = threading.Thread(target=kill, name="killer")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def chaos(
    folder: Path,
    *,
    devices: int,
    rounds: int,
    payload_bytes: int,
    seed: str,
    buffer: int | None = None,
) -> Figures:
    """Do a run."""
    figures = Figures()
    draw = random.Random(seed)
    port = free_port()
    told = list[bytes]()
    write_architecture(folder / "artifacts", payload_bytes)

    def watch(event: control.RunEvent) -> None:
        if isinstance(event, control.RoundClosed):
            asked = len(event.merged) + len(event.missing)
            figures.closed.append(event.round_seconds)
            figures.merged.append(len(event.merged))
            figures.asked.append(asked)
            print(
                f"round {event.round}: {len(event.merged)} of {asked} in "
                f"{event.round_seconds:.1f} s",
                flush=True,
            )
        elif isinstance(event, control.RoundAbandoned):
            figures.abandoned.append(event.reason)
            print(f"round {event.round} ABANDONED: {event.reason}", flush=True)

    with mosquitto_broker(folder, persistent=True) as broker:
        config = FleetConfig(
            fleet=FLEET,
            store=folder / "store",
            broker=BrokerConfig(url=f"mqtt://127.0.0.1:{port}"),
            model=ModelConfig(artifacts=folder / "artifacts", arch=ARCH),
            round=RoundConfig(
                rounds=rounds,
                min_devices=max(1, devices // 2),
                wait_seconds=300,
                deadline_seconds=120,
                chunk_bytes=CHUNK_BYTES,
                buffer=buffer,
            ),
        )
        with (
            child(told, "tests.fleet.faults", str(port), str(broker.port), seed),
            child(
                [],
                "tests.fleet.chaos",
                "--swarm",
                config.broker.url,
                "--devices",
                str(devices),
                "--seed",
                seed,
            ),
            killed_now_and_then(broker, draw, figures),
            Server(FLEET, config.store, config.broker, listener=watch) as server,
        ):
            figures.status = server.run(config).status
    figures.faults = json.loads(told[0])
    with contextlib.closing(Store(folder / "store", read_only=True)) as store:
        run = store.runs()[0].id
        tasks = [
            task for item in store.rounds(run) for task in store.tasks(run, item.number, "train")
        ]
        figures.twice = sum(figures.merged) - sum(task.phase is TaskPhase.MERGED for task in tasks)
        refusals = Counter[str]()
        for item in store.refusals(run):
            refusals[item.reason] += item.count
        figures.refused = dict(refusals)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--payload", type=int, default=100_000)
    parser.add_argument("--buffer", type=int)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--swarm")
    given = parser.parse_args()
    if given.swarm is not None:
        swarm(given.swarm, given.devices, given.seed)
        return
    with tempfile.TemporaryDirectory() as made:
        found = chaos(
            Path(made),
            devices=given.devices,
            rounds=given.rounds,
            payload_bytes=given.payload,
            seed=given.seed,
            buffer=given.buffer,
        )
    print(json.dumps({"faults": found.faults, "refused": found.refused}, indent=1))
    print(
        f"{len(found.closed)} of {given.rounds} rounds closed, {len(found.abandoned)} abandoned, "
        f"{sum(found.merged)} "
        f"of {sum(found.asked)} updates merged, {found.twice} twice, {found.kills} kills of the "
        f"broker; a round took "
        f"{statistics.median(found.closed):.1f} s, at most {max(found.closed):.1f}"
    )
    sys.exit(len(found.closed) != given.rounds or bool(found.abandoned) or bool(found.twice))


if __name__ == "__main__":
    main()
