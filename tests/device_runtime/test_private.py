"""The routine ``private``: what a board keeps, how it trains it, and that none of it is sent."""

from dataclasses import replace

import numpy as np
import pytest

from device_runtime.training.compute import compute, time_step
from device_runtime.training.hooks import Hooks
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.data import make_dataset
from fleet_protocol.encodings import decode
from fleet_protocol.errors import BlobError, RefusedError
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Instructions, TrainSettings
from fleet_protocol.messages.instructions import Hiding, Upload
from fleet_protocol.units import unit_tensors
from tests.device_runtime.scripted_server import RUN
from tests.device_runtime.tiny_set import PARAMETERS, initial_weights, samples, write_tiny_set

TRAIN = TrainSettings(learning_rate=0.1, epochs=2, batch_size=8, seed=1)
NAMES = list(PARAMETERS)
PRIVATE = NAMES[-1]
SHARED = NAMES[:-1]


@pytest.fixture
def tiny(tmp_path):
    return write_tiny_set(tmp_path / "set")


@pytest.fixture
def board(tiny, tmp_path):
    return DeviceSetup(
        make_dataset("tiny.npz", *samples()),
        tiny.blobs,
        "onnx",
        threads=1,
        holdout=0.0,
        folder=tmp_path,
    )


def task(tiny, number, *, weights=None, routine="private", stays=(PRIVATE,), upload=None, **own):
    instructions = Instructions(
        routine=routine, settings=own, train=TRAIN, stays=stays, upload=upload or Upload()
    )
    sent = tiny.choice(initial_weights() if weights is None else weights).weights
    return Task(RUN, number, f"t{number}", 0, "w1.00-d1", instructions, tiny.manifest, sent)


def update_of(task, board):
    """The tensors that a server would receive."""
    finished = compute(task, board, Hooks())
    return dict(tensors_in(board.blobs.path(finished.update.digest).read_bytes()))


def kept(board, number):
    """What the board keeps after a round, by name."""
    return board.files("private").load_tiers(RUN, number + 1)["w1.00-d1"]


def test_the_first_round_is_plain_training_of_which_a_part_stays(tiny, board):
    """Both parts have the bits of the routine ``train``; only the others are sent."""
    whole = update_of(task(tiny, 1, routine="train", stays=()), board)
    update = update_of(task(tiny, 1), board)
    assert list(update) == SHARED
    for name in SHARED:
        np.testing.assert_array_equal(update[name], whole[name])
    np.testing.assert_array_equal(kept(board, 1)[PRIVATE], whole[PRIVATE])


def test_later_rounds_start_from_the_part_that_the_board_kept(tiny, board):
    """Whatever the server sends in its place."""
    update_of(task(tiny, 1), board)
    mine = kept(board, 1)[PRIVATE]
    new = {name: value + np.float32(0.05) for name, value in initial_weights().items()}
    expected = update_of(
        task(tiny, 2, weights={**new, PRIVATE: mine}, routine="train", stays=()), board
    )
    update = update_of(task(tiny, 2, weights=new), board)
    for name in SHARED:
        np.testing.assert_array_equal(update[name], expected[name])
    np.testing.assert_array_equal(kept(board, 2)[PRIVATE], expected[PRIVATE])


def test_all_shares_of_a_width_and_depth_have_the_same_private_part(tiny, board):
    """A window that moves, or another share, goes on with the part of the round before."""
    whole = [task(tiny, number) for number in (1, 2, 3)]
    expected = [update_of(one, board) for one in whole]
    moved = replace(board, folder=board.folder / "moved")
    moved.folder.mkdir()
    tiers = ("w1.00-d1-t0.50", "w1.00-d1-t0.50-p1", "w1.00-d1-head")
    for one, tier, update in zip(whole, tiers, expected, strict=True):
        found = update_of(replace(one, tier=tier), moved)
        for name in SHARED:
            np.testing.assert_array_equal(found[name], update[name])
    np.testing.assert_array_equal(kept(moved, 3)[PRIVATE], kept(board, 3)[PRIVATE])


