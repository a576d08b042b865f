"""The intake of an update: opened, decoded, fitted to its task and measured, each once.

A server, its receivers and a simulation use this one intake. What comes out is what is kept,
screened and merged.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from broker_server.updates.checks import (
    check_finite,
    check_metadata,
    check_tensors,
    expected_shapes,
)
from broker_server.updates.distance import measure
from broker_server.updates.values import Arrived, Distance, Expected, Tensors
from fleet_protocol.encodings import decode
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.weights import encode_weights

MOST_SENT = 16  # slices that stay mapped while updates made from them come and are folded


def receive_update(
    data: bytes,
    expected: Expected,
    sent: Callable[[str], Tensors],
) -> Arrived:
    """Decode, check and measure an update whose digest is known to be right.

    Args:
        data: the blob as it travelled.
        expected: what it must be.
        sent: finds the weights that devices were sent, by digest.

    Raises:
        RefusedError: it cannot be decoded, or is not what is expected.
        BlobError: the weights that were sent are damaged on disk.
    """
    metadata, tensors = _open(data)
    if expected.instructions.upload.encoding != "fp32":
        tensors = _decode(tensors, expected, sent(expected.task.weights.digest))
        # The store keeps weights, whatever encoding they travelled in.
        data = encode_weights(tensors, metadata)
    check_metadata(metadata, expected.task)
    check_tensors(tensors, expected)
    distance = None
    if expected.task.kind == "train" and not expected.masked:
        distance = measure(tensors, sent(expected.task.weights.digest))
    _require_finite(tensors, distance)
    return Arrived(data, distance)


def _open(data: bytes) -> tuple[Mapping[str, str], Tensors]:
    try:
        return blob_in(data)
    except BlobError as error:
        raise RefusedError(RefusalReason.MALFORMED, str(error)) from error


def _decode(
    encoded: Tensors,
    expected: Expected,
    sent: Tensors,
) -> Tensors:
    """Add the decoded difference to the weights that were sent."""
    upload = expected.instructions.upload
    change = decode(encoded, expected_shapes(expected), upload.encoding, keep=upload.keep)
    with np.errstate(over="ignore"):  # sums that are not finite are refused with the rest
        return {name: sent[name] + value for name, value in change.items()}


def _require_finite(tensors: Tensors, distance: Distance | None) -> None:
    # One value that is not finite makes a norm that is not: most updates need no further pass.
    if distance is None or not math.isfinite(distance.norm):
        check_finite(tensors)
