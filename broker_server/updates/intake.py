"""The intake of an update: it is opened, decoded, fitted to its task and measured, each once.

A server, its receivers and a simulation use this one intake. Its result is stored, screened and
merged.
"""

import math
from collections.abc import Callable, Mapping

from broker_server.stages.decoding import decode_update
from broker_server.stages.update import Distance, Tensors
from broker_server.updates.checks import (
    check_finite,
    check_metadata,
    check_tensors,
    check_variances,
    expected_shapes,
)
from broker_server.updates.distance import measure
from broker_server.updates.values import ArrivedUpdate, ExpectedUpdate
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.weights import encode_weights

MOST_SENT = 16  # slices that stay mapped while updates made from them arrive and are folded


def receive_update(
    data: bytes,
    expected: ExpectedUpdate,
    sent: Callable[[str], Tensors],
) -> ArrivedUpdate:
    """Decode, check and measure an update whose digest is known to be right.

    Args:
        data: the blob as received.
        expected: its required form.
        sent: finds the weights that were sent to devices, by digest.

    Raises:
        RefusedError: it cannot be decoded, or does not have the required form.
        BlobError: the sent weights are damaged on disk.
    """
    metadata, tensors = _open(data)
    if expected.instructions.upload.encoding != "fp32":
        tensors = decode_update(
            tensors,
            expected_shapes(expected),
            expected.instructions.upload,
            sent(expected.task.weights.digest),
        )
        # The store keeps weights, in whatever encoding they were sent: folding, again after a
        # restart, too, then maps them from the disk and decodes nothing.
        data = encode_weights(tensors, metadata)
    check_metadata(metadata, expected.task)
    check_tensors(tensors, expected)
    distance = None
    if expected.task.kind == "train" and not expected.masked:
        distance = measure(tensors, sent(expected.task.weights.digest))
    _require_finite(tensors, distance)
    if expected.task.kind == "statistics":
        check_variances(tensors, expected)
    return ArrivedUpdate(data, distance)


def _open(data: bytes) -> tuple[Mapping[str, str], Tensors]:
    try:
        return blob_in(data)
    except BlobError as error:
        raise RefusedError(RefusalReason.MALFORMED, str(error)) from error


def _require_finite(tensors: Tensors, distance: Distance | None) -> None:
    # One value that is not finite makes the norm not finite: most updates need no further pass.
    if distance is None or not math.isfinite(distance.norm):
        check_finite(tensors)
