"""Simulations: the same as a fleet, the same after a kill, the same when a worker dies."""

import contextlib
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from broker_server.settings.fleet import TrainConfig
from broker_server.store import Store, TaskPhase, database
from broker_server.store.export import load_version
from broker_server.updates import screens
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ConfigError, DataError, PlanError
from fleet_protocol.locks import held
from simulation import virtual_dispatcher
from simulation.board_times import training_load
from simulation.data.datasets import load_dataset
from simulation.data.held import VirtualData
from simulation.engines.local import LocalEngine, WorkerDiedError
from simulation.orders import DeviceTask, WorkerSetup, WorkOrder
from simulation.preparing import prepare
from simulation.results.history import read_devices, read_history
from simulation.runner import simulate
from tests.marking import mostly_slow
from tests.simulation.simulations import as_a_fleet, settings, tensors

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def straight(cache, tmp_path_factory):
    """A simulation that nothing disturbed."""
    return simulate(settings(tmp_path_factory.mktemp("straight") / "out", cache))


def same(first: list[dict], second: list[dict]) -> None:
    assert len(first) == len(second)
    for mine, theirs in zip(first, second, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def test_history_and_learning(straight):
    """Every round has a row, the files say the same, and the model has learnt."""
    assert straight.finished.status == "finished"
    assert [row.round for row in straight.rounds] == [1, 2, 3, 4]
    assert read_history(straight.folder) == straight.rounds
    assert straight.rounds[-1].accuracy > 0.5  # ten classes
    assert all(row.devices == 3 for row in straight.rounds)
    assert len(read_devices(straight.folder)) == 12
    totals = [row.simulated_total for row in straight.rounds]
    assert totals == sorted(totals)
    assert totals[0] == straight.rounds[0].simulated_seconds > 0


@pytest.mark.parametrize("seconds", [-1.0, math.inf])
def test_what_has_been_computed_is_committed_now_and_then(cache, tmp_path, monkeypatch, seconds):
    """Answers wait for a moment, so that a round of small tasks is no row of commits, and never for
    a long one.
    """
    monkeypatch.setattr(virtual_dispatcher, "_COMMIT_SECONDS", seconds)
    config = settings(tmp_path / "out", cache, round={"rounds": 3}, engine={"workers": 1})
    committed = []

    def hear(event):
        if isinstance(event, control.UpdateReceived):
            with contextlib.closing(Store(config.out / "store", read_only=True)) as store:
                tasks = store.tasks(event.run, event.round, "train")
            committed.append(sum(task.phase is TaskPhase.RECEIVED for task in tasks))

    assert simulate(config, listener=hear).finished.status == "finished"
    assert len(committed) >= 9
    assert any(committed) == (seconds < 0)  # answers that were read together are committed together


def test_a_round_costs_the_same_however_many_were_before(cache, tmp_path, monkeypatch):
    """What is read of the store does not grow with the run, or thousands of rounds would take
    longer and longer.
    """
    read = []
    by_round = []

    def counted(kind, row, made=database.from_row):
        read.append(kind)
        return made(kind, row)

    monkeypatch.setattr(database, "from_row", counted)
    monkeypatch.setattr(screens, "_BACK", 3)  # of 20 rounds at most, where a tier has too few norms
    config = settings(
        tmp_path / "out", cache, round={"rounds": 8}, evaluation={"every": 1, "statistics": "query"}
    )
    simulate(config, watch=lambda _row: by_round.append(len(read)))
    rounds = np.diff(by_round)
    assert len(rounds) == 7
    assert max(rounds[4:]) <= max(rounds[1:4]), (
        rounds
    )  # by who takes part, norms are compared with more rounds or less


def test_virtual_devices_change_their_images_as_boards_do(cache, tmp_path):
    """[data] augment reaches every device's samples, with the black of the data set."""
    config = settings(tmp_path / "out", cache, data={"augment": "crop-flip"})
    prepared = prepare(config)
    data = VirtualData(prepared.data, prepared.split, config.data.changes).samples_of(2)
    assert data.augment == ("crop", "flip")
    np.testing.assert_array_equal(data.normal_black, np.zeros((1, 1, 1), np.float32))
    normalised = shutil.copytree(prepared.data, tmp_path / "data")
    np.save(normalised / "black.npy", np.array([-1.5], np.float32))
    data = VirtualData(normalised, prepared.split, ("crop", "flip")).samples_of(2)
    assert data.normal_black.tolist() == [[[-1.5]]]


@pytest.mark.slow
def test_a_fleet_and_a_simulation_agree(cache, tmp_path):
    """Six agents and a server over a real broker sample, plan and train as six virtual devices do,
    to the bit.
    """
    config = settings(tmp_path / "sim", cache, round={"rounds": 5})
    simulated = simulate(config)
    finished = as_a_fleet(config, tmp_path)
    assert finished.status == "finished"
    assert asked(tmp_path / "fleet", finished.run) == asked(tmp_path / "sim", simulated.run)
    trained = tensors(tmp_path / "fleet", finished.run)
    virtual = tensors(tmp_path / "sim", simulated.run)
    assert len(trained) == len(virtual) == 6
    for mine, theirs in zip(trained, virtual, strict=True):
        assert max(float(np.abs(mine[name] - theirs[name]).max()) for name in mine) <= 1e-5
    assert finished.evaluation.accuracy == simulated.rounds[-1].accuracy


def asked(folder: Path, run: str) -> list[list[tuple]]:
    """Devices, tiers and plans of every round."""
    store = Store(folder / "store", read_only=True)
    try:
        rounds = store.rounds(run)
        return [
            [
                (task.kind, task.device, task.tier, task.plan_key)
                for task in store.tasks(run, item.number)
            ]
            for item in rounds
        ]
    finally:
        store.close()


KILLED = """
import os, sys
from fleet_protocol.configuration import load_config
from simulation.settings import SimulationConfig
from simulation.runner import simulate
config = SimulationConfig.model_validate_json(sys.argv[1])
kind, number, count = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
seen = 0
def told(event):
    global seen
    if event.type == kind and getattr(event, "round", None) == number:
        seen += 1
        if seen == count:
            os.kill(os.getpid(), 9)
simulate(config, listener=told)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number", "count"),
    [
        ("round-started", 1, 1),
        ("update-received", 2, 1),
        ("statistics-started", 2, 1),
        ("update-received", 3, 5),
        ("round-closed", 3, 1),
    ],
)
def test_a_killed_simulation_goes_on_to_the_same_bits(
    cache, tmp_path, straight, kind, number, count
):
    """Killed in any state of a round, a simulation started again ends with the weights of an
    undisturbed one.
    """
    config = settings(tmp_path / "out", cache)
    script = [sys.executable, "-c", KILLED, config.model_dump_json(), kind, str(number), str(count)]
    killed = subprocess.run(script, timeout=120, check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with contextlib.closing(sqlite3.connect(config.out / "store" / "shoal.db")) as store, store:
        store.execute("UPDATE rounds SET planned_at = planned_at - 86400 WHERE ended_at IS NULL")
    result = simulate(config)
    assert max(row.seconds for row in result.rounds) < 3600  # a day passed while nothing ran
    same(tensors(result.folder, result.run), tensors(straight.folder, straight.run))
    assert [row.accuracy for row in result.rounds] == [row.accuracy for row in straight.rounds]
    assert [row.simulated_total for row in result.rounds] == [
        row.simulated_total for row in straight.rounds
    ]
    assert read_history(result.folder) == result.rounds


@pytest.mark.slow
def test_more_rounds_go_on_from_the_last(cache, tmp_path, straight):
    """Two rounds, and then four asked for in the same folder, are four rounds."""
    two = settings(tmp_path / "out", cache, round={"rounds": 2})
    assert len(simulate(two).rounds) == 2
    four = simulate(settings(tmp_path / "out", cache))
    same(tensors(four.folder, four.run), tensors(straight.folder, straight.run))
    again = simulate(settings(tmp_path / "out", cache))
    assert again.rounds == four.rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [{"train": {"rate": {"kind": "cosine"}}}, {"round": {"buffer": 1}}],
    ids=["cosine", "buffer"],
)
def test_more_rounds_of_which_earlier_ones_would_be_others_are_refused(cache, tmp_path, tables):
    """The folder had said that it is the run of more rounds, and its weights were of neither."""

    def asked(rounds):
        return settings(
            tmp_path / "out",
            cache,
            **{**tables, "round": {**tables.get("round", {}), "rounds": rounds}},
        )

    assert simulate(asked(1)).finished.status == "finished"
    with pytest.raises(ConfigError, match=r"a different \[round\]"):
        simulate(asked(2))


@pytest.mark.slow
def test_old_versions_need_not_be_kept(cache, tmp_path, straight):
    """With keep_versions the figures are the same, a folder goes on although others were dropped,
    and few remain.
    """
    two = simulate(settings(tmp_path / "out", cache, round={"rounds": 2}))
    config = settings(tmp_path / "out", cache, keep_versions=1)
    four = simulate(config)
    assert four.run == two.run
    assert [row.accuracy for row in four.rounds] == [row.accuracy for row in straight.rounds]
    store = Store(config.out / "store", read_only=True)
    versions = store.versions(four.run)
    last = load_version(store).weights
    store.close()
    blobs = BlobStore(config.out / "store" / "blobs")
    best = max(
        (version.evaluation.accuracy, version.number)
        for version in versions
        if version.evaluation is not None
    )[1]
    assert [version.number for version in versions if blobs.has(version.digest)] == sorted(
        {best, 4}
    )
    same([last], tensors(straight.folder, straight.run)[-1:])


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_workers_do_not_change_results(cache, tmp_path, straight, workers):
    """One worker or three give the bits of two."""
    result = simulate(settings(tmp_path / "out", cache, engine={"workers": workers}))
    same(tensors(result.folder, result.run), tensors(straight.folder, straight.run))


@pytest.mark.slow
def test_perplexity_is_a_mean_over_chunks(cache, tmp_path):
    """One chunk of all samples: exp of the loss; more chunks: no less, by Jensen's inequality."""
    perplexities = {}
    for samples in (60, 10):
        tables = {
            "data": {"test_limit": 60},
            "round": {"rounds": 1},
            "evaluation": {"perplexity": samples},
        }
        (perplexities[samples],) = simulate(
            settings(tmp_path / f"of-{samples}", cache, **tables)
        ).rounds
    assert perplexities[60].loss == perplexities[10].loss
    assert perplexities[60].perplexity == pytest.approx(np.exp(perplexities[60].loss), rel=1e-5)
    assert perplexities[10].perplexity > perplexities[60].perplexity * 1.0001


def workers_of_this_process() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "simulation.worker" in " ".join(child.cmdline())
    ]


