"""Predictions for others while the agent runs: at the socket, and over the fleet's broker, of one model for all.

Who asks over the broker is answered one at a time, in a thread of its own; few may wait.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from device_runtime.agent.refusals import refusal_of
from device_runtime.answering import samples_of
from device_runtime.predicting import Predictor
from device_runtime.settings import DeviceConfig, PredictConfig
from fleet_protocol.errors import DataError, RefusalReason
from fleet_protocol.messages import MESSAGE_LIMIT_BYTES, Ask, Predicted


class Asking:
    """Answers by `reply` until it is closed; a ConfigError where it cannot listen at the socket."""

    def __init__(self, config: DeviceConfig, rules: PredictConfig, reply: Callable[..., None]) -> None:
        self._predictor, self._reply, self._over = Predictor(config, rules.seconds), reply, contextlib.ExitStack()
        self._waiting: queue.Queue[tuple[Ask, float] | None] = queue.Queue(rules.max_clients)
        if rules.socket is not None:
            from device_runtime.serving import Serving  # noqa: PLC0415  (Unix alone has it)

            self._over.enter_context(contextlib.closing(Serving(self._predictor, rules, rules.socket)))
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
            return {"reason": RefusalReason.MALFORMED if wrong else reason, "detail": detail[:500]}
        if size > MESSAGE_LIMIT_BYTES:
            text = f"the answer has {size} bytes of at most {MESSAGE_LIMIT_BYTES}; ask for fewer samples at once"
            return {"reason": RefusalReason.OVERSIZED, "detail": text}
        return said
