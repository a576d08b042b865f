"""What `shoal up` and `shoal run` do, for whoever calls them: the command line, the demo, a test.

    finished = run_fleet(load_config(path, FleetConfig).resolved(path.parent), listener=show)

A run is given to the server that is already up on the configured broker; if there is none,
everything is hosted here for as long as the run takes.
"""

import contextlib
import queue
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from broker_server.rounds.reporting import Listener
from broker_server.service.alone import another
from broker_server.service.local_requests import AnotherRun, OwnRun
from broker_server.service.membership import broker_address, member_of
from broker_server.service.server import Server
from broker_server.service.visiting import (
    ANSWER_SECONDS,
    Inbox,
    Place,
    asked,
    is_here,
    visiting,
)
from broker_server.settings.fleet import BrokerConfig, FleetConfig
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
ACCEPT_SECONDS = (
    60.0  # the server reads artifacts and the test set before it says that the run has started
)
AWAY_SECONDS = 60.0
GRACE_SECONDS = 5.0  # in which the server says what has become of a request whose time is over
LOOK_SECONDS = 1.0


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
    """What a fleet's server last said about itself, None if none ever did.

    A TransportError without its broker.
    """
    topics = Topics(fleet)
    with visiting(address, fleet, connect_seconds, member) as (link, inbox):
        link.subscribe(topics.server_status)
        deadline = time.monotonic() + PROBE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                status = _read_status(inbox.get(timeout=left), topics)
                if status is not None:
                    return status
    return None


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
    wanted = RequestedSettings.from_config(config)
    elsewhere = requests.RunRequest(
        request=name, fleet=config.fleet, settings=wanted.settings, others=wanted.others
    )
    with asked(config, here, elsewhere) as inbox:
        return _follow(inbox, Topics(config.fleet), name, listener or (lambda _event: None))


def _follow(inbox: Inbox, topics: Topics, request: str, listener: Listener) -> control.RunFinished:
    """Wait for the end of a run; as long as its server is there that may take any time."""
    run: str | None = None
    give_up: float | None = time.monotonic() + ACCEPT_SECONDS
    while True:
        try:
            event = inbox.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            if give_up is not None and time.monotonic() >= give_up:
                what = "did not begin the run" if run is None else "has been away for too long"
                raise TransportError(
                    f"the server of fleet {topics.fleet} {what}; look at `shoal log`"
                ) from None
            continue
        told = _told(event, topics)
        if isinstance(told, control.RunRejected) and told.request == request:
            raise RunRejectedError(
                f"the server did not take the run: {told.detail}", told.exit_code
            )
        if isinstance(told, control.RunStarted) and told.request == request:
            run = told.run
        if run is None or (told is not None and getattr(told, "run", None) != run):
            continue
        status = _read_status(event, topics)
        if isinstance(event, Disconnected) or (
            status is not None and (not status.online or status.run != run)
        ):
            give_up = give_up or time.monotonic() + AWAY_SECONDS
        elif status is not None or told is not None:
            give_up = None
        if told is not None:
            listener(told)
            if isinstance(told, control.RunFinished):
                return told


def steer(home: Place, wish: requests.Wanted, run: str = "") -> str:
    """Request that a fleet's server pauses, stops or resumes a run, or begins another like it.

    Return the run's id.

    The run is named by the beginning of its id; empty means the run in progress, or the newest when
    another begins. Only a server on this computer begins another run.

    Raises:
        RunRejectedError: no such run is in progress, or another is.
        TransportError: there is no broker, or no server.
    """
    name = _new_name()
    if wish == "start":
        told = _answer(
            home,
            AnotherRun(request=name, fleet=home.fleet, run=run),
            None,
            name,
            ANSWER_SECONDS,
        )
    else:
        request = requests.SteerRequest(request=name, fleet=home.fleet, run=run, wish=wish)
        told = _answer(home, request, request, name, ANSWER_SECONDS)
    if isinstance(told, control.RunRejected):
        raise RunRejectedError(told.detail, told.exit_code)
    return str(told.run)


def predict(home: Place, device: str, samples: JsonValue, seconds: float = 30.0) -> Predicted:
    """Request predictions from a board's model, see `device_runtime.predictions.requests`.

    The server forwards the samples.

    Raises:
        ConfigError: the board, or the server in its place, refuses in so many seconds, with the
            reason's name.
        TransportError: there is no broker, or no server.
    """
    try:
        given = {
            "fleet": home.fleet,
            "device": device,
            "asked": samples,
            "seconds": seconds,
        }
        ask = Ask.model_validate({"task": f"p{secrets.token_hex(8)}", **given})
    except ValidationError as error:
        raise ConfigError(
            f"no request for predictions: {problems(error, 'the request')}"
        ) from error
    if (size := len(ask.to_bytes())) > MESSAGE_LIMIT_BYTES:
        raise ConfigError(
            f"oversized: the request has {size} bytes of at most {MESSAGE_LIMIT_BYTES}; ask for less"
        )
    told: Predicted = _answer(home, ask, ask, ask.task, seconds + GRACE_SECONDS)
    if told.reason is not None:
        raise ConfigError(f"{device} predicts nothing, {told.reason.value}: {told.detail}")
    return told


def _answer(
    home: Place,
    here: FrozenModel,
    elsewhere: FrozenModel | None,
    name: str,
    seconds: float,
) -> Any:
    """What a server answers to a request, by its name; a TransportError where that is nothing."""
    give_up = time.monotonic() + seconds
    with asked(home, here, elsewhere) as inbox:
        while (left := give_up - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                told = _told(inbox.get(timeout=left), Topics(home.fleet))
                if told is not None and name in {
                    getattr(told, "request", None),
                    getattr(told, "task", None),
                }:
                    return told
    raise TransportError(
        f"no server of fleet {home.fleet} answers; is `shoal up` or `shoal run` running?"
    )


def _told(event: Event, topics: Topics) -> control.RunEvent | None:
    if isinstance(event, Received) and event.topic == topics.server_events:
        with contextlib.suppress(RefusedError):
            return control.parse_run_event(event.payload)
    return None


def run_fleet(config: FleetConfig, *, listener: Listener | None = None) -> control.RunFinished:
    """Do one run, and say how it ended: on the server that is up, or hosted here.

    Paths are absolute.

    Its ``exit_code`` is the command line's. That it could not begin is a ShoalError.
    """
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
    if another(status, config.store):
        return submit(config, listener=listener)
    with (
        Server(config.fleet, config.store, config.broker, own=config, listener=listener) as server,
        on_signals(server.stop),
    ):
        return server.run(config)


def serve_fleet(
    fleet: str,
    store: Path,
    broker: BrokerConfig,
    *,
    own: FleetConfig | None = None,
    listener: Listener | None = None,
    on_ready: Callable[[Server], None] | None = None,
) -> None:
    """Be the server of a fleet until SIGTERM or SIGINT.

    `on_ready` is called once when devices and requests can come.

    `own` is the configuration of runs that are requested over MQTT; with None the server accepts no
    such runs.

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
        if status is not None and another(status, store):
            raise TransportError(
                f"fleet {fleet} already has a server on {broker_address(broker)}, store {status.store or 'unknown'}; "
                "give it runs with `shoal run`, stop it first, or choose another fleet name. If its computer is gone "
                "for good, and the broker did not notice, let the broker forget what it said: mosquitto_pub -r -n -t "
                f"{Topics(fleet).server_status}"
            )
    with (
        Server(fleet, store, broker, own=own, listener=listener) as server,
        on_signals(server.stop),
    ):
        if on_ready is not None:
            on_ready(server)
        server.serve()
