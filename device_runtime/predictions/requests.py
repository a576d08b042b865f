"""Requests for predictions, and their answers, both in JSON.

A request is ``{"x": [sample, ...]}``, or ``{"npy": "<an .npy file in base64>"}``. If a model takes
several inputs, ``x`` or ``npy`` is an object with one entry per input. A request may have an
``"id"``. The answer repeats the id, with ``"model"`` and ``"predictions"``, or with ``"error"``.
"""

import base64
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.predictions.predictor import Predictor
from fleet_protocol.data.readers import ArrayOrNamed
from fleet_protocol.errors import DataError, ShoalError

_NUMBER_KINDS = "fiub"


def answer(predictor: Predictor, request: bytes) -> bytes:
    """Return the answer to a request, valid or not."""
    request_id: dict[str, str | int] = {}
    try:
        document = json.loads(request)
        if isinstance(document, dict) and isinstance(document.get("id"), str | int):
            request_id = {"id": document.pop("id")}
        model, rows = predictor(read_request(document))
        return encode_answer(**request_id, model=model, predictions=rows)
    # onnxruntime's errors have no common base class, and no request may end the agent.
    except Exception as error:  # noqa: BLE001
        text = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        return encode_answer(**request_id, error=text[:500])


def encode_answer(**fields: str | int | Mapping[str, Any] | list[Any]) -> bytes:
    """Return a line of JSON; a number that is not finite raises ValueError."""
    return json.dumps(fields, allow_nan=False).encode() + b"\n"


def read_request(document: Any) -> ArrayOrNamed:
    """Return the samples of a request as arrays.

    Raises:
        DataError: the request is not valid.
        Exception: from numpy, if the values do not form an array.
    """
    match document:
        case {"x": value, **rest} | {"npy": value, **rest} if not rest:
            kind = next(iter(document))
        case _:
            raise DataError(
                'a request is {"x": [sample, ...]} or {"npy": "..."}; '
                'an "id" is a string or a whole number'
            )
    if isinstance(value, dict):
        return {name: _array(kind, samples) for name, samples in value.items()}
    return _array(kind, value)


def _array(kind: str, value: Any) -> NDArray[Any]:
    array: NDArray[Any]
    if kind == "npy":
        file = io.BytesIO(base64.b64decode(value, validate=True))
        # A pickle could run code of whoever sends it.
        array = np.lib.format.read_array(file, allow_pickle=False)
    else:
        array = np.array(value)
    if array.dtype.kind not in _NUMBER_KINDS or not array.ndim:
        raise DataError(
            "the samples do not form an array of numbers: all of them need the same shape"
        )
    return array
