"""Requests for predictions, and their answers, both JSON.

A request is ``{"x": [sample, ...]}``, or ``{"npy": "<an .npy file in base64>"}``, where a model takes several inputs
either of them by name; it may have an ``"id"``. The answer has that again, with ``"model"`` and ``"predictions"``, or
with ``"error"``.
"""

import base64
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.predicting import Predictor
from fleet_protocol.data.readers import Named
from fleet_protocol.errors import DataError, ShoalError


def answer(predictor: Predictor, request: bytes) -> bytes:
    """The answer to a request, whatever it is."""
    known: dict[str, str | int] = {}
    try:
        asked = json.loads(request)
        if isinstance(asked, dict) and isinstance(asked.get("id"), str | int):
            known = {"id": asked.pop("id")}
        model, rows = predictor(samples_of(asked))
        return encoded(**known, model=model, predictions=rows)
    except Exception as error:  # noqa: BLE001  (errors of onnxruntime have no base; no request ends the agent)
        said = f"{error}" if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        return encoded(**known, error=said[:500])


def encoded(**fields: str | int | Mapping[str, Any] | list[Any]) -> bytes:
    """A line of JSON; a number that is not finite is a ValueError."""
    return json.dumps(fields, allow_nan=False).encode() + b"\n"


def samples_of(asked: Any) -> Named:
    """The samples of a request, as arrays.

    Raises:
        DataError: it is none.
        Exception: of numpy, about what no array can be made of.
    """
    match asked:
        case {"x": value, **rest} | {"npy": value, **rest} if not rest:
            kind = next(iter(asked))
        case _:
            raise DataError('a request is {"x": [sample, ...]} or {"npy": "..."}; an "id" is a text or a whole number')
    return {name: _array(kind, one) for name, one in value.items()} if isinstance(value, dict) else _array(kind, value)


def _array(kind: str, value: Any) -> NDArray[Any]:
    data = io.BytesIO(base64.b64decode(value, validate=True)) if kind == "npy" else None
    array: NDArray[Any] = np.array(value) if data is None else np.lib.format.read_array(data, allow_pickle=False)
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise DataError("the samples are no array of numbers: all of them need the same shape")
    return array
