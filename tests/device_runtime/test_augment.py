"""Images that are changed at random in training: how, when, and never in evaluation."""

import contextlib
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from device_runtime.settings import DeviceConfig
from device_runtime.training.epochs import train
from device_runtime.training.hooks import Hooks
from device_runtime.training.measuring import HeldOut, evaluate, measure
from device_runtime.training.schedule import StepSeed, TrainingSchedule, training_batch
from fleet_protocol.configuration import parse_config
from fleet_protocol.data import DataConfig, DataSet, load_data, make_dataset
from fleet_protocol.data.augment import box_crop, crop, flip
from fleet_protocol.errors import DataError
from fleet_protocol.manifest import UNNAMED
from fleet_protocol.messages import TrainSettings

SETTINGS = TrainSettings(learning_rate=0.1, epochs=2, batch_size=8, seed=5)
CLASSES = 3
SIDE = 12


class Recorder:
    """Stands in for a session: keeps the samples and labels it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []

    def keeping(self, batch, samples, *, again, is_random):
        return contextlib.nullcontext()

    def step(self, x, y, mask, learning_rate, noise):
        self.seen.append((x, y))
        return 0.5

    def evaluate(self, x, y, mask, statistics):
        self.seen.append((x, y))
        return {"loss_sum": np.array(0.5)}

    def statistics(self, x):
        self.seen.append((x, np.zeros(0)))
        return {"stat.norm.mean": np.zeros(2, np.float32)}

    def parameters(self):
        return {}


MANIFEST = SimpleNamespace(
    classes=CLASSES,
    input_dtype="float32",
    noise=(),
    statistics=(),
    recipe=SimpleNamespace(metrics=(), reported=()),
)


CROP_FLIP = ("crop", "flip")


def images(count: int = 20, *, augment: tuple[str, ...] = CROP_FLIP) -> DataSet:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (count, 2, SIDE, SIDE), dtype=np.uint8)
    labels = draw.integers(0, CLASSES, count)
    return make_dataset(
        "board", pixels, labels, scale=1 / 255, mean=(0.4, 0.5), std=(0.2, 0.3), augment=augment
    )


def moves(image: np.ndarray, source: np.ndarray) -> list[tuple[int, int, bool]]:
    """Every way of cutting an image from its padded source."""
    height, width = image.shape[1:]
    return [
        (down, right, mirrored)
        for down in range(9)
        for right in range(9)
        for mirrored in (False, True)
        if np.array_equal(
            image[:, :, ::-1] if mirrored else image,
            source[:, down : down + height, right : right + width],
        )
    ]


def test_crops_move_and_flips_mirror():
    """Each image is a shifted copy, perhaps mirrored, with black where nothing was; all moves are
    equally likely.
    """
    count = 1800
    black = np.array([-2.0, 3.0], np.float32).reshape(2, 1, 1)
    source = np.random.default_rng(0).standard_normal((count, 2, 5, 6)).astype(np.float32)
    generator = np.random.default_rng(1)
    found = flip(crop(source, black, generator), generator)
    assert found.shape == source.shape
    assert found.dtype == np.float32
    padded = np.tile(black, (count, 1, 13, 14))
    padded[:, :, 4:-4, 4:-4] = source
    seen: Counter[tuple[str, int]] = Counter()
    for image, background in zip(found, padded, strict=True):
        ((down, right, mirrored),) = moves(image, background)
        seen.update([("down", down), ("right", right), ("mirrored", mirrored)])
    # Each shift is expected 200 times with a deviation of 13.3, each mirroring 900 times with one
    # of 21.
    for (kind, value), times in seen.items():
        assert times == pytest.approx(900 if kind == "mirrored" else 200, abs=4 * 21), (kind, value)
    assert len(seen) == 9 + 9 + 2


def test_the_draw_is_the_documented_one():
    """The same numbers, drawn and applied image by image."""
    data = images()
    indices = np.array([3, 1, 7])
    x, y = training_batch(data, indices, "float32", StepSeed(5, 2, 1, 4))
    generator = np.random.Generator(
        np.random.PCG64(np.random.SeedSequence([5, 2, 1, 4], spawn_key=(2,)))
    )
    down, right = generator.integers(0, 9, (2, 3))
    mirrored = generator.random(3) < 0.5
    black = ((np.zeros(2) - [0.4, 0.5]) / [0.2, 0.3]).reshape(2, 1, 1)
    plain, labels = data.batch(indices, "float32")
    for i, image in enumerate(x):
        padded = np.tile(black, (1, SIDE + 8, SIDE + 8))
        padded[:, 4:-4, 4:-4] = plain[i]
        expected = padded[:, down[i] : down[i] + SIDE, right[i] : right[i] + SIDE]
        np.testing.assert_allclose(
            image, expected[:, :, ::-1] if mirrored[i] else expected, rtol=1e-5, atol=1e-6
        )
    np.testing.assert_array_equal(y, labels)
    np.testing.assert_array_equal(y, data.y[indices])


def test_a_box_is_enlarged_to_its_image():
    """By the documented draws, image by image; a ramp shows where each pixel comes from."""
    count, height, width = 50, 12, 8
    ramp = np.empty((count, 2, height, width), np.float32)
    ramp[:, 0] = np.arange(height)[:, np.newaxis]
    ramp[:, 1] = np.arange(width)
    boxes = box_crop(ramp, np.random.default_rng(3))
    area, aspect, down, right = np.random.default_rng(3).random((4, count))
    for i in range(count):
        pixels = height * width * (0.05 + 0.95 * area[i])
        ratio = 0.75 + 0.58 * aspect[i]
        box_height = min(np.sqrt(pixels / ratio), height)
        box_width = min(np.sqrt(pixels * ratio), width)
        rows = (height - box_height) * down[i] + box_height * (np.arange(height) + 0.5) / height
        columns = (width - box_width) * right[i] + box_width * (np.arange(width) + 0.5) / width
        expected_rows = np.clip(rows - 0.5, 0, height - 1)
        expected_columns = np.clip(columns - 0.5, 0, width - 1)
        np.testing.assert_allclose(boxes[i, 0], np.tile(expected_rows, (width, 1)).T, atol=1e-5)
        np.testing.assert_allclose(boxes[i, 1], np.tile(expected_columns, (height, 1)), atol=1e-5)
    assert boxes.dtype == np.float32
    # The change of a data set is the same function.
    data = images(augment=("box-crop",))
    x, _ = data.batch(np.arange(4), "float32")
    changed = data.augmented(x.copy(), np.random.default_rng(1))
    np.testing.assert_array_equal(changed, box_crop(x, np.random.default_rng(1)))


def test_every_step_draws_anew_and_again_the_same():
    """Seed, round, epoch and step each change the draw; the same four give the same bits."""
    data = images()
    indices = np.arange(20)
    base = training_batch(data, indices, "float32", StepSeed(5, 2, 1, 4))[0]
    np.testing.assert_array_equal(
        training_batch(data, indices, "float32", StepSeed(5, 2, 1, 4))[0], base
    )
    for other in ((6, 2, 1, 4), (5, 3, 1, 4), (5, 2, 0, 4), (5, 2, 1, 5)):
        assert not np.array_equal(
            training_batch(data, indices, "float32", StepSeed(*other))[0], base
        )


def test_padding_is_what_a_black_pixel_becomes():
    """To the last bit, with scaled pixels, with data that is already normalised, and without any
    scaling.
    """
    black = np.zeros((2, 3, 4, 4), np.uint8)
    options = {
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2023, 0.1994, 0.2010),
        "augment": CROP_FLIP,
    }
    raw = make_dataset("raw", black, np.zeros(2), scale=1 / 255, **options)
    np.testing.assert_array_equal(
        raw.normal_black, raw.batch(np.arange(1), "float32")[0][0, :, :1, :1]
    )
    normal = raw.batch(np.arange(2), "float32")[0]
    done = make_dataset(
        "normal", normal, np.zeros(2), augment=CROP_FLIP, black=normal[0, :, 0, 0].tolist()
    )
    np.testing.assert_array_equal(done.normal_black, raw.normal_black)
    plain = make_dataset("plain", black, np.zeros(2), augment=CROP_FLIP)
    assert not training_batch(plain, np.arange(2), "float32", StepSeed(1, 1, 0, 0))[0].any()


def test_training_sees_changed_images_and_evaluation_does_not():
    """Every step of every epoch is the documented batch; evaluation is given the samples as they
    are.
    """
    data = images()
    chosen = np.arange(1, 20)
    session = Recorder()
    train(session, MANIFEST, TrainingSchedule(data, chosen, SETTINGS, 3), Hooks())
    expected = [
        training_batch(data, indices, "float32", StepSeed(SETTINGS.seed, 3, planned.epoch, step))
        for planned in TrainingSchedule(data, chosen, SETTINGS, 3).passes()
        for step, indices in enumerate(planned.batches)
    ]
    assert len(session.seen) == len(expected) == 6
    for found, wanted in zip(session.seen, expected, strict=True):
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(found[1], wanted[1])
    judge = Recorder()
    evaluate(judge, MANIFEST, HeldOut(data, chosen, 50, np.ones(CLASSES, np.float32)), Hooks())
    np.testing.assert_array_equal(judge.seen[0][0], data.batch(chosen, "float32")[0])


def test_statistics_are_of_changed_images():
    """Specification 1.6b: the pass sees what the first epoch of a training sees, but for a last
    batch of one sample.
    """
    data = images(17)
    chosen = np.arange(17)
    training = Recorder()
    session = Recorder()
    train(training, MANIFEST, TrainingSchedule(data, chosen, SETTINGS, 3), Hooks())
    _, count = measure(session, MANIFEST, TrainingSchedule(data, chosen, SETTINGS, 3), Hooks())
    assert count == 2
    for found, wanted in zip(session.seen, training.seen[:2], strict=True):
        np.testing.assert_array_equal(found[0], wanted[0])


def test_without_augment_nothing_is_drawn():
    """A batch is the samples themselves."""
    data = images(augment=())
    x, _ = training_batch(data, np.arange(5), "float32", StepSeed(1, 1, 0, 0))
    np.testing.assert_array_equal(x, data.batch(np.arange(5), "float32")[0])


def test_the_configuration_names_it(tmp_path):
    """[data] takes augment and black; another word is an error."""
    np.savez(tmp_path / "d.npz", x=np.ones((4, 3, 4, 4), np.float32), y=np.zeros(4))
    config = TypeAdapter(DataConfig)
    table = {"kind": "npz", "path": "d.npz", "augment": "crop-flip", "black": [-1, -2, -3]}
    data = load_data(config.validate_python(table).resolved(tmp_path))
    assert data.augment == CROP_FLIP
    assert data.normal_black.ravel().tolist() == [-1, -2, -3]
    with pytest.raises(DataError, match=r"black has 2 values, samples in .* have \[3\] channels"):
        load_data(config.validate_python(table | {"black": [1, 2]}).resolved(tmp_path))
    with pytest.raises(ValidationError, match="crop"):
        config.validate_python(table | {"augment": "zoom"})


def test_what_is_no_image_is_refused():
    """Flat samples say which key gives them a shape; tokens say that they are no images."""
    flat = np.zeros((4, 784), np.float32)
    with pytest.raises(DataError, match=r"samples in flat have shape \[784\]; set `shape`"):
        make_dataset("flat", flat, np.zeros(4), augment=CROP_FLIP)
    assert (
        make_dataset("flat", flat, np.zeros(4), augment=CROP_FLIP, shape=(1, 28, 28)).augment
        == CROP_FLIP
    )
    tokens = make_dataset(
        "tokens", np.zeros((4, 1, 2, 3), np.int64), np.zeros(4), augment=CROP_FLIP
    )
    with pytest.raises(DataError, match="the model takes tokens"):
        tokens.fit_to(
            SimpleNamespace(input_shape=(1, 2, 3), input_dtype="int64", sample_sizes=UNNAMED)
        )


def test_the_page_of_the_data_documents_it():
    """docs/data.md names both keys."""
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert 'augment = "crop-flip"' in page
    assert "`black`" in page
    (table,) = re.findall(r"```toml\n# device\.toml\n(.*?)```", page, re.DOTALL)
    config = parse_config(
        f'fleet = "f"\ndevice = "d"\nbroker = "mqtt://b"\nstate_dir = "s"\n{table}',
        DeviceConfig,
        source="device.toml",
    )
    assert config.data.augment == ("crop", "flip", "my_data.py:noise")
