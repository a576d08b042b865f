"""What operators ask boards' models, on its way to the boards, and the answers on theirs to who
asked.
"""

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

MOST = 64  # that wait for their answers


@dataclass(frozen=True)
class _Waiting:
    ask: Ask
    answer: Answer
    until: float  # a time of ``time.monotonic()``


class Asking:
    """Tells an answer in any case: the board's, or why there is none."""

    def __init__(self, fleet: Fleet, outbox: Outbox) -> None:
        self._fleet = fleet
        self._outbox = outbox
        self._waiting: dict[str, _Waiting] = {}

    def ask(self, ask: Ask, answer: Answer) -> None:
        """Ask the board, or say at once why it is not asked."""
        if not self._fleet.knows(ask.device):
            unknown = "it has never connected; `shoal devices` lists the devices that have"
            _refuse(ask, answer, RefusalReason.UNKNOWN_DEVICE, unknown)
        elif not self._fleet.is_online(ask.device):
            _refuse(
                ask,
                answer,
                RefusalReason.AWAY,
                "it is not connected; see `shoal devices`",
            )
        elif len(self._waiting) >= MOST:
            _refuse(
                ask,
                answer,
                RefusalReason.TOO_MANY,
                f"{MOST} requests already wait for answers; try again later",
            )
        elif (
            len(ask.to_bytes()) > MESSAGE_LIMIT_BYTES
        ):  # numbers may be longer than they were written
            too_long = "the request is too long for one message; request fewer samples"
            _refuse(ask, answer, RefusalReason.OVERSIZED, too_long)
        else:
            self._waiting[ask.task] = _Waiting(ask, answer, time.monotonic() + ask.seconds)
            self._outbox.send(ask.device, ask)

    def take(self, said: Predicted) -> None:
        """Tell a board's answer.

        Nobody waits for one that is late, or that was asked of another board.
        """
        waiting = self._waiting.get(said.task)
        if waiting is not None and waiting.ask.device == said.device:
            del self._waiting[said.task]
            waiting.answer(said)

    def turn(self) -> None:
        """Say of whom nothing came in time, or who has gone."""
        for name, waiting in list(self._waiting.items()):
            ask = waiting.ask
            if time.monotonic() >= waiting.until:
                late = f"no answer in {ask.seconds:g} s; see its log, and whether it has the server's version"
                _refuse(ask, waiting.answer, RefusalReason.LATE, late)
            elif not self._fleet.is_online(ask.device):
                _refuse(
                    ask,
                    waiting.answer,
                    RefusalReason.AWAY,
                    "it disconnected before it answered",
                )
            else:
                continue
            del self._waiting[name]


def _refuse(ask: Ask, answer: Answer, reason: RefusalReason, detail: str) -> None:
    answer(Predicted(task=ask.task, device=ask.device, reason=reason, detail=detail))
