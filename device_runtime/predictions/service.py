"""Serves predictions while the agent runs: at the socket, and over the fleet's broker.

Both use the same model. Requests over the broker are answered one at a time, in a separate thread;
only a few may wait.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from device_runtime.agent.refusals import refusal_of
from device_runtime.predictions.local_socket import LocalSocket
from device_runtime.predictions.predictor import Predictor
from device_runtime.predictions.requests import read_request
from device_runtime.settings import DeviceConfig, PredictConfig
from fleet_protocol.errors import DataChangedError, DataError, RefusalReason
from fleet_protocol.messages import MESSAGE_LIMIT_BYTES, Ask, Predicted


class PredictionService:
    """Answers requests until it is closed.

    Args:
        config: configuration of the board.
        settings: access and limits.
        reply: called with a request from the broker and the fields of its answer.

    Raises:
        ConfigError: it cannot listen at the socket.
    """

    def __init__(
        self,
        config: DeviceConfig,
        settings: PredictConfig,
        reply: Callable[..., None],
    ) -> None:
        self._predictor = Predictor(config, settings.seconds, settings.confidence)
        self._reply = reply
        self._resources = contextlib.ExitStack()
        # Requests with their deadlines; None ends the thread.
        self._waiting: queue.Queue[tuple[Ask, float] | None] = queue.Queue(settings.max_clients)
        if settings.socket is not None:
            server = LocalSocket(self._predictor, settings, settings.socket)
            self._resources.enter_context(contextlib.closing(server))
        if settings.mqtt:
            threading.Thread(
                target=self._serve,
                name="asking",
                daemon=True,
            ).start()

    def submit(self, ask: Ask) -> None:
        """Answer a request from the broker in its turn, or refuse it immediately."""
        try:
            self._waiting.put_nowait((ask, time.monotonic() + ask.seconds))
        except queue.Full:
            detail = f"{self._waiting.maxsize} requests are waiting already; try again later"
            self._reply(ask, reason=RefusalReason.TOO_MANY, detail=detail)

    def close(self) -> None:
        """Stop listening; waiting requests are not answered."""
        self._resources.close()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def _serve(self) -> None:
        while (request := self._waiting.get()) is not None:
            ask, deadline = request
            seconds_left = deadline - time.monotonic()
            if seconds_left > 0:  # otherwise the sender no longer waits for the answer
                self._reply(ask, **self._answer(ask, seconds_left))

    def _answer(self, ask: Ask, seconds: float) -> dict[str, Any]:
        try:
            model, rows = self._predictor(read_request(ask.asked), seconds)
            answer = {"model": model, "predictions": rows}
            message = Predicted.model_validate({"task": ask.task, **answer})
            # Receivers refuse a larger message, and the sender would never get an answer.
            size = len(message.to_bytes())
        # onnxruntime's errors have no common base class, and no request may end the thread.
        except Exception as error:  # noqa: BLE001
            return _refusal(error)
        if size > MESSAGE_LIMIT_BYTES:
            detail = (
                f"the answer has {size} bytes, and the limit is {MESSAGE_LIMIT_BYTES}; send fewer"
                " samples at once"
            )
            return {"reason": RefusalReason.OVERSIZED, "detail": detail}
        return answer


def _refusal(error: Exception) -> dict[str, Any]:
    reason, detail = refusal_of(error)
    request_is_wrong = isinstance(error, DataError | ValueError | RecursionError)
    # The data that changes is the board's own; the request does not depend on it.
    if request_is_wrong and not isinstance(error, DataChangedError):
        reason = RefusalReason.MALFORMED
    return {"reason": reason, "detail": detail[:500]}
