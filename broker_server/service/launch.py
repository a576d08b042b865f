"""Runs and servers for the command line, the demo and tests: what `shoal up` and `shoal run` do.

    finished = run_fleet(load_config(path, FleetConfig).resolved(path.parent), listener=show)

A run is given to the server that is already up on the configured broker; if there is none,
everything is hosted here for as long as the run takes.
"""

import contextlib
import queue
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from broker_server.rounds.reporting import Listener
from broker_server.service.local_requests import AnotherRun, OwnRun
from broker_server.service.membership import broker_address, member_of
from broker_server.service.other_servers import is_other_server
from broker_server.service.server import Server
from broker_server.service.visiting import (
    ANSWER_SECONDS,
    Inbox,
    Place,
    asked,
    is_here,
    require_taken,
    visiting,
)
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.requested import RequestedSettings
from fleet_protocol import control, requests
from fleet_protocol.errors import ConfigError, RefusedError, ShoalError, TransportError
from fleet_protocol.frozen import FrozenModel, problems
from fleet_protocol.identity.member import Member
from fleet_protocol.messages import MESSAGE_LIMIT_BYTES, Ask, Predicted, ServerStatus
from fleet_protocol.signals import on_signals
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Disconnected, Event, Received

PROBE_SECONDS = 1.0
# until a run begins: the server reads artifacts and the test set before it says so
ACCEPT_SECONDS = 60.0
AWAY_SECONDS = 60.0  # for a server that is away to come back
GRACE_SECONDS = 5.0  # in which the server says what has become of a request whose time is over
LOOK_SECONDS = 1.0  # longest single wait


class RunRejectedError(ShoalError):
    """A running server did not take, or did not finish, a run."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def _read_status(event: Event, topics: Topics) -> ServerStatus | None:
    if isinstance(event, Received) and event.topic == topics.server_status and event.payload:
        with contextlib.suppress(ValidationError):
            return ServerStatus.model_validate_json(event.payload)
    return None


def server_status(
    address: BrokerAddress,
    fleet: str,
    *,
    connect_seconds: float = 5.0,
    member: Member | None = None,
) -> ServerStatus | None:
    """Return what a fleet's server last said about itself, None if none ever did.

    Raises:
        TransportError: the broker cannot be reached.
    """
    topics = Topics(fleet)
    with visiting(address, fleet, connect_seconds, member) as (link, inbox):
        link.subscribe(topics.server_status)
        deadline = time.monotonic() + PROBE_SECONDS
        for event in _events_until(inbox, deadline):
            status = _read_status(event, topics)
            if status is not None:
                return status
    return None


def _events_until(inbox: Inbox, deadline: float) -> Iterator[Event]:
    """Yield the events that come until a ``time.monotonic()``."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        try:
            event = inbox.get(timeout=left)
        except queue.Empty:
            return
        require_taken(event)
        yield event


def _new_name() -> str:
    return f"r{secrets.token_hex(8)}"


def submit(config: FleetConfig, *, listener: Listener | None = None) -> control.RunFinished:
    """Request a run from the running server, and follow it to its end.

    A server on this computer that works on the configuration's store does the run with this
    configuration, if it can read all of its paths. A server elsewhere does a run of its own
    configuration, see `RequestedSettings`.

    Raises:
        RunRejectedError: the server did not take it.
        TransportError: the server does not answer, or went away.
    """
    name = _new_name()
    here = OwnRun(request=name, fleet=config.fleet, config=config.model_dump_json())
    # A server elsewhere opens no path of this computer, so only settings travel.
    wanted = RequestedSettings.from_config(config)
    elsewhere = requests.RunRequest(
        request=name, fleet=config.fleet, settings=wanted.settings, others=wanted.others
    )
    with asked(config, here, elsewhere) as inbox:
        return _follow(inbox, Topics(config.fleet), name, listener or (lambda _event: None))


def _follow(inbox: Inbox, topics: Topics, request: str, listener: Listener) -> control.RunFinished:
    """Wait for the end of a run; while its server is there that may take any time."""
    follower = _Follower(topics, request, listener)
    while True:
        try:
            event = inbox.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            follower.require_patience()
            continue
        finished = follower.handle(event)
        if finished is not None:
            return finished


