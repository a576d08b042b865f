"""Finds samples of several axes, such as images, that repeat: a camera is covered, or it hangs."""

from collections import Counter

import numpy as np

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.data.summary import drawn_rows

_LEAST_SAMPLES = 20
_SHARE = 0.1  # of the examined samples
_MOST_SAMPLES = 1000
_MOST_VALUES = 2**22


def describe_repeated(data: DataSet) -> str:
    """Describe a sample that at least a tenth of all samples equal; empty if there is none.

    Args:
        data: samples; those of one axis are not examined, because rows of a table may well repeat.
    """
    size = int(np.prod(data.x.shape[1:]))
    if data.x.ndim < 3 or not size:
        return ""
    rows = drawn_rows(len(data), min(_MOST_SAMPLES, max(1, _MOST_VALUES // size)))
    if len(rows) < _LEAST_SAMPLES:
        return ""
    samples = np.ascontiguousarray(data.x[rows]).reshape(len(rows), -1)
    counts = Counter(sample.tobytes() for sample in samples)
    content, count = counts.most_common(1)[0]
    if count < _SHARE * len(rows):
        return ""
    sample = np.frombuffer(content, samples.dtype)
    is_blank = bool((sample == sample[0]).all())
    what = f"have the value {sample[0]:g} everywhere" if is_blank else "are the same"
    return (
        f"{count} of {len(rows)} examined samples {what}: check the camera or the program that "
        "writes them, and leave such samples out"
    )
