"""Updates in an encoding: what rounding loses comes with the next update, on this board, in this
run and tier alone.
"""

import os
from dataclasses import replace

import numpy as np
import pytest

from device_runtime.training.compute import compute
from device_runtime.training.hooks import Hooks
from device_runtime.training.routines import Result
from device_runtime.training.task import DeviceSetup, Task
from device_runtime.training.update import finish
from fleet_protocol.data import make_dataset
from fleet_protocol.encodings import decode
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Done, Instructions, TrainSettings
from fleet_protocol.messages.instructions import Hiding, Upload
from tests.brokers import embedded_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.scripted_server import RUN, scripted_server
from tests.device_runtime.tiny_set import PARAMETERS, initial_weights, samples, write_tiny_set

TRAIN = TrainSettings(learning_rate=0.1, epochs=2, batch_size=8, seed=1)
STEP = 0.01  # of a training that changes every entry by so much


@pytest.fixture
def tiny(tmp_path):
    return write_tiny_set(tmp_path / "set")


@pytest.fixture
def device_setup(tiny, tmp_path):
    return DeviceSetup(
        make_dataset("tiny.npz", *samples()),
        tiny.blobs,
        "onnx",
        threads=1,
        holdout=0.0,
        folder=tmp_path,
    )


def task(tiny, number, *, run=RUN, tier="w1.00-d1", encoding="int4", **upload):
    instructions = Instructions(train=TRAIN, upload=Upload(encoding=encoding, **upload))
    weights = tiny.choice(initial_weights()).weights
    return Task(run, number, f"t{number}", 0, tier, instructions, tiny.manifest, weights)


def uneven():
    """A change that int4 cannot say: one entry is 40 times the others."""
    change = {name: np.full(shape, STEP, np.float32) for name, shape in PARAMETERS.items()}
    for value in change.values():
        value.flat[0] = 40 * STEP
    return change


def sent(task, device_setup, change):
    """What a server reads of an update that changes what was sent."""
    after = {name: value + change[name] for name, value in initial_weights().items()}
    update = finish(task, device_setup, Result(after, 1, 0.0)).update
    parts = tensors_in(device_setup.blobs.path(update.digest).read_bytes())
    return decode(
        parts, PARAMETERS, task.instructions.upload.encoding, keep=task.instructions.upload.keep
    )


def test_in_the_long_run_nothing_is_lost(tiny, device_setup):
    """One update says nothing of the small entries; ten say all of ten, within one step of the
    encoding.
    """
    one = sent(task(tiny, 1), device_setup, uneven())
    assert all(not value.flat[1:].any() for value in one.values())
    total = {name: value.copy() for name, value in one.items()}
    for number in range(2, 11):
        for name, value in sent(task(tiny, number), device_setup, uneven()).items():
            total[name] += value
    for name, value in total.items():
        np.testing.assert_allclose(value, 10 * uneven()[name], atol=40 * STEP / 7)
        assert (value.flat[1:] > 0).all()


@pytest.mark.parametrize("other", [{"run": "another"}, {"tier": "w0.50-d1"}])
def test_what_is_kept_belongs_to_run_and_tier(tiny, device_setup, other):
    """Another run or tier begins without it; the tier that comes back goes on with its own."""
    sent(task(tiny, 1), device_setup, uneven())
    fresh = sent(
        task(tiny, 2, **other), device_setup, {name: value * 0 for name, value in uneven().items()}
    )
    assert not any(value.any() for value in fresh.values())
    back = sent(task(tiny, 3), device_setup, {name: value * 0 for name, value in uneven().items()})
    assert any(value.any() for value in back.values()) == (
        "tier" in other
    )  # a new run ends what an old one kept


def test_what_is_not_among_the_largest_waits(tiny, device_setup):
    """Few entries of every round come; after twelve rounds of the same change each entry has been
    told.
    """
    total = {name: np.zeros(shape, np.float32) for name, shape in PARAMETERS.items()}
    for number in range(1, 13):
        found = sent(task(tiny, number, encoding="topk", keep=0.25), device_setup, uneven())
        for name, value in found.items():
            assert np.count_nonzero(value) <= np.ceil(0.25 * value.size)
            total[name] += value
    files = device_setup.files("residual", runs=1).load_tiers(RUN, 13)
    left = files["w1.00-d1"]
    for name, value in total.items():
        np.testing.assert_allclose(value + left[name], 12 * uneven()[name], rtol=1e-4)
        if value.size > 8:
            assert np.count_nonzero(value.flat[1:]) > value.size / 2


def test_without_feedback_nothing_is_kept(tiny, device_setup, tmp_path):
    """Where the next slice may have other units; rounding is random then, and says something of the
    small entries.
    """
    found = [sent(task(tiny, number, feedback=False), device_setup, uneven()) for number in (1, 2)]
    assert any(value.flat[1:].any() for value in found[0].values())
    assert all((found[0][name] == found[1][name]).all() for name in PARAMETERS)
    assert not list(tmp_path.glob("residual-*"))


