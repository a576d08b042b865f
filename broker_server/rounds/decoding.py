"""From an update as it travelled to one as it is checked and merged: decoded where it is encoded, and looked at."""

import numpy as np

from broker_server.rounds.collecting import OpenTask
from broker_server.rounds.validation import check_update, expected_shapes
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.encodings import decode, open_weights
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.weights import encode_weights


def take_update(data: bytes, task: OpenTask, blobs: BlobStore) -> bytes:
    """Check an update, and decode one that is encoded; `blobs` have the weights that its device was sent.

    Returns:
        What is to be merged: `data` itself, if it travelled as it is.

    Raises:
        RefusedError: it cannot be decoded, or is not what `check_update` lets pass.
        BlobError: the weights that were sent are damaged on disk.
    """
    if task.instructions.upload.encoding != "fp32":
        data = _decoded(data, task, blobs)
    masked = task.instructions.upload.summing is not None
    check_update(data, task.record, task.manifest, task.instructions.stays, masked=masked)
    return data


def _decoded(data: bytes, task: OpenTask, blobs: BlobStore) -> bytes:
    try:
        metadata, parts = blob_in(data)
    except BlobError as error:
        raise RefusedError(RefusalReason.MALFORMED, str(error)) from error
    asked = task.instructions.upload
    shapes = expected_shapes(task.record, task.manifest, task.instructions.stays)
    difference = decode(parts, shapes, asked.encoding, keep=asked.keep)
    sent = open_weights(blobs.path(task.record.weights.digest))
    with np.errstate(over="ignore"):  # sums that are not finite are refused with the rest
        return encode_weights({name: sent[name] + value for name, value in difference.items()}, metadata)