@pytest.mark.slow
def test_a_dead_worker_is_replaced(cache, tmp_path, straight):
    """A worker that is killed in mid-round is started again, and its device's work is repeated
    once.
    """
    dead = []

    def told(event):
        if isinstance(event, control.RoundStarted) and event.round == 2:
            dead.append(workers_of_this_process()[0].pid)
            os.kill(dead[0], signal.SIGKILL)

    result = simulate(settings(tmp_path / "out", cache), listener=told)
    assert dead
    assert result.finished.status == "finished"
    same(tensors(result.folder, result.run), tensors(straight.folder, straight.run))


def test_a_worker_that_dies_twice_over_the_same_work_ends_the_simulation(cache, tmp_path):
    """The error names the devices, the round, how the worker died and what to do; the folder can go
    on.
    """
    config = settings(tmp_path / "out", cache)

    class Deadly(LocalEngine):
        def submit(self, orders):
            super().submit(orders)
            for worker in self._workers:
                if worker.orders:
                    worker.process.kill()

        def _hand_out(self):
            super()._hand_out()
            for worker in self._workers:
                if worker.orders:
                    worker.process.kill()

    prepared = prepare(config)
    setup = WorkerSetup(
        artifacts=prepared.artifacts,
        arch="conv",
        data=prepared.data,
        split=prepared.split,
        blobs=tmp_path / "blobs",
        updates=tmp_path / "updates",
        devices=tmp_path / "devices",
    )
    blob = {"digest": "0" * 64, "size": 1, "chunk_bytes": 1024}
    task = DeviceTask.model_validate(
        {
            "id": "t1",
            "run": "r",
            "round": 7,
            "device": "device-4",
            "index": 4,
            "version": 0,
            "tier": "w0.50-d1",
            "artifact_set": blob,
            "weights": blob,
            "instructions": {
                "train": {"learning_rate": 0.1, "epochs": 1, "batch_size": 8, "seed": 0}
            },
        }
    )
    engine = Deadly(1, setup)
    message = r"twice during round 7, device-4 \(w0.50-d1\).*signal 9.*fewer workers"
    with contextlib.closing(engine), pytest.raises(WorkerDiedError, match=message):
        until_it_ends(engine, WorkOrder(tasks=(task,)))