class _Follower:
    """Follows one requested run.

    Args:
        topics: of the fleet.
        request: id of the request.
        listener: receives every event of the run.
    """

    def __init__(self, topics: Topics, request: str, listener: Listener) -> None:
        self._topics = topics
        self._request = request
        self._listener = listener
        self._run: str | None = None  # its id, once it has begun
        # when to wait no longer; None while the server is there
        self._give_up: float | None = time.monotonic() + ACCEPT_SECONDS

    def require_patience(self) -> None:
        """Raise a TransportError if the run does not begin, or its server stays away."""
        if self._give_up is None or time.monotonic() < self._give_up:
            return
        what = "did not begin the run" if self._run is None else "has been away for too long"
        raise TransportError(
            f"the server of fleet {self._topics.fleet} {what}; look at `shoal log`"
        )

    def handle(self, event: Event) -> control.RunFinished | None:
        """Handle an event; return how the run ended, if it is the last."""
        require_taken(event)
        run_event = _read_event(event, self._topics)
        self._note_answer(run_event)
        if self._run is None:
            return None
        if run_event is None:
            self._note_presence(event)
            return None
        if getattr(run_event, "run", None) != self._run:
            return None
        self._give_up = None  # whoever reports the run is there
        # Only events of this run: the server may have done another one before.
        self._listener(run_event)
        return run_event if isinstance(run_event, control.RunFinished) else None

    def _note_answer(self, run_event: control.RunEvent | None) -> None:
        if isinstance(run_event, control.RunRejected) and run_event.request == self._request:
            detail = f"the server did not take the run: {run_event.detail}"
            raise RunRejectedError(detail, run_event.exit_code)
        if isinstance(run_event, control.RunStarted) and run_event.request == self._request:
            self._run = run_event.run

    def _note_presence(self, event: Event) -> None:
        """Note whether the server is there, and works on the run."""
        status = _read_status(event, self._topics)
        is_there = status is not None and status.online and status.run == self._run
        if isinstance(event, Disconnected) or (status is not None and not is_there):
            self._give_up = self._give_up or time.monotonic() + AWAY_SECONDS
        elif status is not None:
            self._give_up = None


def steer(home: Place, wish: requests.Wanted, run: str = "") -> str:
    """Request that a fleet's server pauses, stops or resumes a run, or begins another like it.

    Args:
        home: where the server is.
        wish: what to do; only a server on this computer begins another run.
        run: the beginning of the run's id; empty for the run in progress, or for the newest when
            another begins.

    Returns:
        The run's id.

    Raises:
        RunRejectedError: no such run is in progress, or another is.
        TransportError: there is no broker, or no server.
    """
    name = _new_name()
    here: FrozenModel
    elsewhere: FrozenModel | None
    if wish == "start":
        here = AnotherRun(request=name, fleet=home.fleet, run=run)
        elsewhere = None
    else:
        here = requests.SteerRequest(request=name, fleet=home.fleet, run=run, wish=wish)
        elsewhere = here
    answer = _answer(home, here, elsewhere, name, ANSWER_SECONDS)
    if isinstance(answer, control.RunRejected):
        raise RunRejectedError(answer.detail, answer.exit_code)
    return str(answer.run)


def predict(home: Place, device: str, samples: JsonValue, seconds: float = 30.0) -> Predicted:
    """Request predictions from a board's model, see `device_runtime.predictions.requests`.

    The server forwards the samples.

    Raises:
        ConfigError: the board, or the server in its place, refuses in so many seconds, with the
            reason's name.
        TransportError: there is no broker, or no server.
    """
    fields = {
        "task": f"p{secrets.token_hex(8)}",
        "fleet": home.fleet,
        "device": device,
        "asked": samples,
        "seconds": seconds,
    }
    try:
        ask = Ask.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(
            f"no request for predictions: {problems(error, 'the request')}"
        ) from error
    # Refused here, with a reason: a broker drops what is too long, or the connection.
    size = len(ask.to_bytes())
    if size > MESSAGE_LIMIT_BYTES:
        raise ConfigError(
            f"oversized: the request has {size} bytes of at most {MESSAGE_LIMIT_BYTES}; ask for "
            "less"
        )
    predicted: Predicted = _answer(home, ask, ask, ask.task, seconds + GRACE_SECONDS)
    if predicted.reason is not None:
        raise ConfigError(
            f"{device} predicts nothing, {predicted.reason.value}: {predicted.detail}"
        )
    return predicted