def test_half_precision_keeps_nothing(tiny, device_setup, tmp_path):
    """It is near enough."""
    for name, value in sent(task(tiny, 1, encoding="fp16"), device_setup, uneven()).items():
        np.testing.assert_allclose(value, uneven()[name], rtol=1e-3)
    assert not list(tmp_path.glob("residual-*"))


def test_a_task_done_twice_gives_the_same_update(tiny, device_setup):
    """A power cut after the residual was kept changes nothing: a round starts from what the round
    before it left.
    """
    compute(task(tiny, 1), device_setup, Hooks())
    twice = [compute(task(tiny, 2), device_setup, Hooks()).update.digest for _ in range(2)]
    assert twice[0] == twice[1]


def test_a_damaged_file_does_not_cost_the_round(tiny, device_setup, tmp_path):
    """The board goes on as if nothing had been kept."""
    first = compute(task(tiny, 1), device_setup, Hooks()).update.digest
    (kept,) = tmp_path.glob("residual-*")
    kept.write_bytes(kept.read_bytes()[:40])
    again = sent(task(tiny, 2), device_setup, uneven())
    assert all(not value.flat[1:].any() for value in again.values())
    kept.unlink()
    assert compute(task(tiny, 1), device_setup, Hooks()).update.digest == first


def test_a_board_that_keeps_nothing_refuses(tiny, device_setup):
    """Before it says that it has learnt what it could not tell."""
    nowhere = DeviceSetup(device_setup.data, device_setup.blobs, "onnx", threads=1, holdout=0.0)
    with pytest.raises(RefusedError, match="keeps no residual files") as caught:
        compute(task(tiny, 1), nowhere, Hooks())
    assert caught.value.reason is RefusalReason.UNSUPPORTED


@pytest.mark.slow
def test_what_was_lost_survives_a_kill(tiny, device_setup, tmp_path):
    """A killed board sends in its next round what one sends that was not killed, and not what a new
    one would.
    """
    expected = [
        compute(task(tiny, number), device_setup, Hooks()).update.digest for number in (1, 2)
    ]
    for path in tmp_path.glob("residual-*"):
        path.unlink()
    assert compute(task(tiny, 2), device_setup, Hooks()).update.digest != expected[1]
    x, y = samples()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    choice = tiny.choice(initial_weights())
    upload = {"encoding": "int4"}
    with (
        embedded_broker(tmp_path / "broker") as broker,
        scripted_server(broker.url, tiny.blobs) as server,
    ):
        device = DeviceProcess(tmp_path, broker.url, {"kind": "npz", "path": "data.npz"}, holdout=0)
        try:
            for number in (1, 2):
                device.start()
                server.wait_state("idle", device.id, after=len(server.statuses))
                server.offer(device.id, choice, task=f"t{number}", round=number, upload=upload)
                server.wait_update(f"t{number}")
                device.kill()
        finally:
            device.kill()
        told = {message.task: message.update.digest for message in server.heard(Done)}
    assert [told["t1"], told["t2"]] == expected


def hiding(clip=0.5, deviation=0.25):
    return Hiding(clip=clip, deviation=deviation)


def test_a_device_hides_its_part_before_anybody_sees_it(tiny, device_setup):
    """The difference has the bound's norm and noise of the asked size, anew each time; nothing
    tells its samples.
    """
    asked = task(tiny, 1, encoding="fp32", hiding=hiding())
    before = initial_weights()
    after = {name: value + np.float32(7) for name, value in before.items()}

    def change(draws):
        update = finish(asked, replace(device_setup, noise=draws), Result(after, 1, 0.0)).update
        found = tensors_in(device_setup.blobs.path(update.digest).read_bytes())
        return np.concatenate([(found[name] - value).reshape(-1) for name, value in before.items()])

    entries = change(
        lambda count: b"\x00" * count
    )  # noise of one size everywhere: radius of the smallest uniform value
    assert np.ptp(entries) == pytest.approx(0.25 * np.sqrt(-2 * np.log(2.0**-54)), rel=1e-3)
    one = change(os.urandom)
    other = change(os.urandom)
    assert not np.array_equal(one, other)
    assert np.std(one - other) == pytest.approx(0.25 * np.sqrt(2), rel=0.5)
    middle = np.mean([change(os.urandom) for _ in range(200)], axis=0)
    np.testing.assert_allclose(middle, 0.5 / np.sqrt(len(middle)), atol=0.25 * 5 / np.sqrt(200))


@pytest.mark.parametrize("hidden", [None, hiding()])
def test_what_is_told_beside_a_hidden_update(tiny, device_setup, hidden):
    """Labels, losses and evaluation are told, or none of them."""
    asked = task(tiny, 1, encoding="fp32", hiding=hidden)
    metrics = compute(asked, replace(device_setup, holdout=0.2), Hooks()).metrics
    assert [
        bool(metrics.labels),
        metrics.train_loss is not None,
        metrics.evaluation is not None,
    ] == 3 * [hidden is None]
    assert metrics.examples > 0