def until_it_ends(engine: LocalEngine, order: WorkOrder) -> None:
    engine.submit([order])
    for _ in range(5):
        engine.receive(10.0)


def test_refusals_of_a_device_do_not_end_the_simulation(cache, tmp_path):
    """A learning rate that makes losses infinite declines every task; the run fails with that
    reason.
    """
    result = simulate(settings(tmp_path / "out", cache, train={"learning_rate": 1e15}))
    assert result.finished.status == "failed"
    assert result.finished.exit_code != 0
    assert "declined" in result.finished.error


def test_another_configuration_is_refused(cache, tmp_path, straight):
    """A folder belongs to one simulation; the error names the table that differs."""
    with pytest.raises(ConfigError, match=r"contains a simulation with a different \[train\]"):
        simulate(settings(straight.folder, cache, train={"learning_rate": 0.01}))


@pytest.mark.slow
def test_a_cache_has_the_samples_of_what_is_there(cache, tmp_path, monkeypatch):
    """A set by name may be another one tomorrow, in its folder or in another that SHOAL_DATA
    names.
    """
    digits = load_dataset("digits")
    held = []
    for shift in (0.0, 1.0):
        shifted = replace(digits, train_x=digits.train_x + shift)
        monkeypatch.setattr(
            "simulation.preparing.load_dataset", lambda *_, shifted=shifted, **__: shifted
        )
        held.append(
            np.load(
                prepare(settings(tmp_path / str(shift), tmp_path / "cache")).data / "train_x.npy"
            )
        )
    np.testing.assert_array_equal(held[0] + 1, held[1])
    with pytest.raises(ConfigError, match="changed since"):
        prepare(settings(tmp_path / "0.0", tmp_path / "cache"))


