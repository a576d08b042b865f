"""Updates that are added up unseen: ten boards of which two die, and a fleet that ends where its
simulation does.
"""

import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from broker_server.store import Store, TaskPhase
from device_runtime.agent.loop import Agent
from device_runtime.settings import DeviceConfig
from fleet_protocol import secure_sum
from fleet_protocol.data import NpzData
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.secure_sum import STEPS, Member
from fleet_protocol.weights import MASKED
from models.registry import Registry, infer_layout
from simulation.data.datasets import load_dataset
from simulation.runner import simulate
from tests.brokers import embedded_broker
from tests.fleet.conftest import Watcher, run
from tests.simulation.data_folder import FOLDER, needs
from tests.simulation.simulations import as_a_fleet, settings, tensors
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

CLIP = 20.0
TABLES = {
    "model": {"arch": "mlp", "settings": {"hidden": (32,)}, "widths": (1.0, 0.5)},
    "devices": {"count": 5},
    "round": {"rounds": 2, "fraction": 1.0},
    "tiers": {"assign": "fix", "levels": "a2-b3"},
    "engine": {"workers": 1},
    "robust": {"norm_bound": 0},
}


def live(agent):
    with contextlib.suppress(SystemExit):
        agent.run()


@pytest.fixture
def spied(monkeypatch):
    """Agents by name and those of them that die with a masked update in hand; what the updates of
    the others change.
    """
    agents = {}
    gone = set()
    plain = {}
    changes = {}
    whole_numbers = secure_sum.whole_numbers
    masked = Member.masked

    def noted(update, sent, clip):
        words = whole_numbers(update, sent, clip)
        plain[words.tobytes()] = {key: update[key].astype(np.float64) - sent[key] for key in update}
        return words

    def sent_or_lost(member, update):
        name = threading.current_thread().name
        if name in gone:
            uplink = agents[name].ctx.uplink
            uplink.need_link().close(
                farewell=uplink.farewell("stopped")
            )  # what the broker says of who vanished
            raise SystemExit  # the thread ends, as a board does that loses its power
        changes[name] = plain[tensors_in(update)[MASKED].tobytes()]
        return masked(member, update)

    monkeypatch.setattr(secure_sum, "whole_numbers", noted)
    monkeypatch.setattr(Member, "masked", sent_or_lost)
    return agents, gone, changes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", pytest.param("mnist", marks=needs("mnist"))])
def test_two_of_ten_boards_die_and_the_sum_is_that_of_the_others(ground, tmp_path, spied, name):
    """They train and deal, and vanish before they send; the others' masks come off, and the sum is
    the plain one.
    """
    agents, gone, changes = spied
    gone |= {"d2", "d7"}
    data = load_dataset(name, FOLDER)
    x = data.train_x[:5000]
    y = data.train_y[:5000]
    if name != "digits":
        architecture = Registry.zoo().get("mlp")
        made = architecture.settings({"input_shape": x.shape[1:]})
        export_architecture(
            ExportRequest(
                architecture, made, (infer_layout(architecture, made).tier(1.0),), Recipe()
            ),
            tmp_path / "set",
            ExportOptions(formats=("onnx",)),
        )
        ground = replace(ground, artifacts=tmp_path / "set")
    with embedded_broker(tmp_path / "broker") as broker, contextlib.ExitStack() as stack:
        rounds = {
            "rounds": 1,
            "min_devices": 10,
            "quorum": 0.8,
            "grace": 0.3,
            "deadline_seconds": 240.0,
        }
        config = ground.config(broker.url, **rounds, wait_seconds=200.0)
        tables = {
            "secure_sum": {"clip": CLIP},
            "robust": {"norm_bound": 0},
            "evaluation": {"data": None},
        }
        config = type(config).model_validate({**config.model_dump(), **tables})
        for at in range(10):
            folder = Path(tmp_path / f"d{at}")
            folder.mkdir()
            np.savez(folder / "data.npz", x=x[at::10], y=y[at::10])
            agent = Agent(
                DeviceConfig.model_validate(
                    {
                        "fleet": "test",
                        "device": f"d{at}",
                        "broker": broker.url,
                        "state_dir": folder,
                        "data": NpzData(path=folder / "data.npz"),
                        "threads": 1,
                    }
                )
            )
            agents[f"d{at}"] = agent
            thread = threading.Thread(target=live, args=(agent,), name=f"d{at}")
            thread.start()
            stack.callback(thread.join, 30)
            stack.callback(agent.stop)
        finished = run(config, Watcher())
    assert finished.status == "finished", finished.error
    old, new = tensors(ground.folder, finished.run)
    with contextlib.closing(Store(config.store, read_only=True)) as store:
        tasks = store.tasks(finished.run, 1, "train")
    assert {task.device for task in tasks if task.phase is TaskPhase.MERGED} == set(changes)
    assert set(changes) == {f"d{at}" for at in range(10)} - gone
    assert all(
        (task.metrics is None) or (task.metrics.labels, task.metrics.train_loss) == ((), None)
        for task in tasks
    )
    for key, value in old.items():
        plain = np.mean([change[key] for change in changes.values()], axis=0)
        assert np.abs(plain).max() > 1e-3
        off = np.abs(new[key].astype(np.float64) - value - plain)
        print(
            f"{name} {key}: moved by up to {np.abs(plain).max():.3g}, off by up to {off.max():.2g}"
        )
        assert (
            off <= 0.5 * CLIP / STEPS + 4 * np.spacing(np.maximum(np.abs(new[key]), np.abs(value)))
        ).all()


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_fleet_ends_where_its_simulation_does(tmp_path, cache):
    """To the bit: masks cancel; and near the run whose updates the server sees."""
    secure = settings(tmp_path / "sim", cache, **TABLES, secure_sum={"clip": 50.0, "least": 2})
    simulated = simulate(secure)
    finished = as_a_fleet(secure, tmp_path)
    assert finished.status == "finished", finished.error
    ours, theirs = (
        tensors(tmp_path / name, run)[-1]
        for name, run in (("sim", simulated.run), ("fleet", finished.run))
    )
    assert all((ours[name] == theirs[name]).all() for name in ours)
    plain = simulate(
        settings(
            tmp_path / "plain", cache, **TABLES, strategy={"name": "heterofl", "label_rule": False}
        )
    )
    seen = tensors(tmp_path / "plain", plain.run)[-1]
    for name, value in ours.items():
        assert abs(value - seen[name]).max() < 1e-5, name


@pytest.mark.slow
def test_a_secure_sum_of_drawn_units_is_their_mean(tmp_path, cache):
    """Federated Dropout that draws for a tier ends near the run whose updates the server sees."""
    method = {"name": "federated_dropout", "federated_dropout": {"drawn_for": "tier"}}
    runs = {
        "sum": {"strategy": method, "secure_sum": {"clip": 50.0, "least": 2}},
        "plain": {"strategy": {**method, "label_rule": False}},
        "static": {"strategy": {"name": "heterofl", "label_rule": False}},
    }
    weights = {}
    for name, tables in runs.items():
        config = settings(tmp_path / name, cache, **TABLES, **tables)
        weights[name] = tensors(tmp_path / name, simulate(config).run)[-1]
    for name, value in weights["sum"].items():
        assert abs(value - weights["plain"][name]).max() < 1e-5, name
    # Narrow devices trained other units than the leading ones.
    hidden = "hidden.0.weight"
    assert abs(weights["plain"][hidden] - weights["static"][hidden]).max() > 1e-3
