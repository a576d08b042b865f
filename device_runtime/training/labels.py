"""The labels of a board's samples: those that count, those that occur, and their mask.

Specification 1.5 defines the mask.
"""

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.errors import DataError
from fleet_protocol.targets import Targets, counted


def present_labels(y: Targets, classes: int) -> NDArray[np.int64]:
    """Return the labels that occur, sorted.

    Negative labels are left out; for a regression the result is every output of the model.
    """
    # A regression has no labels: every output is trained.
    if y.dtype.kind == "f":
        return np.arange(classes)
    labels = np.unique(y).astype(np.int64, copy=False)
    return labels[labels >= 0]


def label_mask(labels: NDArray[np.int64], classes: int, *, masked: bool) -> NDArray[np.float32]:
    """Return the label mask, ``[classes]``: 1 where the label counts.

    Unless it is `masked`, all labels count.
    """
    mask = np.zeros(classes, np.float32) if masked else np.ones(classes, np.float32)
    mask[labels] = 1
    return mask


def require_labels(data: DataSet, chosen: NDArray[np.int64]) -> None:
    """Check that at least one label counts.

    Raises:
        DataError: no label of the training samples counts.
    """
    if not counted(data.y[chosen]):
        raise DataError(
            f"{data.source}: every label of the {len(chosen)} training samples is negative, so"
            " all of them are ignored"
        )


def training_mask(
    data: DataSet, chosen: NDArray[np.int64], classes: int, *, masked: bool
) -> NDArray[np.float32]:
    """Return the label mask of a training, ``[classes]``: 1 where the label counts.

    The errors are those of `require_labels`.
    """
    require_labels(data, chosen)
    return label_mask(present_labels(data.y[chosen], classes), classes, masked=masked)
