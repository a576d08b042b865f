"""What is asked of the server, at the socket of its store and over MQTT, and who hears what it tells.

At the socket the owner of the store asks for what he likes. MQTT is open where whoever speaks has
signed it, or the configuration says ``insecure = true``. There somebody asks for a run of the
server's own configuration, steers a run, or asks a board for predictions; nothing that is to be
opened, called or connected to comes that way.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from broker_server.rounds.reporting import Reporter
from broker_server.rounds.run_context import RunContext
from broker_server.service.asking import Answer, Asking
from broker_server.service.control_socket import ControlSocket, LocalRequest
from broker_server.service.limits import Bucket, Rate
from broker_server.service.local_requests import AnotherRun, LocalServerRequest, OwnRun, parse_local_request
from broker_server.service.outbox import Outbox
from broker_server.service.trusted import trusted_config
from broker_server.settings.fleet import BrokerConfig, FleetConfig
from broker_server.settings.requested import Wanted, granted
from broker_server.store import Store, queries
from fleet_protocol import control
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError
from fleet_protocol.frozen import problems
from fleet_protocol.messages import Ask, Predicted
from fleet_protocol.requests import RunRequest, parse_request
from fleet_protocol.transport import Received

_LOG = logging.getLogger(__name__)

ServerRequested = RunRequest | LocalServerRequest
Act = Callable[[ServerRequested, Answer], None]

_ANSWERS = Rate(1, 10)  # to strangers where MQTT is closed: whoever floods a server makes it say no more than this
CLOSED = (
    "this server takes no requests over MQTT, as nobody signs them in a fleet without identities: ask on its computer,"
    " as its user, with its store in fleet.toml; or make identities with `shoal init`; or say insecure = true in"
    " [broker] (`shoal up --insecure`) for a network that you trust"
)
_NO_FILE = (
    "this server has no configuration of its own, so it takes no runs over MQTT: start it with `shoal up --config"
    " fleet.toml`, or ask with `shoal run --config FILE` on its computer, as its user, with its store in the file"
)
_REMEDY = (
    "Write that into the file of `shoal up --config` and start the server again, or ask with `shoal run --config FILE`"
    " on its computer, as its user, with its store in the file"
)


def is_open(broker: BrokerConfig) -> bool:
    """Whether a server takes requests over MQTT: signed ones, or where somebody said that anybody may ask."""
    return broker.identity is not None or broker.insecure


def config_of(request: RunRequest | OwnRun | AnotherRun, store: Store, own: FleetConfig | None) -> FleetConfig:
    """The configuration of the run that is asked for.

    Args:
        request: at the socket, with any configuration; over MQTT with numbers for `own`.
        store: the server's.
        own: the server's own configuration, None for none.

    Raises:
        ConfigError: it is none, or says what a request may not say.
    """
    if isinstance(request, OwnRun):
        try:
            return FleetConfig.model_validate_json(request.config)
        except ValidationError as error:
            raise ConfigError(f"the requested configuration: {problems(error, 'the document', 1)}") from error
    if isinstance(request, AnotherRun):
        return trusted_config(store, queries.find_run(store, request.run or None), own)
    if own is None:
        raise ConfigError(_NO_FILE)
    try:
        return granted(own, Wanted(request.settings, request.others))
    except ConfigError as error:
        raise ConfigError(f"{error}. {_REMEDY}") from error


@dataclass
class Control:
    """Takes requests from both ways, hands on those that are for the server, and tells what happens on both.

    Attributes:
        asking: asks boards.
        outbox: over MQTT.
        socket: in the store.
        open: whether requests over MQTT are taken.
        count: called with the reason of each that is not.
        followed: whether somebody may follow the run in progress over MQTT.
    """

    asking: Asking
    outbox: Outbox
    socket: ControlSocket
    open: bool
    count: Callable[[RefusalReason], None]
    followed: bool = False

    def __post_init__(self) -> None:
        self._answers = Bucket(_ANSWERS)
        self._said_closed = False
        self._last: str | None = None

    def take(self, event: Received | LocalRequest, act: Act) -> None:
        """Take a request; `act` does what is asked of the server, and raises nothing about it.

        Raises:
            RefusedError: it came over MQTT, which is open, and is malformed.
        """
        if isinstance(event, LocalRequest):
            self._take_local(event, act)
        elif not self.open:
            self._turn_away(event.payload)
        else:
            request = parse_request(event.payload)
            if isinstance(request, Ask):
                self.asking.ask(request, self.outbox.event)
            elif request.request != self._last:  # a broker may send one again that it has no acknowledgement of
                self._last = request.request
                act(request, self.outbox.event)

    def _take_local(self, event: LocalRequest, act: Act) -> None:
        def answer(told: control.RunEvent) -> None:
            event.answer(told.to_bytes())

        try:
            request = parse_local_request(event.payload)
        except RefusedError as error:
            answer(control.RunRejected(request="unknown", detail=str(error), exit_code=error.exit_code))
            return
        if isinstance(request, Ask):
            self.asking.ask(request, answer)
        else:
            act(request, answer)

    def _turn_away(self, payload: bytes) -> None:
        """Answer a request that is not taken, as long as there are few; count all of them, and log the first."""
        self.count(RefusalReason.UNSUPPORTED)
        if not self._said_closed:
            self._said_closed = True
            _LOG.warning("a request came over MQTT: %s", CLOSED)
        if not self._answers.take(time.monotonic()):
            return
        try:
            request = parse_request(payload)
        except RefusedError:  # nobody to answer
            return
        if isinstance(request, Ask):
            told = Predicted(task=request.task, device=request.device, reason=RefusalReason.UNSUPPORTED, detail=CLOSED)
            self.outbox.event(told)
        else:
            rejected = control.RunRejected(request=request.request, detail=CLOSED, exit_code=ConfigError.exit_code)
            self.outbox.event(rejected)

    def tell(self, event: control.RunEvent) -> None:
        """Tell all at the socket; over MQTT where a run may be followed there, or somebody may have steered it."""
        self.socket.tell(event.to_bytes())
        if self.followed or (self.open and isinstance(event, control.RunSteered)):
            self.outbox.event(event)


def say_started(context: RunContext, reporter: Reporter, request: str | None, closed: int) -> None:
    """Say that a run begins, or goes on.

    Args:
        context: of the run.
        reporter: tells it.
        request: id of the request that it is begun for, if any.
        closed: number of its newest version.
    """
    started = control.RunStarted(
        run=context.run,
        seconds=0.0,
        request=request,
        arch=context.artifacts.arch,
        strategy=context.strategy.name,
        rounds=context.config.round.rounds,
        closed=closed,
    )
    tiers = ", ".join(each.tier.id for each in context.tiers)
    reporter.emit(started, f"{context.strategy.name} on {context.artifacts.arch}, tiers {tiers}")
