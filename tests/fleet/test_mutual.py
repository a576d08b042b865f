"""FML in the fleet: six device processes with personal models of different shapes teach, and learn
from, one meme.
"""

import numpy as np
import pytest

from broker_server.settings.broker import BrokerConfig
from broker_server.settings.evaluation import EvaluationConfig
from broker_server.settings.fleet import FleetConfig, ModelConfig, TrainConfig
from broker_server.settings.rounds import RoundConfig
from fleet_protocol import control
from fleet_protocol.data import NpzData
from fleet_protocol.errors import PlanError, RefusalReason
from fleet_protocol.mapped_tensors import tensors_in
from models.registry import Registry, infer_layout
from models.tier import Tier
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.datasets import load_dataset
from simulation.data.partition import dirichlet
from tests.brokers import mosquitto_broker
from tests.fleet.boards import restart
from tests.fleet.conftest import Watcher, run, start_accuracy
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.pair_set import Pair, PairModel, export_pairs
from trainer_export.recipe import Recipe

pytestmark = pytest.mark.slow
ROUNDS = 5
DEVICES = 6
PERSONAL = ({"hidden": (16,)}, {"hidden": (48, 24)})
SHAPE = {"input_shape": (1, 8, 8)}


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    """A broker and six agents, with one of two personal models each."""
    folder = tmp_path_factory.mktemp("studio")
    data = load_dataset("digits")
    mlp = Registry.zoo().get("mlp")
    meme = mlp.settings({**SHAPE, "hidden": (32, 32)})
    layout = infer_layout(mlp, meme)
    export_architecture(
        ExportRequest(mlp, meme, (layout.tier(1.0),), Recipe()),
        folder / "artifacts",
        ExportOptions(formats=("onnx",)),
    )
    sets = []
    for number, settings in enumerate(PERSONAL):
        pair = Pair(
            PairModel(mlp, layout.tier(1.0), meme),
            PairModel(mlp, Tier(1.0), mlp.settings({**SHAPE, **settings})),
        )
        (report,) = export_pairs([pair], Recipe(), folder / "sets", name=f"pair{number}")
        sets.append(report.folder)
    devices = []
    for index, part in enumerate(dirichlet(data.train_y, DEVICES, 1.0, seed=5)):
        path = folder / f"device-{index}.npz"
        np.savez(path, x=data.train_x[part], y=data.train_y[part])
        devices.append(LocalDevice(f"device-{index}", path, 1.0, own_model=sets[index % len(sets)]))
    np.savez(folder / "test.npz", x=data.test_x, y=data.test_y)
    with (
        mosquitto_broker(folder) as broker,
        LocalFleet(
            folder / "devices", fleet="studio", broker=broker.url, devices=devices, holdout=0.2
        ) as fleet,
    ):
        yield folder, broker.url, fleet


@pytest.fixture
def config(studio, tmp_path):
    """A run with changed keys of the method."""
    folder, url, _ = studio

    def build(private=(), **fml):
        # What stays on the devices is not there to be judged.
        judged = None if private else NpzData(path=folder / "test.npz")
        return FleetConfig.model_validate(
            {
                "fleet": "studio",
                "store": tmp_path / "store",
                "broker": BrokerConfig(url=url),
                "model": ModelConfig(artifacts=folder / "artifacts", arch="mlp"),
                "round": RoundConfig(
                    rounds=ROUNDS, min_devices=DEVICES, nudge_seconds=2.0, grace=60
                ),
                "train": TrainConfig(learning_rate=0.05, epochs=2, batch_size=16),
                "strategy": {"name": "fml", "fml": fml},
                "private": {"parts": private} if private else None,
                "evaluation": EvaluationConfig(data=judged, every=ROUNDS),
            }
        )

    return build


def personal_accuracy(watcher, number):
    """Mean accuracy of the personal models on their devices' held-out samples."""
    updates = [
        event for event in watcher.events_of(control.UpdateReceived) if event.round == number
    ]
    assert len(updates) == DEVICES
    return np.mean([event.metrics.evaluation.accuracy for event in updates])


@pytest.mark.slow
def test_personal_models_and_the_meme_learn_from_each_other(studio, config):
    """The global model and the personal ones learn; a device that is killed goes on with its
    personal model.
    """
    _, _, fleet = studio
    watcher = Watcher()
    watcher.once(
        lambda event: isinstance(event, control.RoundClosed) and event.round == 3,
        lambda: restart(fleet, "device-0"),
    )
    made = config(alpha=0.8, beta=0.4, decays=(2,))
    finished = run(made, watcher)
    fleet.check()
    assert finished.status == "finished", finished.error
    assert [len(event.merged) for event in watcher.events_of(control.RoundClosed)] == [
        DEVICES
    ] * ROUNDS
    gain = finished.evaluation.accuracy - start_accuracy(made)
    first, last = (personal_accuracy(watcher, number) for number in (1, ROUNDS))
    print(
        f"gain {gain:.3f} to {finished.evaluation.accuracy:.3f}, personal {first:.3f} to {last:.3f}"
    )
    assert gain > 0.5
    assert last > first + 0.05
    folders = [studio[0] / "devices" / f"device-{index}" for index in range(DEVICES)]
    for folder in folders:
        assert len(list(folder.glob(f"own-model-{finished.run}-*"))) == 2


def test_an_adaptor_stays_on_its_device(studio, config):
    """Every device keeps an adaptor and a head in its state folder, and shares the rest."""
    finished = run(config(private=("head",)), Watcher())
    assert finished.status == "finished", finished.error
    kept = [
        tensors_in(
            (
                studio[0]
                / "devices"
                / f"device-{i}"
                / f"own-model-{finished.run}-{ROUNDS}.safetensors"
            ).read_bytes()
        )
        for i in range(2)
    ]
    names = [name for name in kept[0] if name.startswith("adaptor/")]
    assert names
    assert all(not np.array_equal(kept[0][name], kept[1][name]) for name in names)


def test_a_device_without_a_personal_model_refuses(studio, config, tmp_path):
    """The round goes on without it, and the reason is told; a block that the model lacks is an
    error at planning.
    """
    folder, url, _ = studio
    bare = LocalDevice("device-9", folder / "device-0.npz", 1.0)
    watcher = Watcher()
    made = config()
    made = made.model_copy(
        update={"round": made.round.model_copy(update={"rounds": 1, "min_devices": DEVICES + 1})}
    )
    with LocalFleet(tmp_path / "bare", fleet="studio", broker=url, devices=[bare]):
        finished = run(made, watcher)
    assert finished.status == "finished", finished.error
    assert {(event.device, event.reason) for event in watcher.events_of(control.UpdateRefused)} == {
        ("device-9", RefusalReason.UNSUPPORTED)
    }
    with pytest.raises(PlanError, match="has neither a block nor a module attic"):
        run(config(private=("attic",)), Watcher())
