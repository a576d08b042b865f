"""Requests for predictions that reach the agent: served by the board, or refused."""

import contextlib
from typing import TYPE_CHECKING

from device_runtime.agent.uplink import Uplink
from device_runtime.settings import DeviceConfig
from fleet_protocol.errors import RefusalReason
from fleet_protocol.messages import Ask, Predicted

if TYPE_CHECKING:
    from device_runtime.predictions.service import PredictionService


class BoardPredictions:
    """Serves predictions to programs on the board and to the server, if its settings allow it.

    Args:
        config: configuration of the device.
        uplink: sends the answers to the server.
    """

    def __init__(self, config: DeviceConfig, uplink: Uplink) -> None:
        self._config = config
        self._uplink = uplink
        self._service: PredictionService | None = None

    def served(self) -> contextlib.AbstractContextManager[object]:
        """Serve until the context ends.

        Raises:
            ConfigError: it cannot listen at the socket.
        """
        settings = self._config.predict
        if settings is None or (settings.socket is None and not settings.mqtt):
            return contextlib.nullcontext()
        # Not every board can afford the modules in memory.
        from device_runtime.predictions.service import PredictionService  # noqa: PLC0415

        self._service = PredictionService(self._config, settings, self._send)
        return contextlib.closing(self._service)

    def answer(self, ask: Ask) -> None:
        """Answer a request from the broker, later in the thread that predicts."""
        settings = self._config.predict
        if self._service is not None and settings is not None and settings.mqtt:
            self._service.submit(ask)
            return
        # A refusal, because the server would otherwise wait until its request is too old.
        detail = (
            "this board serves no predictions over MQTT: set mqtt = true in [predict] of "
            "its device.toml, and restart its agent"
        )
        self._send(ask, reason=RefusalReason.UNSUPPORTED, detail=detail)

    def _send(self, ask: Ask, **answer: object) -> None:
        self._uplink.send(ask, Predicted, **answer)
