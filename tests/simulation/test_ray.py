"""The Ray engine: equal to the local one to the bit, on a cluster that is there or not, with actors
that die.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from broker_server.store import Store
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref
from fleet_protocol.errors import ConfigError, TransportError
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import BlobRef, Instructions, TrainSettings
from fleet_protocol.messages.instructions import Upload
from simulation.device_tables import EngineTable
from simulation.engines import open_engine
from simulation.engines.local import LocalEngine, WorkerDiedError
from simulation.engines.parcel import read_state
from simulation.orders import DeviceTask, Engine, Failed, Finished, WorkerSetup, WorkOrder
from simulation.settings import SimulationConfig

ray = pytest.importorskip("ray")

from simulation.engines import cluster as ray_cluster  # noqa: E402  (they need Ray)
from simulation.engines.cluster import connect  # noqa: E402
from simulation.engines.ray import RayEngine, shares_of  # noqa: E402
from simulation.engines.ray_worker import RayWorker, versions  # noqa: E402

WAIT_SECONDS = 120.0
TABLE = EngineTable(kind="ray", workers=2)
CONFIG = {
    "model": {"arch": "mlp", "widths": [1.0, 0.5]},
    "data": {"name": "digits", "train_limit": 400},
    "devices": {"count": 6},
    "evaluation": {"holdout": 0.2},
}


# Without a cluster.


@pytest.mark.parametrize(
    ("table", "resources", "expected"),
    [
        ({}, {"CPU": 12.0}, (12, 0.0)),
        ({}, {}, (1, 0.0)),
        ({"workers": 5}, {"CPU": 12.0, "GPU": 2.0}, (5, 0.0)),
        ({"device": "cuda"}, {"CPU": 12.0, "GPU": 2.0}, (2, 1.0)),
        ({"device": "cuda", "workers": 1}, {"GPU": 2.0}, (1, 1.0)),
        ({"device": "cuda", "workers": 4}, {"GPU": 2.0}, (4, 0.5)),
        ({"device": "cuda", "workers": 5}, {"GPU": 2.0}, (5, 1 / 3)),
    ],
)
def test_workers_share_what_there_is(table, resources, expected):
    """One worker per CPU, or per GPU where training is there; more workers than GPUs share them
    evenly.
    """
    backend = {"backend": "torch"} if "device" in table else {}
    assert shares_of(EngineTable(kind="ray", **table, **backend), resources) == expected


def test_no_gpu_is_a_mistake_of_the_configuration():
    """CUDA on a cluster without a GPU would wait for ever."""
    with pytest.raises(ConfigError, match="the Ray cluster has no GPU"):
        shares_of(EngineTable(kind="ray", backend="torch", device="cuda"), {"CPU": 8.0})


def test_without_ray_the_error_says_what_to_install(tmp_path, monkeypatch):
    """Ray is an extra; who asks for it without having it is told its name."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "simulation.engines.ray")
    places = dict.fromkeys(("artifacts", "data", "split", "blobs", "updates", "devices"), tmp_path)
    with pytest.raises(ConfigError, match=r'pip install "shoal\[ray\]"'):
        open_engine(TABLE, WorkerSetup(arch="mlp", **places))


def test_an_address_where_nothing_listens():
    """The error names the address and the way out, at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(
            TransportError, match=rf"no Ray cluster at {address}: .*`ray start --head"
        ) as caught:
            connect(address, workers=1)
        assert caught.value.exit_code == 5
    assert not ray.is_initialized()


def test_an_address_where_something_else_listens():
    """What takes the connection and says nothing is given up at the deadline, though Ray would go
    on for minutes.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            TransportError, match=rf"no Ray cluster answers at {address} within 1 s"
        ):
            connect(address, workers=1, deadline_seconds=1.0)


def test_the_brackets_of_an_ipv6_address_are_no_part_of_the_host():
    """A listening port passes; once it is closed, the error names the address as it was written."""
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        address = f"[::1]:{server.getsockname()[1]}"
        for cluster_address in (address, f"ray://{address}"):
            ray_cluster._check_port(cluster_address, 1.0)
    with pytest.raises(TransportError, match=re.escape(f"no Ray cluster at {address}: ")) as caught:
        ray_cluster._check_port(address, 1.0)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_an_address_that_is_none():
    """Ray's own word for it is passed on."""
    with pytest.raises(
        TransportError, match=r"cluster at nonsense cannot be used: .*Invalid address format"
    ):
        connect("nonsense", workers=1)


