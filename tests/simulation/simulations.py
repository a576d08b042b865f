"""A simulation that takes seconds, for the tests of this folder."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from broker_server.service.launch import submit
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.store import Store
from fleet_protocol import control
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.held import SampleSplit
from simulation.preparing import prepare
from simulation.runner import SimulationResult
from simulation.settings import SimulationConfig
from tests.brokers import embedded_broker

WIDTHS = (1.0, 0.5, 0.25)

BASE: dict[str, Any] = {
    "seed": 3,
    "model": {"arch": "conv", "settings": {"channels": (8, 16)}, "widths": WIDTHS},
    "data": {"name": "digits", "train_limit": 360, "test_limit": 120},
    "partition": {"kind": "dirichlet", "alpha": 1.0},
    "devices": {"count": 6},
    "round": {"rounds": 4, "fraction": 0.5},
    "train": {"epochs": 3, "batch_size": 8, "learning_rate": 0.1},
    "tiers": {"assign": "dynamic", "levels": "a1-b1-c1"},
    "engine": {"workers": 2},
}


def settings(out: Path, cache: Path, **tables: Any) -> SimulationConfig:
    """The small simulation; a table that is given is merged into its own."""
    merged = {**BASE, "out": out, "cache": cache}
    for key, value in tables.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return SimulationConfig.model_validate(merged)


def digests(result: SimulationResult) -> list[str]:
    """Digests of the weights of every global version."""
    return _digests(result.folder, result.run)


def _digests(folder: Path, run: str) -> list[str]:
    store = Store(folder / "store", read_only=True)
    try:
        return [version.digest for version in store.versions(run)]
    finally:
        store.close()


def tensors(folder: Path, run: str) -> list[dict[str, Any]]:
    """Weights of every global version; blobs differ in metadata where runs have different names."""
    from fleet_protocol.blob_store import BlobStore  # noqa: PLC0415
    from fleet_protocol.mapped_tensors import tensors_in  # noqa: PLC0415

    blobs = BlobStore(folder / "store" / "blobs")
    return [tensors_in(blobs.path(digest).read_bytes()) for digest in _digests(folder, run)]


def as_a_fleet(
    config: SimulationConfig,
    folder: Path,
    holdout: float = 0.0,
    cache: int = 0,
    broker_url: str | None = None,
) -> control.RunFinished:
    """What a simulation does, by agents and a server over a real broker; the store is in
    ``<folder>/fleet``. Agents may keep this many bytes of the outputs of frozen layers. Without the
    URL of a broker, the fleet has its own.
    """
    prepared = prepare(config)
    x = np.load(prepared.data / "train_x.npy")
    y = np.load(prepared.data / "train_y.npy")
    devices = []
    table = config.devices
    split = SampleSplit.load(prepared.split)
    for name, kind, held in zip(table.ids, table.kinds, split.train, strict=True):
        path = folder / f"{name}.npz"
        np.savez(path, x=x[held], y=y[held])
        devices.append(
            LocalDevice(name, path, kind.max_width, max_depth=kind.max_depth, cache=cache)
        )
    fleet = config.fleet(
        artifacts=prepared.artifacts, weights=prepared.weights, test_set=prepared.test_set
    )
    with contextlib.ExitStack() as stack:
        if broker_url is None:
            broker_url = stack.enter_context(embedded_broker(folder / "broker")).url
        at = BrokerConfig(url=broker_url)
        rounds = fleet.round.model_copy(update={"deadline_seconds": 240.0})
        fleet = fleet.model_copy(
            update={"store": folder / "fleet" / "store", "broker": at, "round": rounds}
        )
        agents = LocalFleet(
            folder / "devices",
            fleet=fleet.fleet,
            broker=broker_url,
            devices=devices,
            holdout=holdout,
        )
        with Server(fleet.fleet, fleet.store, at) as server, agents:
            up = threading.Thread(target=server.serve)
            up.start()
            try:
                wait_until_online(fleet.store, len(devices))
                return submit(fleet)
            finally:
                server.stop()
                up.join(30)


def wait_until_online(store: Path, count: int) -> None:
    """Wait until the server has heard of all devices, so that it samples among all of them."""
    deadline = time.monotonic() + 200
    pause = threading.Event()
    reading = Store(store, read_only=True)
    try:
        while sum(device.online for device in reading.devices()) < count:
            assert time.monotonic() < deadline, "the devices do not come up"
            pause.wait(0.1)
    finally:
        reading.close()
