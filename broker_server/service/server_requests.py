"""Carries out requests to the server: starts a run, or controls one, in progress or unfinished."""

from collections.abc import Callable
from dataclasses import dataclass

from broker_server.rounds.reporting import Listener, Reporter
from broker_server.rounds.stopping import ASKED, OperatorWish
from broker_server.service.control import Control, ServerRequested, config_of
from broker_server.service.control_socket import LocalRequest
from broker_server.service.prediction_requests import Answer
from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store
from fleet_protocol import control, requests
from fleet_protocol.errors import ConfigError, ShoalError
from fleet_protocol.transport import Received


@dataclass(frozen=True)
class RequestedRun:
    """A run that a client has requested.

    Attributes:
        config: configuration of the run.
        request: id of the request.
        answer: sends an answer to the client.
        followed: whether the client follows the run over MQTT.
    """

    config: FleetConfig
    request: str
    answer: Answer
    followed: bool

    def reject(self, error: ShoalError) -> None:
        """Answer that the run cannot begin."""
        _reject(self.request, error, self.answer)


@dataclass
class ServerRequests:
    """Handles the requests that `Control` forwards.

    Attributes:
        fleet: name of the fleet.
        store: the server's store.
        control: receives the requests.
        own: the server's own configuration, which a request over MQTT may change; None if it has
            none.
        emit: sends an event to the server's clients.
        resume: called when an unfinished run is to be tried again immediately.
    """

    fleet: str
    store: Store
    control: Control
    own: FleetConfig | None
    emit: Listener
    resume: Callable[[], None]

    def __post_init__(self) -> None:
        self._requested_run: RequestedRun | None = None

    def handle(self, event: Received | LocalRequest) -> None:
        """Handle a request while no run is in progress.

        A run does not begin here, see `pop_run`: the request is not to blame for a run's error.
        """
        # A requested run begins when this method has returned.
        self.control.handle(event, self._carry_out)

    def pop_run(self) -> RequestedRun | None:
        """Return the run that the last message requested, if any, which begins now."""
        requested = self._requested_run
        self._requested_run = None
        return requested

    def handle_in_run(
        self, event: Received | LocalRequest, reporter: Reporter, operator: OperatorWish
    ) -> None:
        """Handle a request while a run is in progress: it can be controlled, and no other begins.

        Args:
            event: the request.
            reporter: reports the run.
            operator: the operator's wishes for the run; changed here.
        """
        self.control.handle(
            event, lambda request, answer: self._steer(request, answer, reporter, operator)
        )

    def _carry_out(self, request: ServerRequested, answer: Answer) -> None:
        try:
            if request.fleet != self.fleet:
                raise ConfigError(
                    f"this server has fleet {self.fleet}, but the request is for {request.fleet}"
                )
            if isinstance(request, requests.SteerRequest):
                self._steer_unfinished(request)
                return
            # All errors of the message itself are found here.
            self._requested_run = RequestedRun(
                config_of(request, self.store, self.own),
                request.request,
                answer,
                followed=isinstance(request, requests.RunRequest),
            )
        except ShoalError as error:
            _reject(request.request, error, answer)

    def _steer_unfinished(self, request: requests.SteerRequest) -> None:
        """End an unfinished run that cannot resume, or try it again immediately."""
        # A run that cannot resume is not in memory: its state is that of the store.
        record = self.store.unfinished(self.fleet)
        if record is None or not record.is_meant_by(request.run):
            raise ConfigError("no run is in progress; see `shoal runs`")
        if request.wish == "pause":  # it is held already, because it cannot resume
            raise ConfigError(
                f"run {record.id} cannot resume, so it is held; `shoal log` gives the "
                "reason, and `shoal stop` ends it"
            )
        if request.wish == "go":
            self.resume()
        else:
            self.store.end_run(record.id, "stopped", "the run was stopped by its operator")
        self.store.log("run-steered", ASKED + request.wish, run=record.id)
        steered = control.RunSteered(
            run=record.id, seconds=0.0, request=request.request, wish=request.wish
        )
        self.emit(steered)

    def _steer(
        self, request: ServerRequested, answer: Answer, reporter: Reporter, operator: OperatorWish
    ) -> None:
        if request.fleet != self.fleet or not isinstance(request, requests.SteerRequest):
            detail = (
                "another run is in progress; wait for it, watch it (`shoal status`), or end "
                "it (`shoal stop`)"
            )
            _reject(request.request, ConfigError(detail), answer)
            return
        # A request that was meant for an earlier run must not end this one.
        record = self.store.run(reporter.run)
        if record is None or not record.is_meant_by(request.run):
            detail = f"run {request.run} is not in progress; run {reporter.run} is"
            _reject(request.request, ConfigError(detail), answer)
            return
        # The coordinator reads it between its steps.
        operator.wish = request.wish
        steered = control.RunSteered(**reporter.stamp, request=request.request, wish=request.wish)
        # Stored before it is announced, so that a restarted server obeys it.
        stored = None if request.wish == "go" else ASKED + request.wish
        self.store.record_request(reporter.run, stored)
        reporter.emit(steered, ASKED + request.wish)


def _reject(request: str, error: ShoalError, answer: Answer) -> None:
    rejected = control.RunRejected(request=request, detail=str(error), exit_code=error.exit_code)
    answer(rejected)
