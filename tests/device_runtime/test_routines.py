"""What a task may ask of a board: routines by name, what each needs, and how what it cannot do is
refused.
"""

import threading

import numpy as np
import pytest

from device_runtime.training.backends.session import TrainSession
from device_runtime.training.compute import compute, time_step
from device_runtime.training.hooks import EpochReport, Hooks, SelfTested, TaskStopped
from device_runtime.training.routines import ROUTINES, may_join
from device_runtime.training.task import DeviceSetup, Task
from device_runtime.training.update import finish
from fleet_protocol.data import make_dataset
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Instructions, TrainSettings
from fleet_protocol.messages.instructions import Upload
from tests.device_runtime.tiny_set import (
    CLASSES,
    PARAMETERS,
    TinySet,
    initial_weights,
    samples,
    write_tiny_set,
)

TRAIN = TrainSettings(learning_rate=0.1, epochs=2, batch_size=8, seed=3)


@pytest.fixture
def tiny(tmp_path) -> TinySet:
    return write_tiny_set(tmp_path)


@pytest.fixture
def device_setup(tiny) -> DeviceSetup:
    return DeviceSetup(
        make_dataset("tiny.npz", *samples(50)), tiny.blobs, "onnx", threads=1, holdout=0.2
    )


def asked(**changes) -> Instructions:
    return Instructions(train=TRAIN, **changes)


def task(tiny: TinySet, instructions: Instructions) -> Task:
    weights = tiny.choice(initial_weights()).weights
    return Task(
        run="r",
        round=2,
        id="t1",
        version=1,
        tier="w1.00-d1",
        instructions=instructions,
        manifest=tiny.manifest,
        weights=weights,
        fetch_seconds=0.5,
    )


@pytest.mark.parametrize(
    ("instructions", "says", "reason"),
    [
        (
            asked(routine="juggle"),
            r"no routine 'juggle'.*train, statistics",
            RefusalReason.UNSUPPORTED,
        ),
        (
            asked(settings={"speed": 1}),
            "settings of the routine train: speed: Extra inputs",
            RefusalReason.MALFORMED,
        ),
        (
            asked(routine="mutual", settings={"alpha": 2}),
            "routine mutual: alpha: .* less",
            RefusalReason.MALFORMED,
        ),
        (asked(routine="mutual"), r"name its set in \[own_model\]", RefusalReason.UNSUPPORTED),
        (
            asked(upload=Upload(encoding="zip")),
            "no upload encoding 'zip' for train.*int8",
            RefusalReason.UNSUPPORTED,
        ),
        (
            asked(routine="statistics", upload=Upload(encoding="int8")),
            "'int8' for statistics",
            RefusalReason.UNSUPPORTED,
        ),
    ],
    ids=["unknown", "setting", "value", "lacking", "encoding", "encoded statistics"],
)
def test_what_a_board_cannot_do_is_refused_before_anything_is_fetched(
    device_setup, instructions, says, reason
):
    """The message names the routine, the setting, or what the operator has to give the board."""
    with pytest.raises(RefusedError, match=says) as refused:
        may_join(instructions, device_setup)
    assert refused.value.reason is reason


def test_where_all_updates_count_alike_nobody_learns_how_many_samples_a_board_has(
    tiny, device_setup
):
    """Of a meme of FML the server learns neither samples nor batches (specification 5.2)."""
    result = ROUTINES["train"].run(task(tiny, asked()), device_setup, Hooks())
    memes = finish(task(tiny, asked(routine="mutual")), device_setup, result)
    assert (memes.metrics.examples, memes.metrics.batches) == (None, None)
    assert memes.metrics.weight == 1
    message = memes.metrics.to_bytes()
    assert b"examples" not in message.replace(b'"evaluation":{"examples"', b"")
    assert memes.step_seconds is not None


def test_training_reports_and_leaves_an_update_with_its_metrics(tiny, device_setup):
    """A self-test and an epoch at a time are reported; the update is on disk, and says which task
    it is of.
    """
    told: list[object] = []
    outcome = compute(task(tiny, asked()), device_setup, Hooks(report=told.append))
    assert [type(report) for report in told] == [SelfTested, EpochReport, EpochReport]
    tensors = tensors_in(device_setup.blobs.read(outcome.update.digest))
    assert {name: value.shape for name, value in tensors.items()} == PARAMETERS
    metrics = outcome.metrics
    assert (metrics.examples, metrics.batches, metrics.labels) == (40, 10, tuple(range(CLASSES)))
    assert (metrics.evaluation.examples, metrics.fetch_seconds) == (10, 0.5)
    assert outcome.step_seconds == pytest.approx(
        metrics.train_seconds / 10, abs=1e-4
    )  # told in milliseconds


def test_a_pass_for_statistics_trains_nothing(tiny, device_setup):
    """It needs one graph, ends with a mean and a variance for each norm, and has no loss."""
    routine = ROUTINES["statistics"]
    assert (routine.phase, routine.graphs(tiny.manifest, device_setup)) == (
        "measuring",
        ("onnx/stats",),
    )
    outcome = compute(task(tiny, asked(routine="statistics")), device_setup, Hooks())
    tensors = tensors_in(device_setup.blobs.read(outcome.update.digest))
    assert set(tensors) == {"stat.norm.mean", "stat.norm.var"}
    assert all(np.isfinite(value).all() for value in tensors.values())
    assert (outcome.metrics.train_loss, outcome.metrics.evaluation, outcome.step_seconds) == (
        None,
        None,
        None,
    )


def test_labels_stay_where_a_part_of_the_model_stays(tiny, device_setup):
    """What a label means may be the board's own business then."""
    assert (
        compute(task(tiny, asked(stays=("linear.bias",))), device_setup, Hooks()).metrics.labels
        == ()
    )


def test_a_set_without_the_graph_of_a_routine_is_refused(tiny, device_setup):
    """The message says what is there, and what to do."""
    bare = tiny.manifest.model_copy(
        update={"graphs": {"onnx/eval": tiny.manifest.graphs["onnx/eval"]}}
    )
    for name, what in (("train", "backend onnx"), ("statistics", "statistics")):
        with pytest.raises(
            RefusedError, match=rf"has no graph for {what} \(it has onnx/eval\); export it again"
        ):
            ROUTINES[name].graphs(bare, device_setup)


def test_a_step_is_timed_as_the_board_is_now(tiny, device_setup, monkeypatch):
    """A few steps, of which the first warms a session and counts for nothing; nothing is kept; it
    can be stopped.
    """
    real = TrainSession.step
    taken = []
    pauses = iter([0.0, 1.0, *[0.05] * 4, 0.0])

    def slow(self, *given):
        threading.Event().wait(next(pauses))
        taken.append(len(given[0]))
        return real(self, *given)

    monkeypatch.setattr(TrainSession, "step", slow)
    given = task(tiny, asked())
    before = {path.name for path in tiny.blobs.root.rglob("*")}
    assert 0.05 <= time_step(given, device_setup, Hooks()) < 0.5
    assert taken[1:] == [8] * 5  # the self-test has samples of its own
    assert {path.name for path in tiny.blobs.root.rglob("*")} == before
    with pytest.raises(TaskStopped):
        time_step(given, device_setup, Hooks(stopped=lambda: True))