def test_another_content_of_a_function_is_refused(cache, tmp_path):
    """One that changes samples, as one that makes the model."""
    path = tmp_path / "own.py"
    path.write_text("def same(x, generator):\n    return x\n")
    config = settings(
        tmp_path / "out", cache, data={"augment": [f"{path}:same"]}, round={"rounds": 1}
    )
    assert simulate(config).finished.status == "finished"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(
        ConfigError, match=r"contains a simulation with a different .*own\.py; use another `out`"
    ):
        simulate(config)


def test_a_short_batch_of_so_many_steps_takes_less_time():
    """A device of 14 samples computes 14 in each of ten steps, in one pass each."""
    train = TrainConfig(learning_rate=0.1, batch_size=64)
    steps, epochs = (train.model_copy(update=of) for of in ({"steps": 10}, {"epochs": 10}))
    few, many = (training_load(1.0, examples, steps, 0) for examples in (14, 640))
    assert few == training_load(1.0, 14, epochs, 0)
    assert many == training_load(1.0, 64, epochs, 0)


@pytest.mark.parametrize("which", mostly_slow(["models", "clock"], lambda which: which == "clock"))
def test_another_content_of_a_file_it_names_is_refused(cache, tmp_path, which):
    """The model file had been traced anew, and trained on the weights of the old one, without a
    word.
    """
    path = tmp_path / {"models": "own.py", "clock": "own.toml"}[which]
    path.write_text(
        (
            ROOT
            / {"models": "examples/tutorial/my_models.py", "clock": "simulation/clock.toml"}[which]
        ).read_text()
    )
    own = {"arch": "small_cnn", "settings": {}, "models": path}
    keys = {"models": {"model": own}, "clock": {"clock": {"table": str(path)}}}[which]
    config = settings(tmp_path / "out", cache, **keys, round={"rounds": 1})
    assert simulate(config).finished.status == "finished"
    assert len(simulate(config).rounds) == 1
    path.write_text(path.read_text() + "\n")
    with pytest.raises(
        ConfigError,
        match=rf"contains a simulation with a different .*{path.name}; use another `out`",
    ):
        simulate(config.model_copy(update={"round": config.round.model_copy(update={"rounds": 2})}))


SLOPED = """
from torch import nn
from part_of_own import SLOPE
from models import architecture

@architecture()
def sloped(cut, *, input_shape=(1, 8, 8), classes=10):
    layers = nn.Linear(64, cut.width("hidden", 4)), nn.LeakyReLU(SLOPE)
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(cut.width("hidden", 4), cut.classes(classes)))
"""


