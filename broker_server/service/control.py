"""Requests to the server, over the socket of its store and over MQTT, and events as answers.

The owner of the store can send any request over the socket. MQTT is open if the sender has signed
the request, or if the configuration says ``insecure = true``. An MQTT request can ask for a run of
the server's own configuration, steer a run, or request predictions from a board; it cannot name
anything for the server to open, call or connect to.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from broker_server.rounds.reporting import Reporter
from broker_server.rounds.run_context import RunContext
from broker_server.service.control_socket import ControlSocket, LocalRequest
from broker_server.service.limits import Rate, TokenBucket
from broker_server.service.local_requests import (
    AnotherRun,
    LocalServerRequest,
    OwnRun,
    parse_local_request,
)
from broker_server.service.outbox import Outbox
from broker_server.service.prediction_requests import Answer, PredictionRequests
from broker_server.service.trusted import trusted_config
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.requested import RequestedSettings, grant
from broker_server.store import Store, queries
from fleet_protocol import control
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError
from fleet_protocol.frozen import problems
from fleet_protocol.messages import Ask, Predicted
from fleet_protocol.requests import RunRequest, parse_request
from fleet_protocol.transport import Received

_LOG = logging.getLogger(__name__)

ServerRequested = RunRequest | LocalServerRequest
"""A request to the server, of either way."""

CarryOut = Callable[[ServerRequested, Answer], None]
"""Carries out a request to the server, or answers why it does not."""

_ANSWERS = Rate(1, 10)  # to unknown senders if MQTT is closed: limits the answers to a flood
CLOSED = (
    "this server accepts no requests over MQTT, because a fleet without identities has no "
    "signatures: run the command on its computer, as its user, with its store in fleet.toml; or "
    "create identities with `shoal init`; or set insecure = true in [broker] (`shoal up "
    "--insecure`) for a network that you trust"
)
_NO_FILE = (
    "this server was started without a configuration, so it accepts no runs over MQTT: start it "
    "with `shoal up --config fleet.toml`, or use `shoal run --config FILE` on its computer, as its "
    "user, with its store in the file"
)
_REMEDY = (
    "Write that into the file of `shoal up --config` and restart the server, or use `shoal run "
    "--config FILE` on its computer, as its user, with its store in the file"
)


def is_open(broker: BrokerConfig) -> bool:
    """Return whether a server accepts requests over MQTT.

    In a fleet with identities they are signed; without, ``insecure = true`` allows all.
    """
    return broker.identity is not None or broker.insecure


def config_of(
    request: RunRequest | OwnRun | AnotherRun, store: Store, own: FleetConfig | None
) -> FleetConfig:
    """Return the configuration of a requested run.

    Args:
        request: request with any configuration over the socket; with numbers for `own` over MQTT.
        store: the server's store.
        own: the server's own configuration, or None.

    Raises:
        ConfigError: it is not valid, or sets something that a request may not set.
    """
    # The owner of the store may have the server read and run anything.
    if isinstance(request, OwnRun):
        try:
            return FleetConfig.model_validate_json(request.config)
        except ValidationError as error:
            raise ConfigError(
                f"the requested configuration: {problems(error, 'the document', 1)}"
            ) from error
    if isinstance(request, AnotherRun):
        earlier = queries.find_run(store, request.run or None)
        # The name stays with the earlier run.
        return trusted_config(store, earlier, own).model_copy(update={"run_name": None})
    if own is None:
        raise ConfigError(_NO_FILE)
    try:
        granted = grant(own, RequestedSettings(request.settings, request.others))
    except ConfigError as error:
        raise ConfigError(f"{error}. {_REMEDY}") from error
    return granted.model_copy(update={"run_name": request.name or own.run_name})


@dataclass
class Control:
    """Receives requests from socket and MQTT, and sends events to both.

    Attributes:
        predictions: requests predictions from boards.
        outbox: sends over MQTT.
        socket: the socket in the store.
        open: whether the server accepts requests over MQTT.
        count: called with the reason of each refused request.
        followed: whether the run in progress may have followers over MQTT.
    """

    predictions: PredictionRequests
    outbox: Outbox
    socket: ControlSocket
    open: bool
    count: Callable[[RefusalReason], None]
    followed: bool = False

    def __post_init__(self) -> None:
        self._answers = TokenBucket(_ANSWERS)
        self._logged_closed = False
        self._last: str | None = None  # id of the last request over MQTT

    def handle(self, event: Received | LocalRequest, carry_out: CarryOut) -> None:
        """Handle a request.

        Args:
            event: the request as it came.
            carry_out: carries it out if it is for the server; raises no error.

        Raises:
            RefusedError: it came over MQTT, which is open, but is malformed.
        """
        if isinstance(event, LocalRequest):
            self._handle_local(event, carry_out)
            return
        if not self.open:
            self._reject_closed(event.payload)
            return
        # In a fleet with identities the connection has checked its signature.
        request = parse_request(event.payload)
        if isinstance(request, Ask):
            self.predictions.send(request, self.outbox.publish_event)
        elif request.request != self._last:  # a broker may resend an unacknowledged request
            self._last = request.request
            carry_out(request, self.outbox.publish_event)

    def _handle_local(self, event: LocalRequest, carry_out: CarryOut) -> None:
        def answer(reply: control.RunEvent) -> None:
            event.answer(reply.to_bytes())

        try:
            request = parse_local_request(event.payload)
        except RefusedError as error:
            answer(
                control.RunRejected(request="unknown", detail=str(error), exit_code=error.exit_code)
            )
            return
        if isinstance(request, Ask):
            self.predictions.send(request, answer)
        else:
            carry_out(request, answer)

    def _reject_closed(self, payload: bytes) -> None:
        """Count a refused request, answer the first few, and log the first."""
        self.count(RefusalReason.UNSUPPORTED)
        if not self._logged_closed:
            self._logged_closed = True
            _LOG.warning("a request came over MQTT: %s", CLOSED)
        # An answer to each request of a flood would be another flood.
        if not self._answers.spend(time.monotonic()):
            return
        try:
            request = parse_request(payload)
        except RefusedError:  # there is no sender to answer
            return
        if isinstance(request, Ask):
            predicted = Predicted(
                task=request.task,
                device=request.device,
                reason=RefusalReason.UNSUPPORTED,
                detail=CLOSED,
            )
            self.outbox.publish_event(predicted)
        else:
            rejected = control.RunRejected(
                request=request.request, detail=CLOSED, exit_code=ConfigError.exit_code
            )
            self.outbox.publish_event(rejected)

    def send_event(self, event: control.RunEvent) -> None:
        """Send an event to all clients of the socket.

        Also over MQTT, if the run has followers there or was started from there.
        """
        self.socket.send_all(event.to_bytes())
        if self.followed or (self.open and isinstance(event, control.RunSteered)):
            self.outbox.publish_event(event)


def report_start(
    context: RunContext, reporter: Reporter, request: str | None, name: str | None, closed: int
) -> None:
    """Report that a run begins or resumes.

    Args:
        context: context of the run.
        reporter: reports the run.
        request: id of the request that started it, if any.
        name: name of the run; None if the user did not choose one.
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
    tiers = ", ".join(artifacts.tier.id for artifacts in context.tiers)
    title = "" if name is None else f"{name}: "
    method = f"{context.strategy.name} on {context.artifacts.arch}"
    reporter.emit(started, f"{title}{method}, tiers {tiers}")
