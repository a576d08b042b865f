"""Predictions for others while the agent runs: at the socket, and over the fleet's broker, of one
model for all.

At the Unix socket a request is a line, and so is its answer. Who asks over the broker is answered
one at a time, in a thread of its own; few may wait.

A request is ``{"x": [sample, ...]}``, or ``{"npy": "<an .npy file in base64>"}``, where a model
takes several inputs either of them by name; it may have an ``"id"``. The answer has that again,
with ``"model"`` and ``"predictions"``, or with ``"error"``.
"""

import base64
import contextlib
import io
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.agent.refusals import refusal_of
from device_runtime.predicting import Predictor
from device_runtime.settings import DeviceConfig, PredictConfig
from fleet_protocol.data.readers import ArrayOrNamed
from fleet_protocol.errors import (
    ConfigError,
    DataChangedError,
    DataError,
    RefusalReason,
    ShoalError,
)
from fleet_protocol.messages import MESSAGE_LIMIT_BYTES, Ask, Predicted


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


def samples_of(asked: Any) -> ArrayOrNamed:
    """The samples of a request, as arrays.

    Raises:
        DataError: it is none.
        Exception: of numpy, about what no array can be made of.
    """
    match asked:
        case {"x": value, **rest} | {"npy": value, **rest} if not rest:
            kind = next(iter(asked))
        case _:
            raise DataError(
                'a request is {"x": [sample, ...]} or {"npy": "..."}; an "id" is a text or a whole number'
            )
    return (
        {name: _array(kind, one) for name, one in value.items()}
        if isinstance(value, dict)
        else _array(kind, value)
    )


def _array(kind: str, value: Any) -> NDArray[Any]:
    data = io.BytesIO(base64.b64decode(value, validate=True)) if kind == "npy" else None
    array: NDArray[Any] = (
        np.array(value) if data is None else np.lib.format.read_array(data, allow_pickle=False)
    )
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise DataError("the samples are no array of numbers: all of them need the same shape")
    return array


class Serving:
    """Serves from as many threads as there may be clients until it is closed.

    A ConfigError where it cannot listen.
    """

    def __init__(self, predictor: Predictor, rules: PredictConfig, path: Path) -> None:
        self._rules = rules
        self._path = path
        self._open = True
        self._predictor = predictor
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_socket():
                path.unlink()  # of an agent that was killed: this one holds the state folder's lock
            self._socket.bind(str(path))
            path.chmod(0o660)
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"[predict] socket: cannot listen at {path}: {error}; name another path"
            ) from error
        self._socket.listen()
        for _ in range(rules.max_clients):
            threading.Thread(target=self._serve, name="serving", daemon=True).start()

    def _serve(self) -> None:
        most = self._rules.max_bytes
        while self._open:
            with contextlib.suppress(OSError):  # one is gone or late, or this is closed
                link, _ = self._socket.accept()
                with link:
                    for line in _lines(link, most, self._rules.seconds):
                        fits = len(line) <= most
                        said = (
                            answer(self._predictor, line)
                            if fits
                            else encoded(error=f"above {most} bytes")
                        )
                        link.settimeout(self._rules.seconds)
                        link.sendall(said)

    def close(self) -> None:
        """Let nobody in any more."""
        self._open = False
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes those who wait for a client
        self._socket.close()
        self._path.unlink(missing_ok=True)


def _lines(link: socket.socket, most: int, seconds: float) -> Iterator[bytes]:
    """The requests of a client, each whole in time.

    One that is too long, as far as it has come, is the last.
    """
    line = rest = b""
    while len(line) <= most:
        ends = time.monotonic() + seconds
        while b"\n" not in rest and len(rest) <= most:
            link.settimeout(max(ends - time.monotonic(), 1e-3))
            part = link.recv(2**16)
            if not (part or rest):
                return
            rest += part or b"\n"
        line, _, rest = rest.partition(b"\n")
        yield line


class Asking:
    """Answers by `reply` until it is closed; a ConfigError where it cannot listen at the socket."""

    def __init__(
        self, config: DeviceConfig, rules: PredictConfig, reply: Callable[..., None]
    ) -> None:
        self._predictor = Predictor(config, rules.seconds)
        self._reply = reply
        self._over = contextlib.ExitStack()
        self._waiting: queue.Queue[tuple[Ask, float] | None] = queue.Queue(rules.max_clients)
        if rules.socket is not None:
            self._over.enter_context(
                contextlib.closing(Serving(self._predictor, rules, rules.socket))
            )
        if rules.mqtt:
            threading.Thread(target=self._serve, name="asking", daemon=True).start()

    def take(self, ask: Ask) -> None:
        """Answer in its turn, or refuse at once."""
        try:
            self._waiting.put_nowait((ask, time.monotonic() + ask.seconds))
        except queue.Full:
            said = f"{self._waiting.maxsize} requests wait already; ask again"
            self._reply(ask, reason=RefusalReason.TOO_MANY, detail=said)

    def close(self) -> None:
        """Listen no more; what waits is not answered."""
        self._over.close()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def _serve(self) -> None:
        while (item := self._waiting.get()) is not None:
            if (left := item[1] - time.monotonic()) > 0:  # else nobody waits for it any more
                self._reply(item[0], **self._answer(item[0], left))

    def _answer(self, ask: Ask, seconds: float) -> dict[str, Any]:
        try:
            model, rows = self._predictor(samples_of(ask.asked), seconds)
            said = {"model": model, "predictions": rows}
            size = len(Predicted.model_validate({"task": ask.task, **said}).to_bytes())
        except Exception as error:  # noqa: BLE001  (errors of onnxruntime have no base; no request ends the thread)
            reason, detail = refusal_of(error)
            wrong = isinstance(error, DataError | ValueError | RecursionError)
            wrong = wrong and not isinstance(
                error, DataChangedError
            )  # the error concerns the board's own data
            return {
                "reason": RefusalReason.MALFORMED if wrong else reason,
                "detail": detail[:500],
            }
        if size > MESSAGE_LIMIT_BYTES:
            text = f"the answer has {size} bytes of at most {MESSAGE_LIMIT_BYTES}; ask for fewer samples at once"
            return {"reason": RefusalReason.OVERSIZED, "detail": text}
        return said