@pytest.mark.slow
def test_what_a_model_file_imports_is_exported_anew_when_it_changes(tmp_path, monkeypatch):
    """The cache went by the model file alone, and a simulation trained the model of the old
    import.
    """
    own = tmp_path / "own.py"
    imported = tmp_path / "part_of_own.py"
    own.write_text(SLOPED)
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for number in (1, 1, 2):
        imported.write_text(f"SLOPE = {number}\n")
        monkeypatch.delitem(sys.modules, "part_of_own", raising=False)
        model = {"arch": "sloped", "settings": {}, "models": own, "widths": (1.0,)}
        digests.append(
            prepare(
                settings(
                    tmp_path / f"out-{len(digests)}",
                    tmp_path / "cache",
                    model=model,
                    tiers={"levels": "a1"},
                )
            ).artifacts
        )
    assert digests[0] == digests[1] != digests[2]
    monkeypatch.delitem(sys.modules, "part_of_own")


def test_a_start_that_failed_claims_no_folder(cache, tmp_path):
    """To correct what the message named had been refused; settings that do not fit leave no split
    of the samples behind.
    """
    out = tmp_path / "out"
    with pytest.raises(PlanError):
        simulate(settings(out, cache, model={"widths": (1.0, 0.01)}))
    assert not list(out.glob("parts-*.npz"))
    with pytest.raises(ConfigError, match="unknown data set 'digit'"):
        simulate(settings(out, cache, data={"name": "digit"}))
    shards = {"partition": {"kind": "shards", "per_device": 2}, "round": {"rounds": 1}}
    assert simulate(settings(out, cache, **shards)).finished.status == "finished"


def test_what_looks_at_a_version_is_written_before_the_next(cache, tmp_path):
    """Versions are not kept for long: after a kill the row of one that is gone could not be made
    again.
    """
    out = tmp_path / "out"
    stored = []
    keys = {
        "partition": {"kind": "shards", "per_device": 2},
        "evaluation": {"local": True},
        "keep_versions": 1,
    }
    simulate(
        settings(out, cache, **keys),
        watch=lambda row: stored.append((row.round, read_history(out)[-1].round)),
    )
    assert stored == [(number, number) for number in range(1, 5)]


def test_devices_of_a_dirichlet_split_are_judged_on_their_own_samples(cache, tmp_path):
    """Test samples are dealt in the proportions of the training samples; a device answers with its
    labels alone.
    """
    keys = {
        "partition": {"kind": "dirichlet", "alpha": 0.1, "seed": 1},
        "evaluation": {"local": True},
    }
    out = tmp_path / "out"
    result = simulate(settings(out, cache, **keys, round={"rounds": 2}))
    row = read_history(out)[-1]
    assert row.round == len(result.rounds) == 2
    # of ten labels a device holds few, so that the same weights answer far more often rightly with
    # its mask
    assert row.local_accuracy > row.accuracy + 0.1
    unmasked = simulate(
        settings(
            tmp_path / "unmasked", cache, **keys, round={"rounds": 2}, train={"mask_labels": False}
        )
    )
    again = read_history(unmasked.folder)[-1]
    assert again.local_accuracy == pytest.approx(again.accuracy, abs=0.005)


def test_two_do_not_work_in_one_folder(cache, straight):
    """Two of them would write each other's rounds; the error names the folder, and nothing there is
    touched.
    """
    before = (straight.folder / "config.json").stat().st_mtime_ns
    with (
        held(straight.folder, "busy"),
        pytest.raises(ConfigError, match="another simulation is running in"),
    ):
        simulate(settings(straight.folder, cache))
    assert (straight.folder / "config.json").stat().st_mtime_ns == before
    assert simulate(settings(straight.folder, cache)).rounds == straight.rounds


