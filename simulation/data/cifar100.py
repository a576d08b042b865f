"""CIFAR-100, from the two files of its binary version, normalised as CIFAR-10 is.

Krizhevsky: "Learning Multiple Layers of Features from Tiny Images", 2009. A record is one byte for the coarse label,
one for the fine label, and 32 x 32 pixels of red, then green, then blue. Specification 1.8 gives one normalisation for
CIFAR.
"""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import DataError
from simulation.data.dataset import Dataset, dataset_folder, evenly
from simulation.data.images import CIFAR_MEAN, CIFAR_SIDE, CIFAR_STD

_CLASSES = 100
_LABELS = 2
_RECORD = _LABELS + 3 * CIFAR_SIDE * CIFAR_SIDE


def cifar100(root: Path | None, *, limit: int | None = None) -> Dataset:
    """Load CIFAR-100 with its 100 fine labels.

    Args:
        root: folder that holds ``cifar100/`` with ``train.bin`` and ``test.bin``, gzipped or not.
        limit: samples of each split at most, evenly spread; all if omitted. All take 740 MB.

    Returns:
        50,000 and 10,000 images, float32 [n, 3, 32, 32], 100 classes.

    Raises:
        DataError: a file is missing or damaged.
    """
    folder = dataset_folder(root, "cifar100", "train.bin and test.bin")

    def split(stem: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        records = _records(folder / f"{stem}.bin")
        kept = records[evenly(len(records), limit)]
        images = kept[:, _LABELS:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE).astype(np.float32)
        images /= 255.0
        images -= np.array(CIFAR_MEAN, np.float32)[:, None, None]
        images /= np.array(CIFAR_STD, np.float32)[:, None, None]
        return images, kept[:, _LABELS - 1].astype(np.int64)

    black = -np.array(CIFAR_MEAN, np.float32) / np.array(CIFAR_STD, np.float32)
    return Dataset("cifar100", *split("train"), *split("test"), _CLASSES, black=tuple(black.tolist()))


def _records(path: Path) -> NDArray[Any]:
    packed = path.with_name(f"{path.name}.gz")
    try:
        raw = path.read_bytes() if path.is_file() else gzip.decompress(packed.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read {path} or {packed.name}: {error}") from error
    if not raw or len(raw) % _RECORD:
        raise DataError(f"{path} has {len(raw)} bytes, which are no whole records of {_RECORD}; fetch CIFAR-100 again")
    records = np.frombuffer(raw, np.uint8).reshape(-1, _RECORD)
    if records[:, _LABELS - 1].max() >= _CLASSES:
        raise DataError(f"{path} has a label above {_CLASSES - 1}; it is no binary file of CIFAR-100")
    return records
