"""Sessions and training against the same arithmetic in numpy."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runtime.training.backends import ForwardSession, TrainSession, load_runtime
from device_runtime.training.epochs import self_test, train
from device_runtime.training.hooks import Hooks, TaskStopped
from device_runtime.training.labels import label_mask
from device_runtime.training.measuring import HeldOut, evaluate, measure
from device_runtime.training.schedule import TrainingSchedule, batches, holdout_split, sample_order
from fleet_protocol.data import DataSet, make_dataset
from fleet_protocol.errors import DataError, RefusalReason, RefusedError
from fleet_protocol.messages import TrainSettings
from tests.device_runtime import tiny_set
from tests.device_runtime.tiny_set import (
    ADAPTIVE,
    CLASSES,
    TinySet,
    adaptive_step,
    broken_train_graph,
    initial_weights,
    overflowing_weights,
    reference_step,
    samples,
    write_tiny_set,
)

ALL = np.ones(CLASSES, np.float32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinySet:
    return write_tiny_set(tmp_path_factory.mktemp("tiny"))


def _settings(**changes) -> TrainSettings:
    values = {"learning_rate": 0.1, "epochs": 2, "batch_size": 8, "seed": 3} | changes
    return TrainSettings(**values)


def _data(count: int = 50, **options) -> DataSet:
    return make_dataset("tiny.npz", *samples(count, **options))


def test_steps_equal_numpy(tiny):
    """Twenty steps of changing batch sizes, masks and rates give the numbers of the recipe written
    in numpy.
    """
    session = TrainSession(tiny.manifest, tiny.graph("onnx/train"))
    weights = initial_weights()
    session.load(weights)
    states = {name: np.zeros_like(value) for name, value in weights.items()}
    for step in range(20):
        x, y = samples((9, 4, 17)[step % 3], seed=step)
        mask = ALL.copy()
        mask[step % CLASSES] = step % 2
        lr = 0.2 / (1 + step)
        loss = session.step(x, y, mask, lr)
        expected, weights, states = reference_step(weights, states, x, y, mask, lr)
        assert loss == pytest.approx(expected, abs=1e-5)
    for name, value in session.parameters().items():
        np.testing.assert_allclose(value, weights[name], atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_a_batch_may_come_in_the_same_array_again(tiny, turned):
    """An array that is bound already is read anew, also one that the runtime can only take a copy
    of.
    """
    session = TrainSession(tiny.manifest, tiny.graph("onnx/train"))
    weights = initial_weights()
    session.load(weights)
    states = {name: np.zeros_like(value) for name, value in weights.items()}
    x, y = samples(9)
    mask = ALL.copy()
    held = np.asfortranarray(x) if turned else x.copy()
    for step in range(6):
        held[...], y[:] = samples(9, seed=step)
        mask[step % CLASSES] = step % 2
        loss = session.step(held, y, mask, 0.1)
        expected, weights, states = reference_step(weights, states, held, y, mask, 0.1)
        assert loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_device_holds_any_states_that_an_optimizer_has(tmp_path, in_place):
    """Two states for each parameter and a counter of steps: kept from step to step, begun anew with
    each task.
    """
    tiny = write_tiny_set(tmp_path, states=ADAPTIVE)
    manifest = tiny.manifest.model_copy(
        update={"states_in_place": in_place, "parameters_in_place": in_place}
    )
    session = TrainSession(manifest, tiny.graph("onnx/train"))
    for _task in range(2):
        weights = initial_weights()
        states = {spec.name: np.full(spec.shape, spec.initial, spec.dtype) for spec in ADAPTIVE}
        session.load(weights)
        for step in range(6):
            x, y = samples(9, seed=step)
            loss = session.step(x, y, ALL, 0.1)
            expected, weights, states = adaptive_step(weights, states, x, y, ALL, 0.1)
            assert loss == pytest.approx(expected, abs=1e-4)
        for name, value in session.parameters().items():
            np.testing.assert_allclose(value, weights[name], atol=1e-4)
        for name, value in session.states().items():
            np.testing.assert_allclose(value, states[name], atol=1e-4)
        assert session.states()["step"].dtype == np.int64
        assert session.states()["step"] == 6


def test_buffers_alternate_and_nothing_is_copied(tiny):
    """Every tensor lies in one of two places, in turn, from the first step to the last."""
    session = TrainSession(tiny.manifest, tiny.graph("onnx/train"))
    session.load(initial_weights())
    seen = []
    for step in range(6):
        seen.append(session.addresses())
        session.step(*samples(8, seed=step), ALL, 0.1)
    assert seen[0] == seen[2] == seen[4]
    assert seen[1] == seen[3] == seen[5]
    assert not set(seen[0].values()) & set(seen[1].values())
    parameter = "linear.weight"
    assert session.parameters()[parameter].ctypes.data == session.addresses()[f"param.{parameter}"]


def test_bound_buffers_equal_a_plain_loop(tiny):
    """Swapping bound buffers gives the very numbers of feeding outputs back as inputs."""
    session = TrainSession(tiny.manifest, tiny.graph("onnx/train"))
    weights = initial_weights()
    session.load(weights)
    plain = load_runtime().InferenceSession(
        str(tiny.graph("onnx/train")), providers=["CPUExecutionProvider"]
    )
    names = [spec.name for spec in plain.get_outputs()]
    values = {f"param.{k}": v for k, v in weights.items()}
    values |= {f"state.{k}": np.zeros_like(v) for k, v in weights.items()}
    for step in range(7):
        x, y = samples(8, seed=step)
        feeds = {"x": x, "y": y, "mask": ALL, "lr": np.array(0.1, np.float32)}
        outputs = dict(zip(names, plain.run(None, {**values, **feeds}), strict=True))
        assert session.step(x, y, ALL, 0.1) == float(outputs.pop("loss"))
        values = {name.removeprefix("next."): value for name, value in outputs.items()}
    for name, value in session.parameters().items():
        np.testing.assert_array_equal(value, values[f"param.{name}"])


def test_load_starts_the_optimizer_again(tiny):
    """Two tasks in one session do not share momentum."""
    session = TrainSession(tiny.manifest, tiny.graph("onnx/train"))
    results = []
    for _ in range(2):
        session.load(initial_weights())
        for step in range(3):
            session.step(*samples(8, seed=step), ALL, 0.1)
        results.append({name: value.copy() for name, value in session.parameters().items()})
    for name, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][name])


def test_training_follows_the_documented_order(tiny):
    """An independent loop over the documented order and the numpy step reproduces a device's
    training.
    """
    data = _data(53)
    settings = _settings()
    round_number = 7
    chosen, _ = holdout_split(len(data), 0.1)
    session = TrainSession(tiny.manifest, tiny.graph("onnx/train"))
    session.load(initial_weights())
    reports = []
    schedule = TrainingSchedule(data, chosen, settings, round_number)
    result = train(session, tiny.manifest, schedule, Hooks(report=reports.append))
    weights = initial_weights()
    states = {name: np.zeros_like(value) for name, value in weights.items()}
    for epoch in range(settings.epochs):
        bits = np.random.PCG64(np.random.SeedSequence([settings.seed, round_number, epoch]))
        order = chosen[np.random.Generator(bits).permutation(len(chosen))]
        losses = []
        for start in range(0, len(order), settings.batch_size):
            rows = order[start : start + settings.batch_size]
            loss, weights, states = reference_step(
                weights, states, data.x[rows], data.y[rows], ALL, 0.1
            )
            losses += [loss] * len(rows)
        assert reports[epoch].loss == pytest.approx(np.mean(losses), abs=1e-5)
    assert (result.steps, reports[-1].step) == (2 * 6, 12)
    assert result.loss == reports[-1].loss < reports[0].loss
    for name, value in session.parameters().items():
        np.testing.assert_allclose(value, weights[name], atol=1e-5)


@given(
    seed=st.integers(0, 2**63),
    round_number=st.integers(1, 10**6),
    n=st.integers(1, 300),
    size=st.integers(1, 64),
)
def test_every_sample_is_used_once_per_epoch(seed, round_number, n, size):
    """An epoch is a permutation, its batches are full but the last, and epochs differ."""
    orders = [sample_order(seed, round_number, epoch, n) for epoch in (0, 1)]
    pieces = list(batches(orders[0], size))
    assert np.array_equal(np.sort(np.concatenate(pieces)), np.arange(n))
    assert all(len(piece) == size for piece in pieces[:-1])
    assert 1 <= len(pieces[-1]) <= size
    if n > 20:
        assert not np.array_equal(*orders)


@given(n=st.integers(1, 500), share=st.floats(0, 0.99))
def test_holdout_never_meets_training(n, share):
    """Both parts together are all samples, training keeps at least one, and a wish for a holdout is
    met from two on.
    """
    chosen, held_out = holdout_split(n, share)
    assert np.array_equal(np.sort(np.concatenate([chosen, held_out])), np.arange(n))
    assert len(chosen) >= 1
    assert (len(held_out) > 0) == (share > 0 and n > 1)
    assert all(a < b for a, b in pairwise(chosen))


def test_mask_covers_the_labels_present():
    """Absent labels are masked, unless masking is off."""
    labels = np.array([0, 2])
    assert label_mask(labels, 4, masked=True).tolist() == [1, 0, 1, 0]
    assert label_mask(labels, 4, masked=False).tolist() == [1, 1, 1, 1]


def test_absent_labels_do_not_move_their_rows(tiny):
    """Training with labels 0 and 1 only changes the other rows by weight decay alone."""
    data = _data(40, classes=2)
    session = TrainSession(tiny.manifest, tiny.graph("onnx/train"))
    before = initial_weights()
    session.load(before)
    settings = _settings(epochs=1, batch_size=40)
    train(session, tiny.manifest, TrainingSchedule(data, np.arange(40), settings, 1), Hooks())
    after = session.parameters()["linear.weight"]
    decayed = before["linear.weight"] * (1 - settings.learning_rate * tiny_set.DECAY)
    np.testing.assert_allclose(after[2:], decayed[2:], rtol=1e-6)
    assert np.abs(after[:2] - decayed[:2]).max() > 1e-3


def test_loss_that_is_not_finite_is_refused_by_round_and_step(tiny):
    """A NaN loss ends the task with the place where it happened."""
    x, y = samples(24)
    data = make_dataset("tiny.npz", x, y)
    session = TrainSession(tiny.manifest, tiny.graph("onnx/train"))
    session.load(overflowing_weights())
    with pytest.raises(RefusedError, match="loss is nan in round 5 at step 1") as caught:
        train(
            session, tiny.manifest, TrainingSchedule(data, np.arange(24), _settings(), 5), Hooks()
        )
    assert caught.value.reason is RefusalReason.FAILED


def test_training_stops_between_steps(tiny):
    """A cancelled task ends before its next step."""
    session = TrainSession(tiny.manifest, tiny.graph("onnx/train"))
    session.load(initial_weights())
    answers = iter([False, False, True])
    with pytest.raises(TaskStopped):
        train(
            session,
            tiny.manifest,
            TrainingSchedule(_data(), np.arange(50), _settings(), 1),
            Hooks(stopped=lambda: next(answers)),
        )
    assert next(answers, None) is None


def test_statistics_are_means_over_batches(tiny):
    """Mean of batch means and of unbiased batch variances, a last batch of one sample left out
    (specification 1.6).
    """
    data = _data(25)
    settings = _settings(batch_size=8)
    session = ForwardSession(tiny.manifest, tiny.graph("onnx/stats"), initial_weights())
    statistics, count = measure(
        session, tiny.manifest, TrainingSchedule(data, np.arange(25), settings, 4), Hooks()
    )
    order = sample_order(settings.seed, 4, 0, 25)
    pieces = [
        data.x[order[start : start + 8]].reshape(-1, tiny_set.FEATURES) for start in (0, 8, 16)
    ]
    assert count == 3
    np.testing.assert_allclose(
        statistics["stat.norm.mean"], np.mean([p.mean(0) for p in pieces], 0), atol=1e-5
    )
    np.testing.assert_allclose(
        statistics["stat.norm.var"], np.mean([p.var(0, ddof=1) for p in pieces], 0), rtol=1e-4
    )
    assert all(value.dtype == np.float32 for value in statistics.values())


def test_one_sample_has_no_statistics(tiny):
    """The unbiased variance of one sample does not exist, and the device says so."""
    session = ForwardSession(tiny.manifest, tiny.graph("onnx/stats"), initial_weights())
    with pytest.raises(DataError, match="two samples"):
        measure(
            session,
            tiny.manifest,
            TrainingSchedule(_data(5), np.arange(1), _settings(), 1),
            Hooks(),
        )


def test_evaluation_counts_every_sample(tiny):
    """Loss and accuracy over batches equal one pass in numpy with the given statistics."""
    data = _data(21)
    weights = initial_weights()
    flat = data.x.reshape(21, -1)
    statistics = {"stat.norm.mean": flat.mean(0), "stat.norm.var": flat.var(0)}
    session = ForwardSession(tiny.manifest, tiny.graph("onnx/eval"), weights)
    result = evaluate(
        session, tiny.manifest, HeldOut(data, np.arange(21), 8, ALL, statistics), Hooks()
    )
    xn = (flat - flat.mean(0)) / np.sqrt(flat.var(0) + tiny_set.EPS)
    z = xn @ weights["linear.weight"].T + weights["linear.bias"]
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    assert result.examples == 21
    assert result.loss == pytest.approx(-log_p[np.arange(21), data.y].mean(), abs=1e-5)
    assert result.accuracy == pytest.approx((z.argmax(1) == data.y).mean())


def test_self_test_accepts_a_good_set_and_refuses_a_broken_one(tiny, tmp_path):
    """A train graph that yields NaN on this board is caught before it meets data."""
    self_test(TrainSession(tiny.manifest, tiny.graph("onnx/train")), tiny.manifest)
    broken = write_tiny_set(tmp_path, train_graph=broken_train_graph())
    session = TrainSession(broken.manifest, broken.graph("onnx/train"))
    with pytest.raises(RefusedError, match="fails its self-test"):
        self_test(session, broken.manifest)


@pytest.mark.parametrize(
    ("steps", "passes_made", "last"), [(1, 1, 1), (3, 1, 3), (4, 2, 1), (7, 3, 1)]
)
def test_a_number_of_steps_takes_as_many_passes_as_it_needs(steps, passes_made, last):
    """Ten samples in batches of four are three steps a pass; the last pass ends early, and its
    order is its own.
    """
    data = make_dataset("ten", np.zeros((110, 1)), np.zeros(110, np.int64))
    chosen = np.arange(100, 110)
    made = list(
        TrainingSchedule(data, chosen, _settings(epochs=1, steps=steps, batch_size=4), 3).passes()
    )
    assert [(planned.epoch, planned.epochs) for planned in made] == [
        (i, passes_made) for i in range(passes_made)
    ]
    assert sum(len(planned.batches) for planned in made) == steps
    assert len(made[-1].batches) == last
    whole = list(
        TrainingSchedule(data, chosen, _settings(epochs=passes_made, batch_size=4), 3).passes()
    )
    for short, full in zip(made, whole, strict=True):
        for mine, theirs in zip(short.batches, full.batches, strict=False):
            np.testing.assert_array_equal(mine, theirs)
