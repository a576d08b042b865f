"""What a board keeps of frozen layers' outputs: rows on disk, and training with and without them."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from device_runtime.training.backends import lower_part
from device_runtime.training.compute import compute, time_step
from device_runtime.training.hooks import Hooks
from device_runtime.training.kept_outputs import KeptOutputs, SampleUse, sample_digest
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.blobs import blob_ref
from fleet_protocol.data import make_dataset
from fleet_protocol.graph_parts import ABOVE, BELOW
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Instructions, TrainSettings
from fleet_protocol.weights import encode_weights
from tests.trainer_export.test_step_parts import export

USE = SampleUse(batch=4, samples=8, again=True, is_random=False)
ROW = b"rowrow12"
LIMIT = 10**6
TRAIN = TrainSettings(learning_rate=0.1, epochs=3, batch_size=8, seed=3)
SAMPLES = 21
"""Three batches, of which the last has five samples."""


def outputs(folder, limit=LIMIT):
    return KeptOutputs(folder / "kept", limit)


def digest(number):
    return sample_digest(memoryview(bytes([number])))


def test_rows_are_read_by_the_next_process(tmp_path):
    """A row that is written again keeps its place."""
    rows = outputs(tmp_path).open("a", 8, USE)
    for number in range(3):
        rows.add(digest(number), bytes([number]) * 8)
    rows.add(digest(1), ROW)
    rows.close()
    rows = outputs(tmp_path).open("a", 8, USE)
    assert len(rows) == 3
    assert [rows.read(digest(number)) for number in range(4)] == [bytes(8), ROW, b"\2" * 8, None]
    rows.close()


def test_another_name_removes_all_others(tmp_path):
    """Other frozen values, another graph or runtime: nothing can read the rows any more."""
    kept = outputs(tmp_path)
    kept.open("a", 8, USE).close()
    (kept.folder / "half removed").mkdir()
    kept.open("b", 8, USE).close()
    assert [path.name for path in kept.folder.iterdir()] == ["b"]


@pytest.mark.parametrize(
    "use",
    [
        replace(USE, is_random=True),
        replace(USE, samples=10**6),
        replace(USE, again=False),
    ],
    ids=["augmented", "too many", "read once"],
)
def test_rows_that_do_not_pay_are_not_kept(tmp_path, use):
    """Of a single pass only if the task before had the same frozen values."""
    assert outputs(tmp_path).open("a", 8, use) is None


def test_a_single_pass_keeps_rows_from_the_second_task_on(tmp_path):
    """Then the frozen values stay from round to round."""
    once = replace(USE, again=False)
    assert outputs(tmp_path).open("a", 8, once) is None
    assert outputs(tmp_path).open("a", 8, once) is not None
    assert outputs(tmp_path).open("b", 8, once) is None


def test_the_limit_holds(tmp_path):
    """Rows beyond it are not written."""
    rows = outputs(tmp_path, 2 * (8 + 48)).open("a", 8, replace(USE, samples=2))
    for number in range(5):
        rows.add(digest(number), ROW)
    assert len(rows) == 2
    rows.close()
    sizes = [path.stat().st_size for path in (tmp_path / "kept" / "a").iterdir()]
    assert sum(sizes) <= 2 * (8 + 48)


def _cut(path, size):
    os.truncate(path, size)


KILLS = {
    "before the entry": lambda folder: _cut(folder / "index", 48),
    "in the entry": lambda folder: _cut(folder / "index", 60),
    "in the row": lambda folder: _cut(folder / "rows", 12),
    "before the row reached the disk": lambda folder: _cut(folder / "rows", 8),
    "with zeros in the row": lambda folder: os.pwrite(_handle(folder), bytes(8), 8),
    "no files": lambda folder: [path.unlink() for path in folder.iterdir()],
    "no folder": shutil.rmtree,
}


def _handle(folder):
    return os.open(folder / "rows", os.O_RDWR)


@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS)
def test_a_kill_costs_rows_and_nothing_else(tmp_path, kill):
    """Whatever a kill or a power cut leaves, a row is right or missing, and can be added again."""
    rows = outputs(tmp_path).open("a", 8, USE)
    values = {digest(number): bytes([number + 1]) * 8 for number in range(2)}
    for name, value in values.items():
        rows.add(name, value)
    rows.close()
    kill(tmp_path / "kept" / "a")
    rows = outputs(tmp_path).open("a", 8, USE)
    assert rows.read(digest(1)) is None
    assert rows.read(digest(0)) in (None, values[digest(0)])
    for name, value in values.items():
        rows.add(name, value)
    assert [rows.read(name) for name in values] == list(values.values())
    rows.close()


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    """A model of two frozen layers and a head."""
    return export("mlp", tmp_path_factory.mktemp("mlp"))


@pytest.fixture
def board(mlp, tmp_path):
    """A board with samples, and the blobs of all tiers."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(SAMPLES, *mlp.layout.input_shape)).astype(np.float32)
    y = np.arange(SAMPLES) % next(iter(mlp.tiers.values())).manifest.classes
    blobs = BlobStore(tmp_path / "blobs")
    for digest_of_file, path in mlp.files.items():
        write_atomically(blobs.path(digest_of_file), path.read_bytes(), durable=False)
    blobs.put(encode_weights(mlp.initial_weights()))
    data = make_dataset("mlp.npz", x, y)
    return DeviceSetup(data, blobs, "onnx", threads=1, holdout=0.0, folder=tmp_path)


def task(artifacts, tier, **changes):
    """A task of a tier with the initial weights."""
    weights = blob_ref(encode_weights(artifacts.initial_weights()), 1024)
    settings = TRAIN.model_copy(update=changes)
    manifest = artifacts.tiers[tier].manifest
    return Task("r", 1, "t", 1, tier, Instructions(train=settings), manifest, weights)


