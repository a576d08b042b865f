"""Image data sets: digits, MNIST, CIFAR-10 and CIFAR-100, normalised as in HeteroFL.

Krizhevsky: "Learning Multiple Layers of Features from Tiny Images", 2009. Specification 1.8 gives
one normalisation for both sets of CIFAR. A loader reads its files from the folder with its name
below the root; a limit selects up to this many evenly spread samples of each split. Each CIFAR set
takes 740 MB.
"""

import importlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.readers import read_idx_file
from fleet_protocol.errors import ConfigError, DataError
from simulation.data.dataset import (
    Dataset,
    dataset_folder,
    evenly,
    read_arrays,
    read_packed,
)

_DIGITS_TEST_SHARE = 0.2
_SIDE = 32  # of the images of CIFAR
_CLASSES = 100  # of CIFAR-100
_LABELS = 2  # bytes of a record of CIFAR-100: a coarse and a fine label
_RECORD = _LABELS + 3 * _SIDE * _SIDE
_TENS = 10
_NOT_THEIRS = -1
_EVEN_TASK = (*range(_TENS), *[_NOT_THEIRS] * _CLASSES)
_ODD_TASK = (*[_NOT_THEIRS] * _TENS, *range(_CLASSES))
CIFAR_TASKS = (_EVEN_TASK, _ODD_TASK)
"""The labels of devices with even and odd numbers, for each label of the joint set.

-1 for labels of the other task.
"""

_Images = NDArray[np.float32]  # [n, channels, height, width]
_Labels = NDArray[np.int64]  # [n]
_Split = tuple[_Images, _Labels]
_Array = NDArray[Any]


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each channel, of values in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalised(self, raw: _Array) -> _Images:
        """Normalise images of values up to 255, [n, channels, height, width].

        Images in float32 are modified in place.
        """
        # In this order and in place: another order rounds differently, and a copy of CIFAR's
        # training images would take 600 MB more.
        images: _Images = raw.astype(np.float32, copy=False)
        images /= 255.0
        images -= _per_channel(self.mean)
        images /= _per_channel(self.std)
        return images

    @property
    def black(self) -> tuple[float, ...]:
        """Return a black pixel, normalised."""
        pixel = -_per_channel(self.mean) / _per_channel(self.std)
        return tuple(pixel.ravel().tolist())


def _per_channel(values: Sequence[float]) -> _Images:
    """Return one number per channel in a shape that broadcasts over the pixels of an image."""
    return np.array(values, np.float32)[:, None, None]


