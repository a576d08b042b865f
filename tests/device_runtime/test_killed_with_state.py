"""Power cuts in every state of a board that keeps something between rounds: private parts, a copy of
the model, FedDyn's memory, a window that moves, with optimizer states and rounding errors.

Each round of a real device is cut off in another state with SIGKILL. The oracle computes the same
rounds in this process, one after the other, undisturbed.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from broker_server.rounds.artifacts import load_artifacts
from device_runtime.training.compute import compute
from device_runtime.training.hooks import Hooks
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.blobs import blob_ref
from fleet_protocol.data import make_dataset
from fleet_protocol.digests import blob_path
from fleet_protocol.messages import Done, Instructions, Offer, TierChoice
from fleet_protocol.weights import encode_weights
from models.registry import Registry, infer_layout
from models.tier import Tier
from tests.brokers import any_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.scripted_server import RUN, ScriptedServer, scripted_server
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

PATIENCE_SECONDS = 120.0
CHUNK_BYTES = 1024
SHAPE = (1, 4, 4)
SAMPLES = 40
HEAD = ("head.weight", "head.bias")
WHOLE = "w1.00-d1"
WINDOW = ("w1.00-d1-t0.50", "w1.00-d1-t0.50-p1")
FEW = {"epochs": 2}
MANY = {"epochs": 1000}  # long enough for the device to be killed in them


@dataclass(frozen=True)
class Kind:
    """What a board keeps.

    Attributes:
        files: prefixes of its files.
        tiers: of the rounds, in turn.
        offer: fields of the offers.
        train: fields of their training.
    """

    files: tuple[str, ...]
    tiers: tuple[str, ...] = (WHOLE,)
    offer: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


INT4 = {"encoding": "int4", "feedback": True}
KINDS = {
    "parts": Kind(
        ("optimizer", "private", "residual"),
        offer={"routine": "private", "stays": HEAD, "upload": INT4},
        train={"optimizer_state": "keep"},
    ),
    "parts, one after the other": Kind(
        ("private",),
        offer={"routine": "private", "stays": HEAD, "settings": {"private_epochs": 1}},
    ),
    "copy": Kind(
        ("optimizer", "private"),
        offer={"routine": "private", "settings": {"copy_model": True, "mu": 0.1}},
        train={"optimizer_state": "keep"},
    ),
    "window": Kind(
        ("private",), tiers=WINDOW, offer={"routine": "private", "stays": HEAD, "settings": {}}
    ),
    "memory": Kind(
        ("dynamic", "residual"),
        offer={"routine": "dynamic", "upload": INT4},
        train={"proximal_mu": 0.1},
    ),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model of two layers before the head, with every tier of `KINDS`."""
    folder = tmp_path_factory.mktemp("mlp")
    mlp = Registry.zoo().get("mlp")
    settings = mlp.settings({"input_shape": SHAPE, "hidden": (8, 6)})
    tiers = [Tier.parse(tier) for tier in (WHOLE, *WINDOW)]
    request = ExportRequest(mlp, settings, tiers, Recipe(proximal=True))
    export_architecture(request, folder, ExportOptions(formats=("onnx",)))
    assert infer_layout(mlp, settings).tier(1.0).id == WHOLE
    return load_artifacts(folder, "mlp", chunk_bytes=CHUNK_BYTES)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with any_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@dataclass
class Scene:
    """A device and the server that asks it for rounds of one kind."""

    server: ScriptedServer
    device: DeviceProcess
    artifacts: Any
    kind: Kind
    offers: list[Offer] = field(default_factory=list)

    @property
    def task(self) -> str:
        """The id of the newest task."""
        return f"t{len(self.offers)}"

    def offer(self, train: dict[str, Any]) -> None:
        """Offer the next round, with the weights of a version of its own."""
        number = len(self.offers) + 1
        tier = self.kind.tiers[number % len(self.kind.tiers)]
        data = encode_weights(self.weights(number))
        manifest = self.artifacts.tiers[tier].manifest.to_bytes()
        for blob in (data, manifest):
            self.server.blobs.put(blob)
        choice = TierChoice(
            tier=tier,
            artifact_set=blob_ref(manifest, CHUNK_BYTES),
            weights=blob_ref(data, CHUNK_BYTES),
        )
        offer = self.server.offer(
            self.device.id,
            choice,
            task=f"t{number}",
            round=number,
            train={**self.kind.train, **train},
            **self.kind.offer,
        )
        self.offers.append(offer)

    def weights(self, number: int) -> dict[str, Any]:
        """The weights that the server sends in a round."""
        start = self.artifacts.initial_weights()
        return {name: value + np.float32(0.01 * number) for name, value in start.items()}

    def finish(self) -> None:
        """Wait until the newest task is over."""
        self.server.wait_update(self.task)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.device.states()[-1:] != ["idle"]:
            assert time.monotonic() < deadline, self.device.log()
            threading.Event().wait(0.05)

    def cut(self) -> None:
        """Cut the power, and start the board again."""
        self.device.kill()
        self.device.start()