def update_of(task, board):
    finished = compute(task, board, Hooks())
    return dict(tensors_in(board.blobs.read(finished.update.digest)))


class Counted:
    """Counts the batches that the frozen layers compute."""

    def __init__(self, monkeypatch):
        self.batches = []
        compute_batch = lower_part.LowerPart._compute

        def counted(part, x):
            self.batches.append(len(x))
            return compute_batch(part, x)

        monkeypatch.setattr(lower_part.LowerPart, "_compute", counted)

    def pop_counts(self):
        """The batches since the last call."""
        batches = self.batches
        self.batches = []
        return batches


def test_an_update_has_the_same_bits_with_kept_outputs(mlp, board, tmp_path, monkeypatch):
    """In the first task, in the next one that reads all rows, and after damage to a row."""
    counted = Counted(monkeypatch)
    keeping = replace(board, kept_outputs=outputs(tmp_path))
    # Reading rows of a model this small is slower than computing them.
    monkeypatch.setattr(lower_part._Times, "reading_is_slower", False)
    for tier in mlp.tiers:
        expected = update_of(task(mlp, tier), board)
        assert counted.pop_counts() == []
        first = update_of(task(mlp, tier), keeping)
        # A test batch, the three of the first pass, its last one filled up, then the last ones.
        assert counted.pop_counts() == [2, 8, 8, 8, 5, 8, 5, 5]
        second = update_of(task(mlp, tier), keeping)
        assert counted.pop_counts() == [2, 5, 5, 5]
        (folder,) = (tmp_path / "kept").iterdir()
        with (folder / "rows").open("r+b") as file:
            file.write(bytes(4))
        third = update_of(task(mlp, tier), keeping)
        assert 8 in counted.pop_counts()
        for update in (first, second, third):
            assert list(update) == list(expected)
            for name, value in expected.items():
                np.testing.assert_array_equal(update[name], value)


def test_pieces_of_batches_have_rows_of_their_size(mlp, board, tmp_path, monkeypatch):
    """Gradients are summed over pieces; the last piece of a batch is shorter."""
    monkeypatch.setattr(lower_part._Times, "reading_is_slower", False)
    tier = next(iter(mlp.tiers))
    pieces = task(mlp, tier, micro_batch=3)
    expected = update_of(pieces, board)
    update = update_of(pieces, replace(board, kept_outputs=outputs(tmp_path)))
    for name, value in expected.items():
        np.testing.assert_array_equal(update[name], value)


def test_a_board_fetches_the_parts_only_if_it_keeps_outputs(mlp, board, tmp_path):
    """Any other board trains with the whole step, as a board of an older Shoal."""
    from device_runtime.training.routines import ROUTINES  # noqa: PLC0415

    manifest = next(iter(mlp.tiers.values())).manifest
    graphs = ROUTINES["train"].graphs
    assert graphs(manifest, board) == ("onnx/train",)
    assert graphs(manifest, replace(board, kept_outputs=outputs(tmp_path))) == (ABOVE, BELOW)
    elsewhere = replace(board, backend="ort-training", kept_outputs=outputs(tmp_path))
    assert graphs(manifest, elsewhere) == ("onnx/train",)


def test_nothing_is_kept_of_steps_that_are_timed(mlp, board, tmp_path):
    """Their results are dropped."""
    keeping = replace(board, kept_outputs=outputs(tmp_path))
    assert time_step(task(mlp, next(iter(mlp.tiers))), keeping, Hooks()) > 0
    assert not (tmp_path / "kept").exists()


def test_layers_that_mix_samples_on_this_board_are_not_kept(mlp, board, tmp_path, monkeypatch):
    """A runtime may add up numbers by the place of a sample; then its bits would change."""
    monkeypatch.setattr(lower_part.LowerPart, "_is_by_sample", lambda *_: False)
    tier = next(iter(mlp.tiers))
    expected = update_of(task(mlp, tier), board)
    update = update_of(task(mlp, tier), replace(board, kept_outputs=outputs(tmp_path)))
    for name, value in expected.items():
        np.testing.assert_array_equal(update[name], value)
    (folder,) = (tmp_path / "kept").iterdir()
    assert (folder / "refused").exists()
    assert sum(path.stat().st_size for path in folder.iterdir()) == 0


def test_rows_that_are_read_more_slowly_than_computed_are_given_up(
    mlp, board, tmp_path, monkeypatch
):
    """From then on the frozen layers run as without the setting."""
    monkeypatch.setattr(lower_part._Times, "reading_is_slower", True)
    tier = next(iter(mlp.tiers))
    expected = update_of(task(mlp, tier), board)
    update = update_of(task(mlp, tier), replace(board, kept_outputs=outputs(tmp_path)))
    for name, value in expected.items():
        np.testing.assert_array_equal(update[name], value)
    (folder,) = (tmp_path / "kept").iterdir()
    assert (folder / "refused").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2 GB", 2 * 10**9), ("512 MiB", 2**29), ("1.5kb", 1500), (0, 0), (7, 7)],
)
def test_sizes_are_numbers_or_texts(text, expected):
    """With decimal and binary units."""
    from pydantic import TypeAdapter  # noqa: PLC0415

    from fleet_protocol.byte_counts import ByteCount  # noqa: PLC0415

    assert TypeAdapter(ByteCount).validate_python(text) == expected


@pytest.mark.parametrize("text", ["2 gigs", "GB", "-1 MB", -1])
def test_other_sizes_are_refused(text):
    """A text that is no size, and a negative number."""
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415

    from fleet_protocol.byte_counts import ByteCount  # noqa: PLC0415

    with pytest.raises(ValidationError):
        TypeAdapter(ByteCount).validate_python(text)
