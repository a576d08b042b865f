"""Image data sets: digits, MNIST and CIFAR-10, normalised as HeteroFL does (specification 1.8)."""

import importlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.readers import read_idx_file
from fleet_protocol.errors import DataError
from simulation.data.dataset import Dataset, dataset_folder, evenly, read_arrays

_MNIST_MEAN, _MNIST_STD = 0.1307, 0.3081
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
CIFAR_SIDE = 32
_DIGITS_TEST_SHARE = 0.2


def digits(_root: Path | None) -> Dataset:
    """Load the 8x8 digits that ship with scikit-learn, in [0, 1]; a fixed fifth of them is the test set.

    Returns:
        1,438 and 359 images, float32 [n, 1, 8, 8], 10 classes.
    """
    # Seconds to import, needed for this set alone.
    bunch: Any = importlib.import_module("sklearn.datasets").load_digits()
    images = (bunch.images[:, None] / 16.0).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    cut = int(len(labels) * _DIGITS_TEST_SHARE)
    test, train = order[:cut], order[cut:]
    return Dataset("digits", images[train], labels[train], images[test], labels[test], 10)


def mnist(root: Path | None, *, limit: int | None = None) -> Dataset:
    """Load MNIST from its four gzipped IDX files.

    Args:
        root: folder that holds ``mnist/``.
        limit: samples of each split at most, evenly spread; all if omitted.

    Returns:
        60,000 and 10,000 images, float32 [n, 1, 28, 28], 10 classes.

    Raises:
        DataError: a file is missing or damaged.
    """
    holds = "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the two t10k files"
    folder = dataset_folder(root, "mnist", holds)

    def split(stem: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        raw, labels = (read_idx_file(folder / f"{stem}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
        if len(raw) != len(labels):
            raise DataError(f"{folder} has {len(raw)} images and {len(labels)} labels of {stem}; fetch MNIST again")
        kept = evenly(len(labels), limit)
        images = raw[kept].astype(np.float32)[:, None]
        images /= 255.0
        images -= _MNIST_MEAN
        images /= _MNIST_STD
        return images, labels[kept].astype(np.int64)

    black = -np.float32(_MNIST_MEAN) / np.float32(_MNIST_STD)
    return Dataset("mnist", *split("train"), *split("t10k"), 10, black=float(black))


def cifar10(root: Path | None, *, limit: int | None = None) -> Dataset:
    """Load CIFAR-10 from one npz file of JPEG images for each split; needs Pillow.

    Image i of a file is ``jpeg[offset[i]:offset[i + 1]]``.

    Args:
        root: folder that holds ``cifar10/``.
        limit: samples of each split at most, evenly spread; all if omitted. All take 740 MB.

    Returns:
        50,000 and 10,000 images, float32 [n, 3, 32, 32], 10 classes.

    Raises:
        DataError: a file is missing or damaged.
    """
    folder = dataset_folder(root, "cifar10", "train.npz and test.npz")

    def split(stem: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        path = folder / f"{stem}.npz"
        jpeg, offset, label = read_arrays(path, ("jpeg", "offset", "label"))
        kept = evenly(len(label), limit)
        images = np.empty((len(kept), 3, CIFAR_SIDE, CIFAR_SIDE), np.float32)
        for position, index in enumerate(kept):
            code = jpeg[offset[index] : offset[index + 1]].tobytes()
            images[position] = _decoded(code, f"image {index} of {path}").transpose(2, 0, 1)
        images /= 255.0
        images -= np.array(CIFAR_MEAN, np.float32)[:, None, None]
        images /= np.array(CIFAR_STD, np.float32)[:, None, None]
        return images, label[kept].astype(np.int64)

    black = -np.array(CIFAR_MEAN, np.float32) / np.array(CIFAR_STD, np.float32)
    return Dataset("cifar10", *split("train"), *split("test"), 10, black=tuple(black.tolist()))


def _decoded(code: bytes, what: str) -> NDArray[np.uint8]:
    try:
        pillow: Any = importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise DataError("CIFAR-10 is stored as JPEG images; install shoal[images] to read them") from error
    try:
        with pillow.open(io.BytesIO(code)) as image:
            pixels = np.asarray(image.convert("RGB"), np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"{what} is not a JPEG image: {error}") from error
    if pixels.shape != (CIFAR_SIDE, CIFAR_SIDE, 3):
        raise DataError(f"{what} has shape {pixels.shape}, not {CIFAR_SIDE}x{CIFAR_SIDE}")
    return pixels
