"""Finds numbers of labels that no sample has, which a model has an output for all the same."""

import numpy as np

from fleet_protocol.targets import Targets

_FROM_ZERO = (
    "if the file numbers its labels from 1, subtract 1 from each, or name them in a table with "
    "`labels`"
)
_CONSECUTIVE = (
    "number the labels 0, 1, 2, ... without gaps, or name them in a table with `labels`; for "
    "numbers that are measured, use a loss of numbers, such as mean-squared-error"
)


def describe_unused(source: str, y: Targets, classes: int) -> str:
    """Describe labels that were numbered from 1, or with large gaps.

    A test set may lack a rare label. So only two cases are described: the greatest label is the
    model's last one, and either no sample has the label 0, or less than half of all labels occur.

    Args:
        source: where the labels came from, for messages.
        y: labels ``[N]``, or several for each sample, of which negative ones do not count.
        classes: number of labels of the model.

    Returns:
        A sentence with the figures and what to do; empty if there is nothing to describe.
    """
    # With a label for each token or pixel, most texts lack most words.
    if y.dtype.kind == "f" or y.ndim > 1:
        return ""
    labels = np.unique(y).astype(np.int64, copy=False)
    present = labels[labels >= 0]
    if len(present) < 2 or present[-1] != classes - 1:
        return ""
    figures = (
        f"the labels in {source} are {len(present)} different numbers from {present[0]} to "
        f"{present[-1]}, and the model has {classes} labels from 0 to {classes - 1}"
    )
    if len(present) * 2 < classes:
        return f"{figures}: {_CONSECUTIVE}"
    if present[0] > 0:
        return f"{figures}, so no sample has the label 0: {_FROM_ZERO}"
    return ""