@pytest.mark.parametrize(
    ("tables", "error", "match"),
    [
        ({"data": {"name": "mnst"}}, ConfigError, "unknown data set 'mnst'"),
        ({"data": {"name": "mnist", "root": "/nowhere"}}, DataError, "/nowhere/mnist"),
        ({"model": {"arch": "cnov"}}, ConfigError, "cnov"),
        ({"tiers": {"levels": "a1-e1"}}, PlanError, "level e"),
        ({"devices": {"types": [{"type": "Pi9"}]}}, ConfigError, "Pi9"),
        (
            {
                "evaluation": {"local": True},
                "partition": {"kind": "iid"},
                "data": {"test_limit": 3},
            },
            ConfigError,
            "evaluation.local: .* assigns none of the 3 test samples to a device",
        ),
        ({"partition": {"kind": "subject"}}, ConfigError, "does not record subjects"),
        (
            {
                "evaluation": {"local": True},
                "partition": {"kind": "shards", "per_device": 9},
                "data": {"test_limit": 50},
            },
            ConfigError,
            "class 0 has 2 test samples for 6 shards",
        ),
        ({"evaluation": {"perplexity": 7}}, ConfigError, "are not divisible into chunks of 7"),
        ({"evaluation": {"matthews": True}}, ConfigError, "here are 10 labels"),
        (
            {"evaluation": {"metric": "f1"}},
            ConfigError,
            "evaluations do not report 'f1', only loss, accuracy",
        ),
        (
            {"train": {"micro_batch": 4}},
            PlanError,
            "recipe of conv supports only whole batches, but train.micro_batch = 4",
        ),
        (
            {"strategy": {"name": "fedmedian"}, "round": {"buffer": 2}},
            PlanError,
            "strategy fedmedian are incompatible",
        ),
        (
            {"strategy": {"name": "fml"}, "tiers": {"levels": "a1"}},
            ConfigError,
            r"strategy fml needs \[own_models\]",
        ),
        (
            {
                "own_models": {"models": [{"arch": "mlp"}]},
                "model": {"widths": [1.0]},
                "tiers": {"levels": "a1"},
            },
            ConfigError,
            r"strategy heterofl does not use \[own_models\]",
        ),
    ],
)
def test_what_cannot_begin_says_why(tmp_path, tables, error, match):
    """Wrong names and settings that do not go together are errors before anything is exported."""
    cache = tmp_path / "cache"
    with pytest.raises(error, match=match):
        simulate(settings(tmp_path / "out", cache, **tables))
    assert not (cache / "artifacts").exists()
    assert not (cache / "pairs").exists()


@pytest.mark.slow
def test_devices_choose_their_tiers(cache, tmp_path):
    """WHALE-FL: slow devices start narrow, the server merges what they chose, and a continued run
    chooses alike.
    """
    tables = {
        "model": {"widths": (1.0, 0.5, 0.25, 0.125, 0.0625), "settings": {"channels": (16, 32)}},
        "strategy": {"name": "whalefl", "whalefl": {"theta": 9.0}},
        "tiers": {"assign": "capacity", "levels": None},
        "round": {"rounds": 4, "fraction": 1.0},
        "train": {"steps": 10, "batch_size": 64, "learning_rate": 0.05},
        "devices": {
            "count": 6,
            "types": [
                {"type": "MacBookPro2018", "link": "wifi", "count": 3},
                {"type": "RaspberryPi4", "link": "bluetooth", "count": 3},
            ],
        },
    }
    whole = simulate(settings(tmp_path / "whole", cache, **tables))
    rows = read_devices(whole.folder)
    widths = {
        name: [row.tier for row in rows if row.device == name] for name in ("device-0", "device-5")
    }
    # SE = 1/0.154 + 1/0.631 = 8.06 and 1/0.823 + 1/1.644 = 1.82, of theta 9 (specification 4.2 and
    # 4.4).
    assert widths["device-0"][0] == "w1.00-d1"
    assert widths["device-5"][0] == "w0.125-d1"
    simulate(
        settings(tmp_path / "parts", cache, **{**tables, "round": {"rounds": 2, "fraction": 1.0}})
    )
    of_shares = simulate(settings(tmp_path / "parts", cache, **tables))
    assert [(row.round, row.device, row.tier) for row in read_devices(of_shares.folder)] == [
        (row.round, row.device, row.tier) for row in rows
    ]
    same(tensors(whole.folder, whole.run), tensors(of_shares.folder, of_shares.run))


def test_local_accuracy_is_of_the_devices_own_labels(cache, tmp_path):
    """With two labels a device and the mask, local accuracy is above the global one."""
    tables = {
        "partition": {"kind": "shards", "per_device": 2},
        "evaluation": {"local": True},
        "devices": {"count": 10},
    }
    result = simulate(settings(tmp_path / "out", cache, **tables))
    last = result.rounds[-1]
    assert last.local_accuracy > last.accuracy
    assert (
        json.loads((tmp_path / "out" / "config.json").read_bytes())["evaluation"]["local"] is True
    )