@pytest.mark.parametrize(
    "own", [{"stays": (NAMES[0],)}, {"stays": (), "copy_model": True}], ids=["part", "copy"]
)
def test_units_that_move_keep_their_own_values(tiny, board, own):
    """The board finds its values of a unit by the unit's position in the whole model; units that
    it has never trained start as the server sent them.
    """
    weight, bias = NAMES
    whole = np.random.default_rng(5).normal(size=(4, 20)).astype(np.float32)
    known = np.full(whole.shape, np.nan, np.float32)
    mine = {}
    windows = [np.arange(12), np.arange(18, 6, -1), np.array([0, 19, *range(6, 16)])]
    for number, window in enumerate(windows, 1):
        sent = initial_weights(number) | {weight: whole[:, window]}
        units = unit_tensors({weight: (np.arange(4), window)})
        update_of(task(tiny, number, weights=sent | units, **own), board)
        # The same round without units, from what the board knows.
        from_before = np.where(np.isnan(known[:, window]), sent[weight], known[:, window])
        start = sent | mine | {weight: from_before}
        plain = task(tiny, number, weights=start, routine="train", stays=())
        trained = update_of(plain, board)
        known[:, window] = trained[weight]
        if "copy_model" in own:
            mine = {bias: trained[bias]}
        now = kept(board, number)
        np.testing.assert_array_equal(now[weight], known[:, : now[weight].shape[1]])
        for name, value in mine.items():
            np.testing.assert_array_equal(now[name], value)
    assert not np.isnan(known).any()


@pytest.mark.parametrize(
    "positions",
    [
        (np.arange(4),),
        (np.arange(4), np.arange(11)),
        (np.arange(4), np.arange(12) - 1),
        (np.arange(4), np.arange(12, dtype=np.float32)),
        (np.arange(4), np.array([*range(11), 10])),
        # Values up to this position would need more memory than any board has.
        (np.arange(4), np.array([*range(11), 2**60])),
        (np.array([0, 1, 2, 8]), np.arange(12)),
    ],
    ids=["dimension", "length", "negative", "type", "repeated", "huge", "beyond"],
)
def test_units_that_do_not_fit_are_refused(tiny, board, positions):
    """The message names the parameter, and nothing is kept."""
    sent = initial_weights() | unit_tensors({NAMES[0]: positions})
    with pytest.raises(RefusedError, match=rf"sent for {NAMES[0]} of w1\.00-d1"):
        update_of(task(tiny, 1, weights=sent, stays=(NAMES[0],)), board)
    assert board.files("private").load_tiers(RUN, 2) == {}


def test_a_round_that_is_computed_twice_gives_the_same_bits(tiny, board):
    """A board that was killed after it wrote its file starts again from the round before."""
    update_of(task(tiny, 1), board)
    first = update_of(task(tiny, 2), board)
    second = update_of(task(tiny, 2), board)
    for name in SHARED:
        np.testing.assert_array_equal(first[name], second[name])


def test_one_after_the_other_each_is_held_while_the_other_moves(tiny, board):
    """FedRep: the private part trains against the sent weights, the others against its result."""
    update = update_of(task(tiny, 1, private_epochs=3), board)
    head = kept(board, 1)[PRIVATE]
    start = initial_weights()
    assert not np.array_equal(head, start[PRIVATE])
    # By hand: three passes whose other parameters are put back, then two that put back the head.
    session_head = _held(tiny, board, epochs=3, moves=[PRIVATE], weights=start)
    np.testing.assert_array_equal(head, session_head[PRIVATE])
    by_hand = _held(tiny, board, epochs=2, moves=SHARED, weights={**start, PRIVATE: head})
    for name in SHARED:
        np.testing.assert_array_equal(update[name], by_hand[name])


def _held(tiny, board, *, epochs, moves, weights):
    """Train step by step; after each step all parameters but some get their old values again."""
    from device_runtime.training.schedule import training_batch  # noqa: PLC0415

    settings = TRAIN.model_copy(update={"epochs": epochs})
    plain = task(tiny, 1)
    plain = replace(plain, instructions=plain.instructions.model_copy(update={"train": settings}))
    schedule = plain.schedule(board)
    graph = board.blobs.path(tiny.manifest.graphs["onnx/train"].digest)
    session = board.opening.train(tiny.manifest, graph, {})
    session.load(weights)
    mask = np.ones(tiny.manifest.classes, np.float32)
    for planned in schedule.passes():
        for number, indices in enumerate(planned.batches):
            seed = schedule.step_seed(planned.epoch, number)
            x, y = training_batch(board.data, indices, tiny.manifest.input_dtype, seed)
            session.step(x, y, mask, settings.learning_rate)
            current = session.parameters()
            for name in NAMES:
                if name not in moves:
                    current[name][...] = weights[name]
    return {name: value.copy() for name, value in session.parameters().items()}


def test_a_copy_of_the_model_does_not_change_the_update(tiny, board):
    """Ditto: the update is that of plain training; the copy goes its own way from round to round."""
    expected = update_of(task(tiny, 1, routine="train", stays=()), board)
    update = update_of(task(tiny, 1, stays=(), copy_model=True), board)
    assert list(update) == NAMES
    first = kept(board, 1)
    update_of(task(tiny, 2, stays=(), copy_model=True), board)
    for name in NAMES:
        np.testing.assert_array_equal(update[name], expected[name])
        np.testing.assert_array_equal(first[name], expected[name])
        assert not np.array_equal(kept(board, 2)[name], first[name])