def _answer(
    home: Place,
    here: FrozenModel,
    elsewhere: FrozenModel | None,
    name: str,
    seconds: float,
) -> Any:
    """Return what a server answers to a request.

    Args:
        home: where the server is.
        here: the request for a server on this computer.
        elsewhere: the request for another; None if only one on this computer may get it.
        name: id of the request.
        seconds: how long to wait.

    Raises:
        TransportError: it answers nothing in time.
    """
    give_up = time.monotonic() + seconds
    topics = Topics(home.fleet)
    with asked(home, here, elsewhere) as inbox:
        for event in _events_until(inbox, give_up):
            answer = _read_event(event, topics)
            names = {getattr(answer, "request", None), getattr(answer, "task", None)}
            if answer is not None and name in names:
                return answer
    raise TransportError(
        f"no server of fleet {home.fleet} answers; is `shoal up` or `shoal run` running?"
    )


def _read_event(event: Event, topics: Topics) -> control.RunEvent | None:
    if isinstance(event, Received) and event.topic == topics.server_events:
        with contextlib.suppress(RefusedError):
            return control.parse_run_event(event.payload)
    return None


def run_fleet(config: FleetConfig, *, listener: Listener | None = None) -> control.RunFinished:
    """Do one run on the server that is up, or on one that is hosted here for it.

    Args:
        config: with absolute paths.
        listener: receives every event of the run.

    Returns:
        How it ended; its ``exit_code`` is the command line's.

    Raises:
        ShoalError: it could not begin.
    """
    # First: a server that is up here has the store, whatever the broker is.
    if is_here(config):
        return submit(config, listener=listener)
    address = broker_address(config.broker)
    member = member_of(config.broker, config.fleet)
    status: ServerStatus | None = None
    if not config.broker.hosted:
        wait = config.broker.connect_timeout_seconds
        status = server_status(address, config.fleet, connect_seconds=wait, member=member)
    else:
        # An embedded broker that answers belongs to a server that is up.
        with contextlib.suppress(TransportError):
            status = server_status(
                address, config.fleet, connect_seconds=PROBE_SECONDS, member=member
            )
    # A status that a killed server left with the broker is no server.
    if is_other_server(status, config.store):
        return submit(config, listener=listener)
    with (
        Server(config.fleet, config.store, config.broker, own=config, listener=listener) as server,
        on_signals(server.stop),
    ):
        return server.run(config)


def serve_fleet(  # noqa: PLR0913  (options by keyword)
    fleet: str,
    store: Path,
    broker: BrokerConfig,
    *,
    own: FleetConfig | None = None,
    listener: Listener | None = None,
    on_ready: Callable[[Server], None] | None = None,
) -> None:
    """Be the server of a fleet until SIGTERM or SIGINT.

    Args:
        fleet: name of the fleet.
        store: folder of its store.
        broker: the broker's settings.
        own: the configuration of runs that are requested over MQTT; with None the server accepts no
            such runs.
        listener: receives every event of every run.
        on_ready: called once when devices and requests can come.

    Raises:
        TransportError: the broker cannot be reached, or another server has this fleet.
        ConfigError: the broker's address is malformed, or the embedded broker is not installed.
    """
    if not broker.hosted:
        wait = broker.connect_timeout_seconds
        status = server_status(
            broker_address(broker),
            fleet,
            connect_seconds=wait,
            member=member_of(broker, fleet),
        )
        if status is not None and is_other_server(status, store):
            raise TransportError(
                f"fleet {fleet} already has a server on {broker_address(broker)}, store "
                f"{status.store or 'unknown'}; give it runs with `shoal run`, stop it first, or "
                "choose another fleet name. If its computer is gone for good, and the broker did "
                "not notice, let the broker forget what it said: mosquitto_pub -r -n -t "
                f"{Topics(fleet).server_status}"
            )
    with (
        Server(fleet, store, broker, own=own, listener=listener) as server,
        on_signals(server.stop),
    ):
        if on_ready is not None:
            on_ready(server)
        server.serve()
