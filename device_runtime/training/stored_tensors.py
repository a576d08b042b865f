"""Tensors in a temporary file, and how far others differ from them, piece by piece.

Beside a training step, a second copy of a model in memory could exceed what a board has.
"""

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.disk import disk_errors, write_all

Tensors = Mapping[str, NDArray[Any]]

_PIECE = 65_536  # numbers that are read at once


@dataclass(frozen=True)
class Difference:
    """How tensors differ from stored ones.

    Attributes:
        distance: Euclidean norm of the difference; NaN if one has a NaN.
        is_equal: whether all numbers are equal.
    """

    distance: float
    is_equal: bool


class StoredTensors:
    """Tensors in a file without a name, which disappears with this object.

    Args:
        folder: folder of the file, on a disk with space for the tensors.

    Raises:
        StorageError: the file cannot be made there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with disk_errors("write to", folder):
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._file = file
        weakref.finalize(self, file.close)

    def save(self, tensors: Tensors) -> None:
        """Store the present values in place of earlier ones.

        Raises:
            StorageError: the disk is full.
        """
        at = 0
        with disk_errors("write to", self._folder):
            for piece in _pieces(tensors):
                write_all(self._file.fileno(), piece.data.cast("B"), at)
                at += piece.nbytes

    def difference(self, tensors: Tensors) -> Difference:
        """Return how tensors differ from the stored ones, which have the same names and shapes.

        Raises:
            StorageError: the file cannot be read.
        """
        at = 0
        total = 0.0
        is_equal = True
        for piece in _pieces(tensors):
            with disk_errors("read from", self._folder):
                data = os.pread(self._file.fileno(), piece.nbytes, at)
            at += piece.nbytes
            stored = np.frombuffer(data, piece.dtype)
            total += float(np.linalg.norm(piece - stored)) ** 2
            is_equal = is_equal and np.array_equal(piece, stored)
        return Difference(total**0.5, is_equal)


def _pieces(tensors: Tensors) -> Iterator[NDArray[Any]]:
    for value in tensors.values():
        numbers = value.reshape(-1)
        for start in range(0, numbers.size, _PIECE):
            yield np.ascontiguousarray(numbers[start : start + _PIECE])
