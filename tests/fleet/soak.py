"""Random kills: runs in which server, devices and broker are killed at random, held against the
undisturbed result.

python -m tests.fleet.soak --runs 50

One line a run, then how many ended with the same bits as a simulation, in which nobody is killed.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store, TaskPhase
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.held import SampleSplit
from simulation.preparing import prepare
from simulation.runner import simulate
from tests.brokers import TestBroker, mosquitto_broker
from tests.fleet.boards import restart
from tests.simulation.simulations import settings, tensors

ROUNDS = 10
MOST_KILLS = 12
LONGEST_SECONDS = 240.0
_CALM = {"rounds": ROUNDS, "fraction": 1.0, "quorum": 1.0, "min_devices": 6}


def serve(path: Path) -> None:
    """Do the run of a configuration, or go on with it."""
    config = FleetConfig.model_validate_json(path.read_text())
    with Server(config.fleet, config.store, config.broker) as server:
        sys.exit(server.run(config).exit_code)


def start(path: Path) -> subprocess.Popen[bytes]:
    with path.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.fleet.soak", "--serve", str(path)], stderr=log
        )


def disturbed(path: Path, broker: TestBroker, agents: LocalFleet, draw: random.Random) -> list[str]:
    """Kill until the run is over, or often enough; what was killed, in order."""
    server = start(path)
    killed = []
    until = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < until:
        wait = draw.uniform(0.2, 2.0) if len(killed) < MOST_KILLS else until - time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if server.wait(wait) == 0:
                return killed
            server = start(path)  # the broker was away when it was started
            continue
        victim = draw.choice(["server", "broker", *agents.processes])
        killed.append(victim)
        if victim == "server":
            server.kill()
            server.wait()
            server = start(path)
        elif victim == "broker":
            broker.stop()
            broker.start()
        else:
            restart(agents, victim)
    server.kill()
    return [*killed, "NOT OVER"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", type=Path)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve)
    equal = kills = 0
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        config = settings(root / "calm", root / "cache", round=_CALM)
        wanted = (calm := simulate(config)).run and tensors(calm.folder, calm.run)[-1]
        prepared = prepare(config)
        x = np.load(prepared.data / "train_x.npy")
        y = np.load(prepared.data / "train_y.npy")
        devices = []
        for name, held in zip(
            config.devices.ids, SampleSplit.load(prepared.split).train, strict=True
        ):
            np.savez(root / f"{name}.npz", x=x[held], y=y[held])
            devices.append(LocalDevice(name, root / f"{name}.npz", 1.0))
        fleet = config.fleet(
            artifacts=prepared.artifacts, weights=prepared.weights, test_set=prepared.test_set
        )
        for number in range(given.runs):
            folder = root / str(number)
            draw = random.Random(f"{given.seed}/{number}")
            folder.mkdir()
            with mosquitto_broker(folder, persistent=draw.random() < 0.5) as broker:
                rounds = fleet.round.model_copy(update={"deadline_seconds": 600.0, "grace": 600.0})
                own = {
                    "store": folder / "fleet" / "store",
                    "round": rounds,
                    "broker": BrokerConfig(url=broker.url),
                }
                (folder / "fleet.json").write_text(fleet.model_copy(update=own).model_dump_json())
                with LocalFleet(
                    folder / "devices", fleet=fleet.fleet, broker=broker.url, devices=devices
                ) as agents:
                    killed = disturbed(folder / "fleet.json", broker, agents, draw)
            with contextlib.closing(Store(folder / "fleet" / "store", read_only=True)) as store:
                run = store.runs()[0].id
                tasks = [
                    task
                    for item in store.rounds(run)
                    for task in store.tasks(run, item.number, "train")
                ]
            merged = sum(task.phase is TaskPhase.MERGED for task in tasks)
            found = tensors(folder / "fleet", run)
            same = len(found) == ROUNDS + 1 and all(
                np.array_equal(found[-1][name], wanted[name]) for name in wanted
            )
            lost = len(
                list(folder.rglob("task.unreadable"))
            )  # what a board had in hand when it was killed
            equal = equal + (same and not lost)
            kills = kills + len(killed)
            said = f"{merged} merged, {lost} records lost,"
            print(number, "same bits" if same else "OTHER", said, len(killed), *killed, flush=True)
    print(f"{equal} of {given.runs} runs with the same bits, {kills} kills")
    sys.exit(equal != given.runs)


if __name__ == "__main__":
    main()