_MNIST = Scale((0.1307,), (0.3081,))
CIFAR = Scale((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def digits(_root: Path | None) -> Dataset:
    """Load the 8x8 digits of scikit-learn, in [0, 1].

    A fixed fifth of them is the test set.

    Returns:
        1,438 and 359 images, float32 [n, 1, 8, 8], 10 classes.
    """
    # Scikit-learn takes seconds to import, and only this set needs it.
    datasets: Any = importlib.import_module("sklearn.datasets")
    bunch = datasets.load_digits()
    # Computed in float64 like scikit-learn's data, then rounded.
    images = bunch.images[:, None] / 16.0
    images = images.astype(np.float32)
    labels = bunch.target.astype(np.int64)
    # A fixed seed, so that all simulations of digits have the same test set.
    order = np.random.default_rng(0).permutation(len(labels))
    cut = int(len(labels) * _DIGITS_TEST_SHARE)
    test = order[:cut]
    train = order[cut:]
    return Dataset(
        "digits",
        images[train],
        labels[train],
        images[test],
        labels[test],
        classes=10,
    )


def mnist(root: Path | None, *, limit: int | None = None) -> Dataset:
    """Load MNIST from its four gzipped IDX files.

    Returns:
        60,000 and 10,000 images, float32 [n, 1, 28, 28], 10 classes.

    Raises:
        DataError: a file is missing or damaged.
    """
    holds = "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the two t10k files"
    folder = dataset_folder(root, "mnist", holds)

    def read_split(stem: str) -> _Split:
        raw = read_idx_file(folder / f"{stem}-images-idx3-ubyte.gz")
        labels = read_idx_file(folder / f"{stem}-labels-idx1-ubyte.gz")
        count = len(raw)
        label_count = len(labels)
        if count != label_count:
            raise DataError(
                f"{folder} has {count} images and {label_count} labels of {stem}; download"
                " MNIST again"
            )
        kept = evenly(len(labels), limit)
        images = raw[kept][:, None]
        kept_labels = labels[kept].astype(np.int64)
        return _MNIST.normalised(images), kept_labels

    train = read_split("train")
    test = read_split("t10k")
    return Dataset("mnist", *train, *test, classes=10, black=_MNIST.black[0])


def cifar10(root: Path | None, *, limit: int | None = None) -> Dataset:
    """Load CIFAR-10 from one npz file of JPEG images for each split; needs Pillow.

    Image i of a file is ``jpeg[offset[i]:offset[i + 1]]``.

    Returns:
        50,000 and 10,000 images, float32 [n, 3, 32, 32], 10 classes.

    Raises:
        DataError: a file is missing or damaged.
    """
    folder = dataset_folder(root, "cifar10", "train.npz and test.npz")

    def read_split(stem: str) -> _Split:
        path = folder / f"{stem}.npz"
        jpeg, offset, label = read_arrays(path, ("jpeg", "offset", "label"))
        kept = evenly(len(label), limit)
        shape = (len(kept), 3, _SIDE, _SIDE)
        images = np.empty(shape, np.float32)
        for position, index in enumerate(kept):
            first = offset[index]
            end = offset[index + 1]
            code = jpeg[first:end].tobytes()
            pixels = _decode(code, f"image {index} of {path}")
            images[position] = pixels.transpose(2, 0, 1)
        kept_labels = label[kept].astype(np.int64)
        return CIFAR.normalised(images), kept_labels

    train = read_split("train")
    test = read_split("test")
    return Dataset("cifar10", *train, *test, classes=10, black=CIFAR.black)


def _decode(code: bytes, source: str) -> NDArray[np.uint8]:
    """Return the pixels of a JPEG image, [side, side, 3]; raises a DataError for another size.

    Args:
        code: the file.
        source: its name in messages.
    """
    try:
        pillow: Any = importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise DataError(
            "CIFAR-10 is stored as JPEG images; install shoal[images] to read them"
        ) from error
    try:
        with pillow.open(io.BytesIO(code)) as image:
            pixels = np.asarray(image.convert("RGB"), np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"{source} is not a JPEG image: {error}") from error
    shape = pixels.shape
    if shape != (_SIDE, _SIDE, 3):
        raise DataError(f"{source} has shape {shape}, not {_SIDE}x{_SIDE}")
    return pixels


def cifar100(root: Path | None, *, limit: int | None = None) -> Dataset:
    """Load CIFAR-100 with its 100 fine labels, from the two files of its binary version.

    A record is one byte for the coarse label, one for the fine label, and 32 x 32 pixels of red,
    then green, then blue.

    Returns:
        50,000 and 10,000 images, float32 [n, 3, 32, 32], 100 classes.

    Raises:
        DataError: a file is missing or damaged.
    """
    folder = dataset_folder(root, "cifar100", "train.bin and test.bin")

    def read_split(stem: str) -> _Split:
        records = _read_records(folder / f"{stem}.bin")
        kept = records[evenly(len(records), limit)]
        colours = kept[:, _LABELS:]
        fine_labels = kept[:, _LABELS - 1]
        images = colours.reshape(-1, 3, _SIDE, _SIDE)
        return CIFAR.normalised(images), fine_labels.astype(np.int64)

    train = read_split("train")
    test = read_split("test")
    return Dataset("cifar100", *train, *test, classes=_CLASSES, black=CIFAR.black)


def _read_records(path: Path) -> _Array:
    """Read the records of CIFAR-100, uint8 [n, bytes of a record]."""
    raw = read_packed(path)
    if not raw or len(raw) % _RECORD:
        raise DataError(
            f"{path} has {len(raw)} bytes, which is not a multiple of the record size {_RECORD};"
            " download CIFAR-100 again"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, _RECORD)
    fine_labels = records[:, _LABELS - 1]
    if fine_labels.max() >= _CLASSES:
        raise DataError(
            f"{path} has a label above {_CLASSES - 1}, so it is not a binary file of CIFAR-100"
        )
    return records


def cifar_tasks(root: Path | None, *, devices: int = 5, limit: int | None = None) -> Dataset:
    """Load both sets as two tasks of one fleet, for devices that share a trunk.

    Shen et al., 2020, https://arxiv.org/abs/2006.16765; specification 5.4. The personal models use
    the labels of `CIFAR_TASKS`: 0 to 9 are those of CIFAR-10, 10 to 109 those of CIFAR-100. Use it
    with a partition by subject.

    Args:
        root: folder that holds ``cifar10/`` and ``cifar100/``.
        devices: number of devices; even ones share CIFAR-10, odd ones CIFAR-100, in equal parts.
        limit: samples of each split of each set at most.

    Returns:
        Images, float32 [n, 3, 32, 32], 110 classes; groups are the devices.

    Raises:
        ConfigError: there are fewer devices than tasks.
        DataError: a file is missing or damaged.
    """
    if devices < len(CIFAR_TASKS):
        raise ConfigError(f"cifar_tasks needs at least 2 devices, one for each task, not {devices}")
    tens = cifar10(root, limit=limit)
    hundreds = cifar100(root, limit=limit)
    train_y = np.concatenate([tens.train_y, hundreds.train_y + _TENS])
    test_y = np.concatenate([tens.test_y, hundreds.test_y + _TENS])
    train_owners = _owners(len(tens.train_y), len(hundreds.train_y), devices)
    test_owners = _owners(len(tens.test_y), len(hundreds.test_y), devices)
    return Dataset(
        "cifar_tasks",
        np.concatenate([tens.train_x, hundreds.train_x]),
        train_y,
        np.concatenate([tens.test_x, hundreds.test_x]),
        test_y,
        classes=_TENS + _CLASSES,
        train_group=train_owners,
        test_group=test_owners,
        black=tens.black,
    )


def _owners(tens: int, hundreds: int, devices: int) -> _Labels:
    """Return the device of each sample, in turn among the devices of its task."""
    even = np.arange(0, devices, 2, dtype=np.int64)
    odd = np.arange(1, devices, 2, dtype=np.int64)
    owners_of_tens = even[np.arange(tens) % len(even)]
    owners_of_hundreds = odd[np.arange(hundreds) % len(odd)]
    return np.concatenate([owners_of_tens, owners_of_hundreds])