def undisturbed(scene: Scene) -> None:
    scene.offer(FEW)
    scene.finish()


def cut_in_idle(scene: Scene) -> None:
    before = len(scene.server.statuses)
    scene.cut()
    scene.server.wait_state("idle", scene.device.id, after=before)
    undisturbed(scene)


def cut_in_fetching(scene: Scene) -> None:
    scene.server.script.tamper = lambda _digest, index, frame: None if index else frame
    scene.offer(FEW)
    scene.device.wait_log("blobs again")
    scene.device.kill()
    scene.server.script.tamper = lambda _digest, _index, frame: frame
    scene.device.start()
    scene.finish()


def cut_in_training(scene: Scene) -> None:
    epochs = scene.device.log().count("epoch 1/")
    scene.offer(MANY)
    scene.device.wait_log("epoch 1/", times=epochs + 1)
    scene.cut()
    scene.finish()


def cut_in_uploading(scene: Scene) -> None:
    _upload_without_an_answer(scene)
    scene.device.start()
    scene.finish()
    assert "training" not in scene.device.states()


def cut_before_the_update_is_whole(scene: Scene) -> None:
    """The board has the file of this round, and computes the round again."""
    _upload_without_an_answer(scene)
    done = scene.server.heard(Done, scene.task)[0]
    path = scene.device.state_dir / "objects" / blob_path(done.update.digest)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    scene.device.start()
    scene.finish()
    assert "training" in scene.device.states()


def _upload_without_an_answer(scene: Scene) -> None:
    scene.server.script.acknowledge = False
    scene.offer(FEW)
    scene.server.wait_message(Done, scene.task)
    scene.device.kill()
    scene.server.script.acknowledge = True


CUTS: tuple[Callable[[Scene], None], ...] = (
    undisturbed,
    cut_in_idle,
    cut_in_fetching,
    cut_in_training,
    cut_in_uploading,
    cut_before_the_update_is_whole,
    undisturbed,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_board_goes_on_with_all_that_it_keeps(tmp_path, exported, broker, name):
    """Cut off in another state in each round; updates and files have the oracle's bits."""
    kind = KINDS[name]
    draw = np.random.default_rng(1)
    x = draw.normal(size=(SAMPLES, *SHAPE)).astype(np.float32)
    y = np.arange(SAMPLES) % 10
    np.savez(tmp_path / "data.npz", x=x, y=y)
    blobs = BlobStore(tmp_path / "blobs")
    for digest, path in exported.files.items():
        write_atomically(blobs.path(digest), path.read_bytes(), durable=False)
    data = {"kind": "npz", "path": "data.npz"}
    board = f"board-{abs(hash(str(tmp_path))):x}"
    device = DeviceProcess(tmp_path, broker.url, data, device=board, holdout=0)
    with scripted_server(broker.url, blobs) as server:
        scene = Scene(server, device, exported, kind)
        try:
            device.start()
            server.wait_state("idle", device.id)
            for cut in CUTS:
                cut(scene)
        finally:
            device.kill()
    oracle = DeviceSetup(
        make_dataset("data.npz", x, y), blobs, "onnx", threads=1, holdout=0.0, folder=tmp_path
    )
    for offer in scene.offers:
        assert server.updates[offer.task] == expected_update(offer, exported, oracle)
    kept = files_of(device.state_dir)
    assert {path.partition("-")[0] for path in kept} == set(kind.files)
    assert kept == files_of(tmp_path)


def expected_update(offer: Offer, exported: Any, oracle: DeviceSetup) -> bytes:
    """The update of a board that nobody cuts off, after the rounds before."""
    (choice,) = offer.choices
    fields = {name: getattr(offer, name) for name in Instructions.model_fields}
    task = Task(
        RUN,
        offer.round,
        offer.task,
        offer.version,
        choice.tier,
        Instructions(**fields),
        exported.tiers[choice.tier].manifest,
        choice.weights,
    )
    finished = compute(task, oracle, Hooks())
    return bytes(oracle.blobs.read(finished.update.digest))


def files_of(folder: Any) -> dict[str, bytes]:
    """What a board keeps between rounds, by file."""
    return {path.name: path.read_bytes() for path in folder.glob("*-*.safetensors")}
