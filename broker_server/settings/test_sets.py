"""The server's test sets: ``[evaluation.data]`` and ``[evaluation.tier_data.<tier>]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel

__all__ = ["IdxTestSet", "NpzTestSet", "TestSetConfig", "moved"]


class _TestSet(FrozenModel):
    """What every test set has: the same keys, with the same meaning, as a device's ``[data]`` table.

    A sample becomes ``(x * scale - mean) / std``; tokens stay as they are.

    Attributes:
        path: the file with the samples.
        shape: shape of one sample to give to flat or squeezed samples; by default the model's.
        scale: factor of every value.
        mean: subtracted after scaling; a number, or one per channel (the first axis of a sample).
        std: divides last; a number, or one per channel.
        limit: use only the first samples; None for all.
    """

    path: Path
    shape: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    scale: float = Field(default=1.0, gt=0)
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    limit: int | None = Field(default=None, ge=1)


class NpzTestSet(_TestSet):
    """Arrays in one npz file.

    Attributes:
        x_key: array of samples, one per row.
        y_key: array of labels.
    """

    kind: Literal["npz"] = "npz"
    x_key: str = "x"
    y_key: str = "y"


class IdxTestSet(_TestSet):
    """Two IDX files as MNIST has them, plain or gzip.

    Attributes:
        labels: the file with the labels.
        scale: factor of every value; pixels are 0 to 255.
    """

    kind: Literal["idx"] = "idx"
    labels: Path
    scale: float = Field(default=1 / 255, gt=0)


TestSetConfig = Annotated[NpzTestSet | IdxTestSet, Field(discriminator="kind")]


def moved(data: TestSetConfig, folder: Path) -> TestSetConfig:
    """The same test set with relative paths taken from ``folder``."""
    paths = {"path": folder / data.path}
    if isinstance(data, IdxTestSet):
        paths["labels"] = folder / data.labels
    return data.model_copy(update=paths)
