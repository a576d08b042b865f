"""Every method of widths in the fleet: five rounds, six device processes, digits; each learns by a
stated margin.
"""

import numpy as np
import pytest

from broker_server.settings.broker import BrokerConfig
from broker_server.settings.evaluation import EvaluationConfig
from broker_server.settings.fleet import FleetConfig, ModelConfig, TrainConfig
from broker_server.settings.rounds import RoundConfig
from fleet_protocol import control
from fleet_protocol.data import NpzData
from fleet_protocol.errors import PlanError
from models.registry import Registry, infer_layout
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.datasets import load_dataset
from simulation.data.partition import dirichlet
from tests.brokers import mosquitto_broker
from tests.fleet.conftest import Watcher, run, start_accuracy
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

ROUNDS = 5
TIERS = (1.0, 0.5, 0.25, 0.125)
LIMITS = (1.0, 1.0, 0.5, 0.5, 0.25, 0.25)


@pytest.fixture(scope="module")
def pond(tmp_path_factory):
    """A broker and six agents that serve every run of this module, and the folder they stand on."""
    folder = tmp_path_factory.mktemp("pond")
    data = load_dataset("digits")
    devices = []
    for index, part in enumerate(dirichlet(data.train_y, len(LIMITS), 1.0, seed=5)):
        np.savez(folder / f"device-{index}.npz", x=data.train_x[part], y=data.train_y[part])
        devices.append(
            LocalDevice(f"device-{index}", folder / f"device-{index}.npz", LIMITS[index])
        )
    np.savez(folder / "test.npz", x=data.test_x, y=data.test_y)
    architecture = Registry.zoo().get("mlp")
    settings = architecture.settings({"input_shape": (1, 8, 8), "hidden": (64, 64)})
    layout = infer_layout(architecture, settings)
    tiers = tuple(layout.tier(width) for width in TIERS)
    export_architecture(
        ExportRequest(architecture, settings, tiers, Recipe()),
        folder / "artifacts",
        ExportOptions(formats=("onnx",)),
    )
    export_architecture(
        ExportRequest(architecture, settings, tiers[:1], Recipe(proximal=True)),
        folder / "proximal",
        ExportOptions(formats=("onnx",)),
    )
    with (
        mosquitto_broker(folder) as broker,
        LocalFleet(folder / "devices", fleet="pond", broker=broker.url, devices=devices) as fleet,
    ):
        yield folder, broker.url, fleet


@pytest.fixture(scope="module")
def school(pond):
    """Six more agents on the same data that can all train the whole model."""
    folder, url, _ = pond
    devices = [
        LocalDevice(f"device-{index}", folder / f"device-{index}.npz", 1.0)
        for index in range(len(LIMITS))
    ]
    with LocalFleet(folder / "school", fleet="school", broker=url, devices=devices) as fleet:
        yield folder, url, fleet


@pytest.fixture
def trained(pond, tmp_path):
    """Does a run with changed tables; gives what it told, and by how much accuracy rose."""
    return trainer("pond", pond, tmp_path)


def trainer(name, ground, tmp_path):
    """Makes the function of `trained` for one fleet."""
    folder, url, fleet = ground

    def go(**tables):
        config = FleetConfig.model_validate(
            {
                "fleet": name,
                "store": tmp_path / "store",
                "broker": BrokerConfig(url=url),
                "model": ModelConfig(artifacts=folder / "artifacts", arch="mlp"),
                "round": RoundConfig(rounds=ROUNDS, min_devices=len(LIMITS), nudge_seconds=2.0),
                "train": TrainConfig(learning_rate=0.1, epochs=2, batch_size=16),
                "evaluation": EvaluationConfig(
                    data=NpzData(path=folder / "test.npz"), every=ROUNDS
                ),
                **tables,
            }
        )
        watcher = Watcher()
        finished = run(config, watcher)
        fleet.check()
        assert finished.status == "finished", finished.error
        assert not watcher.events_of(control.UpdateRefused)
        gain = finished.evaluation.accuracy - start_accuracy(config)
        print(f"gain {gain:.3f} to {finished.evaluation.accuracy:.3f}")
        return watcher, gain

    return go


def merged(watcher):
    """The tiers of each round, by device in order."""
    return [tuple(event.merged.values()) for event in watcher.events_of(control.RoundClosed)]


