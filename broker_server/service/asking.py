"""What operators ask boards' models, on its way to the boards, and the answers on theirs to who asked."""

import time
from collections.abc import Callable

from pydantic import ValidationError

from broker_server.rounds.fleet import Fleet
from broker_server.service.outbox import Outbox
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import ConfigError, RefusalReason
from fleet_protocol.frozen import problems
from fleet_protocol.messages import MESSAGE_LIMIT_BYTES, Ask, Predicted
from fleet_protocol.requests import RunRequest, ServerRequest, parse_request

MOST = 64  # that wait for their answers


def requested_config(request: RunRequest) -> FleetConfig:
    """The configuration of the run that is asked for; a ConfigError where it is none."""
    try:
        return FleetConfig.model_validate_json(request.config)
    except ValidationError as error:
        raise ConfigError(f"the requested configuration: {problems(error, 'the document', 1)}") from error


class Asking:
    """Tells an answer in any case: the board's, or why there is none."""

    def __init__(self, fleet: Fleet, outbox: Outbox) -> None:
        self._fleet, self._outbox = fleet, outbox
        self._waiting: dict[str, tuple[Ask, float]] = {}
        self._last: str | None = None

    def requested(self, payload: bytes, otherwise: Callable[[ServerRequest], None]) -> None:
        """Take what is asked of a board; what is asked of the server is another's."""
        request = parse_request(payload)
        if isinstance(request, Ask):
            self._ask(request)
        elif request.request != self._last:  # a broker may send one again that it has no acknowledgement of
            self._last = request.request
            otherwise(request)

    def _ask(self, ask: Ask) -> None:
        """Ask the board, or say at once why it is not asked."""
        if not self._fleet.knows(ask.device):
            self._refuse(ask, RefusalReason.UNKNOWN_DEVICE, "it has never been here; `shoal devices` lists who has")
        elif not self._fleet.is_online(ask.device):
            self._refuse(ask, RefusalReason.AWAY, "it is not connected; see `shoal devices`")
        elif len(self._waiting) >= MOST:
            self._refuse(ask, RefusalReason.TOO_MANY, f"{MOST} requests wait for their answers; ask again")
        elif len(ask.to_bytes()) > MESSAGE_LIMIT_BYTES:  # numbers may be longer than they were written
            self._refuse(ask, RefusalReason.OVERSIZED, "this is too long for one message; ask for fewer samples")
        else:
            self._waiting[ask.task] = ask, time.monotonic() + ask.seconds
            self._outbox.send(ask.device, ask)

    def take(self, said: Predicted) -> None:
        """Tell a board's answer; nobody waits for one that is late, or that was asked of another board."""
        if said.task in self._waiting and self._waiting[said.task][0].device == said.device:
            del self._waiting[said.task]
            self._outbox.event(said)

    def turn(self) -> None:
        """Say of whom nothing came in time, or who has gone."""
        for name, (ask, ends) in list(self._waiting.items()):
            if time.monotonic() >= ends:
                late = f"no answer in {ask.seconds:g} s; see its log, and whether it has the server's version"
                self._refuse(self._waiting.pop(name)[0], RefusalReason.LATE, late)
            elif not self._fleet.is_online(ask.device):
                self._refuse(self._waiting.pop(name)[0], RefusalReason.AWAY, "it went away before it answered")

    def _refuse(self, ask: Ask, reason: RefusalReason, detail: str) -> None:
        self._outbox.event(Predicted(task=ask.task, device=ask.device, reason=reason, detail=detail))