def test_a_pull_needs_a_graph_with_a_proximal_term(tiny, board):
    """The set of this test was exported without one."""
    with pytest.raises(RefusedError, match="proximal"):
        update_of(task(tiny, 1, stays=(), copy_model=True, mu=0.1), board)


@pytest.mark.parametrize("upload", [Upload(encoding="int8"), Upload(encoding="topk", keep=0.5)])
def test_encodings_act_on_what_travels(tiny, board, upload):
    """An encoded update has the shared tensors alone."""
    tensors = update_of(task(tiny, 1, upload=upload), board)
    shapes = {name: PARAMETERS[name] for name in SHARED}
    decoded = decode(tensors, shapes, upload.encoding, keep=upload.keep)
    assert list(decoded) == SHARED
    assert any(value.any() for value in decoded.values())


def test_local_noise_acts_on_what_travels(tiny, board):
    """The private part is kept without noise."""
    expected = update_of(task(tiny, 1), board)
    without_noise = kept(board, 1)[PRIVATE]
    noisy = update_of(task(tiny, 1, upload=Upload(hiding=Hiding(clip=1, deviation=0.1))), board)
    assert list(noisy) == SHARED
    assert not np.array_equal(noisy[SHARED[0]], expected[SHARED[0]])
    np.testing.assert_array_equal(kept(board, 1)[PRIVATE], without_noise)


def test_what_was_kept_of_another_model_is_refused(tiny, board):
    """With the tensor and its shape."""
    board.files("private").save_tiers(RUN, 1, {"w1.00-d1": {PRIVATE: np.zeros(99, np.float32)}})
    with pytest.raises(RefusedError, match=PRIVATE.replace(".", r"\.")):
        update_of(task(tiny, 2), board)


def test_a_damaged_file_is_named(tiny, board):
    """A board never starts over in silence: its own part would be lost."""
    update_of(task(tiny, 1), board)
    (path,) = board.folder.glob("private-*")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(BlobError, match=path.name):
        update_of(task(tiny, 2), board)


def test_a_timed_step_leaves_nothing(tiny, board):
    """A trial of speed does not become the start of a round."""
    assert time_step(task(tiny, 1, private_epochs=50), board, Hooks()) > 0
    assert not list(board.folder.glob("private-*"))


def evaluations_of(task, board):
    """The board's evaluations of its own model and of the fleet's."""
    metrics = compute(task, replace(board, holdout=0.3), Hooks()).metrics
    return metrics.evaluation, metrics.shared_evaluation


@pytest.mark.parametrize("own", [{"stays": (PRIVATE,)}, {"stays": (), "copy_model": True}])
def test_a_board_compares_its_model_with_that_of_the_fleet(tiny, board, own):
    """Only if the run asks for it; without its own part it has what the server sent."""
    split = replace(board, holdout=0.3)
    update_of(task(tiny, 1, **own), split)
    evaluation, shared = evaluations_of(task(tiny, 2, **own), board)
    assert shared is None
    same, shared = evaluations_of(task(tiny, 2, **own, compare=True), board)
    assert same == evaluation
    assert shared.examples == same.examples
    update = update_of(task(tiny, 2, **own), split)
    fleet = {**initial_weights(), **update}
    assert shared == judged(tiny, split, 2, fleet)
    assert shared != same


def judged(tiny, board, number, weights):
    from device_runtime.training.routines.train import evaluate_trained  # noqa: PLC0415

    return evaluate_trained(task(tiny, number), board, weights, Hooks())


@pytest.mark.parametrize("own", [{"stays": (PRIVATE,)}, {"stays": (), "copy_model": True}])
def test_a_board_adapts_its_model_for_its_evaluation_only(tiny, board, own):
    """As a further round of plain training would; update and kept values do not change."""
    split = replace(board, holdout=0.3)
    expected = update_of(task(tiny, 1, **own), split)
    mine = kept(split, 1)
    adapted, _shared = evaluations_of(task(tiny, 1, **own, adapt_epochs=2), board)
    update = update_of(task(tiny, 1, **own, adapt_epochs=2), split)
    for name, value in expected.items():
        np.testing.assert_array_equal(update[name], value)
    for name, value in mine.items():
        np.testing.assert_array_equal(kept(split, 1)[name], value)
    before = {**expected, **mine}
    plain = task(tiny, 1, weights=before, routine="train", stays=())
    assert adapted == judged(tiny, split, 1, update_of(plain, split))
    assert adapted != judged(tiny, split, 1, before)