@pytest.mark.parametrize(
    ("strategy", "margin"),
    [
        pytest.param({"name": "heterofl"}, 0.6, id="heterofl", marks=pytest.mark.slow),
        pytest.param({"name": "fedrolex"}, 0.5, id="fedrolex", marks=pytest.mark.slow),
        pytest.param(
            {"name": "fedrolex", "fedrolex": {"window": "static"}},
            0.6,
            id="static",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"name": "fedrolex", "fedrolex": {"weighting": "width", "step": 3}},
            0.5,
            id="by-width",
            marks=pytest.mark.slow,
        ),
        pytest.param({"name": "federated_dropout"}, 0.4, id="dropout-tied", marks=pytest.mark.slow),
        pytest.param({"name": "fedmedian"}, 0.5, id="fedmedian", marks=pytest.mark.slow),
        pytest.param(
            {"name": "federated_dropout", "federated_dropout": {"draw": "per_layer"}},
            0.4,
            id="dropout-per-layer",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_method_of_widths_learns(trained, strategy, margin):
    """All six devices are in every round, each with the widest tier it can hold, and the global
    model learns.
    """
    watcher, gain = trained(strategy=strategy)
    assert (
        merged(watcher)
        == [("w1.00-d1", "w1.00-d1", "w0.50-d1", "w0.50-d1", "w0.25-d1", "w0.25-d1")] * ROUNDS
    )
    assert gain > margin


@pytest.mark.slow
def test_rolling_trains_a_model_wider_than_every_device(trained):
    """With no tier above half the width the whole model still learns, since every unit gets its
    turn.
    """
    watcher, gain = trained(
        strategy={"name": "fedrolex", "fedrolex": {"step": 16}},
        tiers={"allowed": ("w0.50-d1", "w0.25-d1")},
    )
    assert set(merged(watcher)[0]) == {"w0.50-d1", "w0.25-d1"}
    assert gain > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"name": "fedavg"}, id="fedavg"),
        pytest.param({"name": "fedprox", "fedprox": {"mu": 0.01}}, id="fedprox"),
    ],
)
def test_methods_of_equal_devices_learn(school, tmp_path, strategy):
    """All six devices train the whole model."""
    trained = trainer("school", school, tmp_path)
    model = ModelConfig(artifacts=school[0] / "proximal", arch="mlp")
    watcher, gain = trained(strategy=strategy, model=model)
    assert merged(watcher) == [("w1.00-d1",) * len(LIMITS)] * ROUNDS
    assert gain > 0.6


@pytest.mark.slow
def test_a_strong_proximal_term_holds_the_model_back(school, tmp_path):
    """The pull of FedProx reaches the devices: with a large mu the model hardly moves."""
    trained = trainer("school", school, tmp_path)
    _, gain = trained(
        strategy={"name": "fedprox", "fedprox": {"mu": 20.0}},
        model=ModelConfig(artifacts=school[0] / "proximal", arch="mlp"),
        train=TrainConfig(learning_rate=0.01, epochs=2, batch_size=16),
    )
    _, free = trained(
        strategy={"name": "fedavg"},
        model=ModelConfig(artifacts=school[0] / "proximal", arch="mlp"),
        train=TrainConfig(learning_rate=0.01, epochs=2, batch_size=16),
    )
    assert gain < free - 0.1


@pytest.mark.parametrize(
    "name",
    [
        "fedadam",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("plain", "fedavgm", "fedyogi", "fedadagrad")
        ),
    ],
)
def test_a_server_optimizer_steps_any_merge(trained, name):
    """Each is put behind HeteroFL's average, and its state lives through the rounds."""
    rates = {"plain": 0.8, "fedavgm": 0.3, "fedadam": 0.03, "fedyogi": 0.03, "fedadagrad": 0.1}
    optimizer = {"name": name, "learning_rate": rates[name]}
    if name == "fedavgm":
        optimizer["beta1"] = 0.5
    _, gain = trained(strategy={"name": "heterofl"}, server_optimizer=optimizer)
    assert gain > 0.3


@pytest.mark.slow
def test_fixed_levels_go_by_the_order_of_the_devices(trained):
    """Two of each level for six devices, but never more than a board can hold."""
    watcher, gain = trained(tiers={"assign": "fix", "levels": "a1-b1-c1"})
    assert (
        merged(watcher)
        == [("w1.00-d1", "w1.00-d1", "w0.50-d1", "w0.50-d1", "w0.25-d1", "w0.25-d1")] * ROUNDS
    )
    assert gain > 0.6
    watcher, _ = trained(tiers={"assign": "fix", "levels": "a0-d1-b1"}, seed=2)
    assert merged(watcher) == [("w0.125-d1",) * 3 + ("w0.50-d1",) + ("w0.25-d1",) * 2] * ROUNDS