class KeepsARound:
    """Stands for virtual devices with models of their own: adds a file to what its device keeps."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup

    def work(self, order: WorkOrder) -> list[Finished | Failed]:
        for task in order.tasks:
            folder = self.setup.devices / task.device
            (folder / f"round-{task.round}").write_bytes((folder / "round-1").read_bytes() + b"+")
            assert BlobStore(self.setup.blobs).read(task.weights.digest)
        return [Failed(task=task.id, detail="seen") for task in order.tasks]


def test_an_actor_elsewhere_has_what_it_is_sent(tmp_path, monkeypatch):
    """Files, weights and devices' memories come with the calls; what a device keeps goes back and
    leaves nothing.
    """
    monkeypatch.setattr(
        "simulation.engines.ray_worker.ray.get", lambda reference, timeout: reference
    )
    monkeypatch.setattr("simulation.engines.ray_worker.VirtualDevices", KeepsARound)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "there"))
    here = {
        name: tmp_path / "here" / name
        for name in ("artifacts", "data", "split", "blobs", "updates", "devices")
    }
    setup = WorkerSetup(arch="mlp", **here).model_dump_json().encode()
    actor = RayWorker("session")
    assert json.loads(actor.greet(setup, str(tmp_path / "nowhere")))["shares"] is False
    actor.unpack(setup, {"data/train_x.npy": [b"sam", b"ples"], "parts.npz": [b""]})
    (shared,) = (tmp_path / "there").glob("shoal-session/shared")
    assert (shared / "data/train_x.npy").read_bytes() == b"samples"

    kept = {"round-1": b"one"}
    for number in range(2, 14):
        content = b"weights %d" % number
        weights = blob_ref(content, 1024)
        order = WorkOrder(
            tasks=(
                an_item(
                    "t",
                    number,
                    weights,
                    weights,
                    TrainSettings(learning_rate=0.1, epochs=1, batch_size=2, seed=1),
                ),
            )
        )
        answer = actor.work(
            order.model_dump_json().encode(), {weights.digest: content}, {"device-0": kept}
        )
        assert [json.loads(result)["detail"] for result in answer.results] == ["seen"]
        assert answer.states["device-0"] == kept | {f"round-{number}": b"one+"}
    own = [path for path in shared.parent.iterdir() if path != shared]
    assert len(list((own[0] / "blobs/objects").rglob("*/*"))) == 8
    assert not list((own[0] / "devices/device-0").iterdir())
    actor.clear()
    assert not shared.parent.exists()


# With Ray.


def an_item(
    task: str, number: int, manifest: BlobRef, weights: BlobRef, train: TrainSettings, index=0
) -> DeviceTask:
    return DeviceTask(
        id=task,
        run="run",
        round=number,
        device=f"device-{index}",
        index=index,
        version=0,
        tier="w1.00-d1",
        artifact_set=manifest,
        weights=weights,
        instructions=Instructions(train=train),
    )


class Small:
    """A prepared simulation whose devices all train the whole model from the initial weights."""

    def __init__(self, folder: Path) -> None:
        from simulation.preparing import prepare  # noqa: PLC0415  (torch)

        self.folder = folder
        config = SimulationConfig.model_validate({"out": folder, **CONFIG})
        self.prepared = prepare(config)
        manifest = self.prepared.artifacts / "mlp" / "w1.00-d1" / "manifest.json"
        self.manifest = blob_ref(manifest.read_bytes(), 1024)
        self.weights = blob_ref(self.prepared.weights.read_bytes(), 1024)

    def setup(self, name: str) -> WorkerSetup:
        blobs = self.folder / name / "blobs"
        BlobStore(blobs).put(self.prepared.weights.read_bytes())
        return WorkerSetup(
            artifacts=self.prepared.artifacts,
            arch="mlp",
            data=self.prepared.data,
            split=self.prepared.split,
            blobs=blobs,
            updates=self.folder / name / "updates",
            devices=self.folder / name / "devices",
            holdout=0.2,
        )

    def orders(self, epochs: int = 2) -> list[WorkOrder]:
        train = TrainSettings(learning_rate=0.1, epochs=epochs, batch_size=16, seed=5)
        tasks = [
            an_item(f"task-{index}", 1, self.manifest, self.weights, train, index)
            for index in range(6)
        ]
        return [
            WorkOrder(tasks=tuple(tasks[:2])),
            *(WorkOrder(tasks=(task,)) for task in tasks[2:]),
        ]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


def answers(engine: Engine, count: int = 6) -> dict[str, Finished | Failed]:
    results: dict[str, Finished | Failed] = {}
    deadline = time.monotonic() + WAIT_SECONDS
    while len(results) < count and time.monotonic() < deadline:
        for result in engine.receive(1.0):
            assert result.task not in results
            results[result.task] = result
    return results


def what_counts(found: dict[str, Finished | Failed]) -> dict[str, tuple[object, ...]]:
    """Everything of the results that does not depend on time: updates by digest, so to the bit."""
    assert all(isinstance(result, Finished) for result in found.values()), found
    return {
        task: (
            result.update,
            result.metrics.train_loss,
            result.metrics.evaluation,
            result.metrics.labels,
        )
        for task, result in found.items()
    }


@pytest.fixture(scope="module")
def expected(small) -> dict[str, tuple[object, ...]]:
    engine = LocalEngine(1, small.setup("local"))
    try:
        engine.submit(small.orders())
        return what_counts(answers(engine))
    finally:
        engine.close()


@pytest.fixture(scope="module")
def cluster(small):
    """A Ray cluster of its own processes on this machine, as on a head node."""
    assert small
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        f"--port={port}",
    ]
    command += [
        "--node-ip-address=127.0.0.1",
        "--num-cpus=3",
        "--include-dashboard=false",
        f"--object-store-memory={80 * 2**20}",
    ]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    with (small.folder / "head.log").open("wb") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    address = f"127.0.0.1:{port}"
    try:
        connect_when_there(address)
        yield address
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(60)


def connect_when_there(address: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    host, _, port = address.partition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            assert time.monotonic() < deadline, "the head did not start"
        else:
            return


@pytest.mark.slow
def test_ray_here_computes_what_the_local_engine_computes(small, expected):
    """Ray is started for the engine and ends with it; a second order of the same kind gives the
    same again.
    """
    handler = signal.getsignal(signal.SIGTERM)
    setup = small.setup("ray")
    engine = RayEngine(TABLE, setup)
    try:
        assert engine.receive(0.1) == []
        for _ in range(2):
            engine.submit(small.orders())
            assert what_counts(answers(engine)) == expected
        assert signal.getsignal(signal.SIGTERM) is handler
        assert [path.name for path in setup.updates.glob(".*")] == []
        assert sum(path.is_file() for path in setup.updates.rglob("*/*/*")) == 6
    finally:
        engine.close()
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.slow
def test_actors_that_do_not_see_the_folder(small, expected, cluster):
    """On a cluster by address: all that is needed travels, updates come back, and nothing is left
    on the machine.
    """
    setup = small.setup("apart")
    config = TABLE.model_copy(update={"address": cluster})
    engine = RayEngine(config, setup, shared=False)
    try:
        engine.submit(small.orders())
        assert what_counts(answers(engine)) == expected
        updates = BlobStore(setup.updates)
        assert all(updates.has(result[0].digest) for result in expected.values())
        left = [
            path
            for path in Path(tempfile.gettempdir()).glob("shoal-*")
            if path.name == f"shoal-{engine._session}"
        ]
        assert left
    finally:
        engine.close()
    assert not any(path.exists() for path in left)


@pytest.mark.slow
def test_what_encodings_lose_travels_with_the_devices(small):
    """Residuals stayed with the actor that had the device's round, and the next one began without,
    or with old ones.
    """
    rounds = []
    for number in (1, 2, 3):
        tasks = [task for order in small.orders(epochs=1) for task in order.tasks]
        keeping = tasks[0].instructions.model_copy(update={"upload": Upload(encoding="int8")})
        of_round = {"round": number, "instructions": keeping}
        tasks = [
            task.model_copy(update={**of_round, "id": f"{task.id}-{number}"}) for task in tasks
        ]
        rounds.append([WorkOrder(tasks=(task,)) for task in tasks])
    results = []
    for name, begin in (
        ("near", partial(LocalEngine, 1)),
        ("far", partial(RayEngine, TABLE, shared=False)),
    ):
        setup = small.setup(name)
        engine = begin(setup)
        try:
            for orders in rounds:
                engine.submit(orders)
                kept = what_counts(answers(engine))
                results.append(
                    (kept, [read_state(setup.devices / order.tasks[0].device) for order in orders])
                )
        finally:
            engine.close()
    assert all(results[0][1])
    assert results[:3] == results[3:]
    assert len({str(update) for kept, _ in results[:3] for update, *_ in kept.values()}) == 18


@pytest.mark.slow
def test_an_actor_that_dies_is_replaced_once(small, expected, cluster):
    """Its orders are computed by another one with the same result; a second death over the same
    order is an error.
    """
    engine = RayEngine(
        TABLE.model_copy(update={"address": cluster, "workers": 1}), small.setup("dying")
    )
    try:
        (first,) = engine._actors
        ray.kill(first.handle)
        engine.submit(small.orders())
        assert what_counts(answers(engine)) == expected
        (second,) = engine._actors
        assert second is not first

        endless = small.orders(epochs=10_000_000)[0]
        endless = WorkOrder(
            tasks=tuple(
                task.model_copy(update={"id": f"endless-{task.id}"}) for task in endless.tasks
            )
        )
        engine.submit([endless])
        ray.kill(second.handle)
        assert engine.receive(WAIT_SECONDS) == []
        (third,) = engine._actors
        assert [order for order, _ in third.orders] == [endless]
        ray.kill(third.handle)
        with pytest.raises(
            WorkerDiedError, match=r"died twice during round 1, device-0, device-1 \(w1\.00-d1\)"
        ):
            engine.receive(WAIT_SECONDS)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_cluster_without_room_or_with_other_versions(small, cluster, monkeypatch):
    """More workers than CPUs never start, and other versions would give other results: both are
    said at once.
    """
    config = TABLE.model_copy(update={"address": cluster, "workers": 7})
    with pytest.raises(
        TransportError, match=r"7 workers were not ready within 5 s; the Ray cluster has 3 CPUs"
    ):
        RayEngine(config, small.setup("crowded"), start_seconds=5.0)
    assert not ray.is_initialized()
    monkeypatch.setattr("simulation.engines.ray.versions", lambda: "Shoal 0.0.0, onnxruntime 0")
    with pytest.raises(
        ConfigError, match=f"has {versions()}, but this machine has Shoal 0.0.0, onnxruntime 0"
    ):
        RayEngine(config.model_copy(update={"workers": 1}), small.setup("other"))
    assert not ray.is_initialized()


def final_weights(folder: Path, run: str) -> dict[str, bytes]:
    store = Store(folder / "store", read_only=True)
    try:
        version = store.version(run)
        assert version is not None
        assert version.number == 2
        tensors = tensors_in(BlobStore(folder / "store" / "blobs").read(version.digest))
    finally:
        store.close()
    return {name: value.tobytes() for name, value in tensors.items()}


@pytest.mark.slow
def test_a_simulation_does_not_depend_on_the_engine(tmp_path):
    """Two rounds with sub-models: the same history but for real time, and the same global weights
    to the bit.
    """
    from simulation.runner import simulate  # noqa: PLC0415  (torch)

    histories = []
    weights = []
    for kind in ("local", "ray"):
        settings = {
            **CONFIG,
            "out": tmp_path / kind,
            "cache": tmp_path / "cache",
            "devices": {"count": 4, "types": [{"type": "Nano", "max_width": 0.5}, {"type": "TX2"}]},
            "strategy": {"name": "heterofl"},
            "round": {"rounds": 2},
            "engine": {"kind": kind, "workers": 2},
        }
        result = simulate(SimulationConfig.model_validate(settings))
        assert result.finished.status == "finished"
        histories.append([replace(row, seconds=0.0) for row in result.rounds])
        weights.append(final_weights(tmp_path / kind, result.run))
    assert histories[0] == histories[1]
    assert weights[0] == weights[1]
