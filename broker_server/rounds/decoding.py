"""From an update as it travelled to one as it is checked and merged: decoded where it is encoded,
and looked at.
"""

import math
from collections.abc import Callable

import numpy as np

from broker_server.rounds.collecting import OpenTask
from broker_server.rounds.screening import difference
from broker_server.rounds.validation import (
    Tensors,
    check_finite,
    check_update,
    expected_shapes,
)
from fleet_protocol.encodings import decode
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.weights import encode_weights

MOST_SENT = 16  # slices that stay mapped while updates made from them come and are folded


def take_update(data: bytes, task: OpenTask, sent: Callable[[str], Tensors]) -> bytes:
    """Check and measure an update, and decode one that is encoded.

    `sent` finds what its device was sent, by digest.

    Returns:
        What is to be merged: `data` itself, if it travelled as it is.

    Raises:
        RefusedError: it cannot be decoded, or is not what `check_update` lets pass.
        BlobError: the weights that were sent are damaged on disk.
    """
    if task.instructions.upload.encoding != "fp32":
        data = _decoded(data, task, sent(task.record.weights.digest))
    masked = task.instructions.upload.summing is not None
    tensors = check_update(data, task.record, task.manifest, task.instructions.stays, masked=masked)
    if task.record.kind == "train" and not masked:
        task.norm = difference(tensors, sent(task.record.weights.digest))
    # One value that is not finite makes a norm that is not: a pass less for nearly all.
    if task.norm is None or not math.isfinite(task.norm[0]):
        check_finite(tensors)
    return data


def _decoded(data: bytes, task: OpenTask, sent: Tensors) -> bytes:
    try:
        metadata, parts = blob_in(data)
    except BlobError as error:
        raise RefusedError(RefusalReason.MALFORMED, str(error)) from error
    asked = task.instructions.upload
    shapes = expected_shapes(task.record, task.manifest, task.instructions.stays)
    moved = decode(parts, shapes, asked.encoding, keep=asked.keep)
    with np.errstate(over="ignore"):  # sums that are not finite are refused with the rest
        return encode_weights({name: sent[name] + value for name, value in moved.items()}, metadata)