@pytest.mark.slow
def test_dynamic_levels_are_drawn_anew_in_every_round(trained):
    """The tiers of a device differ from round to round and stay within its limit."""
    watcher, gain = trained(tiers={"assign": "dynamic", "levels": "a1-b1-c1-d1"})
    rounds = merged(watcher)
    assert len(set(rounds)) > 1
    for tiers in rounds:
        assert all(
            float(tier[1:].split("-")[0]) <= limit
            for tier, limit in zip(tiers, LIMITS, strict=True)
        )
    assert gain > 0.4


@pytest.mark.slow
def test_devices_that_size_themselves_grow_when_training_stalls(trained):
    """With the speed held fixed, utilities follow the loss alone: TE is 1, 1, 1.5, 2, 2.5 of Theta
    2.

    The first two rounds have no change of loss to look at; then every round counts as stalled, far
    from the target.
    """
    settings = {
        "arm": "training",
        "theta": 2.0,
        "gamma": 1.0,
        "step": 0.5,
        "stall": 100.0,
        "alpha": 1.0,
    }
    watcher, gain = trained(strategy={"name": "whalefl", "whalefl": settings})
    wanted = (0.25, 0.25, 0.5, 1.0, 1.0)
    assert merged(watcher) == [
        tuple(f"w{min(width, limit):.2f}-d1" for limit in LIMITS) for width in wanted
    ]
    assert gain > 0.4


GROWING = {"theta": 1e9, "gamma": 1.0, "step": 1e9, "stall": 100.0, "alpha": 1.0}
NARROWEST = ("w0.125-d1",) * len(LIMITS)
WIDEST = tuple(f"w{limit:.2f}-d1" for limit in LIMITS)


@pytest.mark.parametrize(
    ("arm", "wanted"),
    [
        ("full", [NARROWEST] * 2 + [WIDEST] * 3),
        pytest.param("system", [NARROWEST] * 5, marks=pytest.mark.slow),
    ],
)
def test_the_system_arm_sees_no_loss(trained, arm, wanted):
    """A Theta beyond any speed keeps devices narrow; only where the loss counts do stalled rounds
    outgrow it.

    The server offers every device its widest tier first, and merges what the device takes instead.
    """
    watcher, _ = trained(strategy={"name": "whalefl", "whalefl": {"arm": arm, **GROWING}})
    assert merged(watcher) == wanted
    assert {tuple(event.devices.values()) for event in watcher.events_of(control.RoundStarted)} == {
        WIDEST
    }
    taken = {
        (event.round, event.device): event.tier
        for event in watcher.events_of(control.DeviceAccepted)
    }
    assert [
        tuple(taken[number, f"device-{i}"] for i in range(len(LIMITS)))
        for number in range(1, ROUNDS + 1)
    ] == wanted


@pytest.mark.slow
def test_devices_that_size_themselves_send_less_than_the_baselines(trained, school, tmp_path):
    """FedAvg is width 1 for all and HeteroFL every device's widest; narrow rounds send less than
    both.
    """
    sent = {}
    for name, do, wanted, table in (
        ("fedavg", trainer("school", school, tmp_path), ("w1.00-d1",) * len(LIMITS), {}),
        ("heterofl", trained, WIDEST, {}),
        ("whalefl", trained, NARROWEST, {"whalefl": {"arm": "system", "theta": 1e9}}),
    ):
        watcher, _ = do(strategy={"name": name, **table})
        closed = watcher.events_of(control.RoundClosed)
        assert merged(watcher) == [wanted] * ROUNDS
        sent[name] = sum(event.size for event in watcher.events_of(control.UpdateReceived))
        assert closed[-1].payload_bytes > sent[name]
    assert sent["fedavg"] > 1.5 * sent["heterofl"] > 4 * sent["whalefl"]


@pytest.mark.slow
def test_devices_that_size_themselves_measure_their_speed(trained):
    """Every round begins with the narrowest tier, which is timed; a Theta below any speed lets them
    grow at once.
    """
    watcher, gain = trained(strategy={"name": "whalefl", "whalefl": {"theta": 1e-3}})
    assert merged(watcher) == [WIDEST] * ROUNDS
    said = [
        event.tier for event in watcher.events_of(control.DeviceAccepted) if event.kind == "train"
    ]
    assert sorted(said) == sorted((*WIDEST, *NARROWEST) * ROUNDS)
    assert gain > 0.4


def test_a_method_that_cannot_use_the_model_is_refused_before_training(trained):
    """An mlp has no stack of layers, and no tier for level e."""
    with pytest.raises(PlanError, match="has no stack of layers"):
        trained(strategy={"name": "inclusivefl"})
    with pytest.raises(PlanError, match="export that width"):
        trained(tiers={"assign": "fix", "levels": "a1-e1"})
