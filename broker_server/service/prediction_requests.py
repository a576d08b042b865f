"""Forwards requests for predictions to boards, and the boards' answers back to the senders."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from broker_server.rounds.fleet import Fleet
from broker_server.service.outbox import Outbox
from fleet_protocol.control import RunEvent
from fleet_protocol.errors import RefusalReason
from fleet_protocol.messages import MESSAGE_LIMIT_BYTES, Ask, Predicted

Answer = Callable[[RunEvent], None]
"""Sends an answer to the sender of a request."""

MOST_WAITING = 64  # requests that wait for their answers


@dataclass(frozen=True)
class _PendingRequest:
    """A request that waits for its answer until a ``time.monotonic()``."""

    ask: Ask
    answer: Answer
    until: float


class PredictionRequests:
    """The waiting requests: each is answered by the board, or with the reason for the refusal.

    Args:
        devices: devices of the fleet.
        outbox: sends messages to boards.
    """

    def __init__(self, devices: Fleet, outbox: Outbox) -> None:
        self._devices = devices
        self._outbox = outbox
        self._waiting: dict[str, _PendingRequest] = {}  # by the id of the request

    def send(self, ask: Ask, answer: Answer) -> None:
        """Send a request to its board, or answer immediately why it is not sent."""
        if not self._devices.knows(ask.device):
            detail = "it has never connected; `shoal devices` lists the devices that have"
            _refuse(ask, answer, RefusalReason.UNKNOWN_DEVICE, detail)
        elif not self._devices.is_online(ask.device):
            detail = "it is not connected; see `shoal devices`"
            _refuse(ask, answer, RefusalReason.AWAY, detail)
        elif len(self._waiting) >= MOST_WAITING:
            detail = f"{MOST_WAITING} requests already wait for answers; try again later"
            _refuse(ask, answer, RefusalReason.TOO_MANY, detail)
        # It may be longer than when it arrived: numbers are written out here.
        elif len(ask.to_bytes()) > MESSAGE_LIMIT_BYTES:
            detail = "the request is too long for one message; request fewer samples"
            _refuse(ask, answer, RefusalReason.OVERSIZED, detail)
        else:
            self._waiting[ask.task] = _PendingRequest(ask, answer, time.monotonic() + ask.seconds)
            self._outbox.send(ask.device, ask)

    def receive(self, predicted: Predicted) -> None:
        """Forward a board's answer.

        An answer is dropped if it is late, or if another board was asked.
        """
        waiting = self._waiting.get(predicted.task)
        if waiting is not None and waiting.ask.device == predicted.device:
            del self._waiting[predicted.task]
            waiting.answer(predicted)

    def answer_overdue(self) -> None:
        """Answer requests whose time is over or whose board has disconnected."""
        for name, waiting in list(self._waiting.items()):
            ask = waiting.ask
            if time.monotonic() >= waiting.until:
                detail = (
                    f"no answer within {ask.seconds:g} s; check the board's log, and whether it"
                    " runs the server's version of Shoal"
                )
                _refuse(ask, waiting.answer, RefusalReason.LATE, detail)
                del self._waiting[name]
            elif not self._devices.is_online(ask.device):
                detail = "it disconnected before it answered"
                _refuse(ask, waiting.answer, RefusalReason.AWAY, detail)
                del self._waiting[name]


def _refuse(ask: Ask, answer: Answer, reason: RefusalReason, detail: str) -> None:
    answer(Predicted(task=ask.task, device=ask.device, reason=reason, detail=detail))
