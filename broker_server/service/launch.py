"""Runs and servers for the command line, the demo and tests: what `shoal up` and `shoal run` do.

    finished = run_fleet(load_config(path, FleetConfig).resolved(path.parent), listener=show)

The server that is running on the configured broker does the run; if there is none, everything is
hosted here for as long as the run takes.
"""

import contextlib
import logging
import queue
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from broker_server.rounds.reporting import Listener
from broker_server.service.broker import accepts_connections
from broker_server.service.following import (
    Follower,
    Notify,
    RunRejectedError,
    read_event,
    read_status,
)
from broker_server.service.local_requests import AnotherRun, OwnRun
from broker_server.service.membership import broker_address, member_of
from broker_server.service.other_servers import is_other_server, place_of
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
from fleet_protocol.errors import ConfigError, TransportError
from fleet_protocol.frozen import FrozenModel, problems
from fleet_protocol.identity.member import Member
from fleet_protocol.messages import MESSAGE_LIMIT_BYTES, Ask, Predicted, ServerStatus
from fleet_protocol.signals import on_signals
from fleet_protocol.topics import Topics, check_name
from fleet_protocol.transport import BrokerAddress, Event

_LOG = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
GRACE_SECONDS = 5.0  # in which the server reports what happened to a request whose time is over


def server_status(
    address: BrokerAddress,
    fleet: str,
    *,
    connect_seconds: float = 5.0,
    member: Member | None = None,
) -> ServerStatus | None:
    """Return the last status of a fleet's server; None if it never had one.

    Raises:
        TransportError: the broker cannot be reached.
    """
    topics = Topics(fleet)
    with visiting(address, fleet, connect_seconds, member) as (link, inbox):
        link.subscribe(topics.server_status)
        deadline = time.monotonic() + PROBE_SECONDS
        for event in _events_until(inbox, deadline):
            status = read_status(event, topics)
            if status is not None:
                return status
    return None


def _events_until(inbox: Inbox, deadline: float) -> Iterator[Event]:
    """Yield the events that arrive until a ``time.monotonic()``."""
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


def submit(
    config: FleetConfig, *, listener: Listener | None = None, notify: Notify = _LOG.warning
) -> control.RunFinished:
    """Request a run from the running server, and follow it to its end.

    If a server on this computer uses the configuration's store, it does the run with this
    configuration, provided that it can read all of its paths. A server elsewhere runs its own
    configuration, see `RequestedSettings`.

    Args:
        config: configuration with absolute paths.
        listener: receives every event of the run.
        notify: receives a line when the server disconnects, and when it is back.

    Raises:
        RunRejectedError: the server refused it.
        TransportError: the server does not answer, or went offline.
    """
    name = _new_name()
    here = OwnRun(request=name, fleet=config.fleet, config=config.model_dump_json())
    # A server elsewhere opens no path of this computer, so only settings are sent.
    wanted = RequestedSettings.from_config(config)
    elsewhere = requests.RunRequest(
        request=name,
        fleet=config.fleet,
        settings=wanted.settings,
        others=wanted.others,
        name=config.run_name,
    )
    with asked(config, here, elsewhere) as inbox:
        follower = Follower(Topics(config.fleet), name, listener or (lambda _event: None), notify)
        return follower.follow(inbox)


def steer(home: Place, wish: requests.Wanted, run: str = "") -> str:
    """Request that a fleet's server pauses, stops or resumes a run, or starts a run like it.

    Args:
        home: where the server is.
        wish: what to do; only a server on this computer starts another run.
        run: the run's name, or the beginning of its id; empty for the run in progress or, to start
            another run, for the newest.

    Returns:
        The run's id.

    Raises:
        ConfigError: no run can have this name or id.
        RunRejectedError: the run is not in progress, or another one is.
        TransportError: there is no broker, or no server.
    """
    if run:
        check_name("run", run)
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
        ConfigError: the board, or the server for it, refuses within the time limit; the message
            names the reason.
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
            f"the request for predictions is not valid: {problems(error, 'the request')}"
        ) from error
    # Refused here, with a reason: a broker drops a message that is too long, or the connection.
    size = len(ask.to_bytes())
    if size > MESSAGE_LIMIT_BYTES:
        raise ConfigError(
            f"oversized: the request has {size} bytes, and the limit is {MESSAGE_LIMIT_BYTES};"
            " send fewer samples"
        )
    predicted: Predicted = _answer(home, ask, ask, ask.task, seconds + GRACE_SECONDS)
    if predicted.reason is not None:
        raise ConfigError(
            f"{device} makes no predictions, {predicted.reason.value}: {predicted.detail}"
        )
    return predicted


def _answer(
    home: Place,
    here: FrozenModel,
    elsewhere: FrozenModel | None,
    name: str,
    seconds: float,
) -> Any:
    """Return a server's answer to a request.

    Args:
        home: where the server is.
        here: the request for a server on this computer.
        elsewhere: the request for another server; None if only one on this computer may receive it.
        name: id of the request.
        seconds: how long to wait.

    Raises:
        TransportError: it does not answer in time.
    """
    give_up = time.monotonic() + seconds
    topics = Topics(home.fleet)
    with asked(home, here, elsewhere) as inbox:
        for event in _events_until(inbox, give_up):
            answer = read_event(event, topics)
            names = {getattr(answer, "request", None), getattr(answer, "task", None)}
            if answer is not None and name in names:
                return answer
    raise TransportError(
        f"no server of fleet {home.fleet} answers; is `shoal up` or `shoal run` running?"
    )


def run_fleet(
    config: FleetConfig, *, listener: Listener | None = None, notify: Notify = _LOG.warning
) -> control.RunFinished:
    """Do one run on the running server, or on one that is hosted here for it.

    Args:
        config: configuration with absolute paths.
        listener: receives every event of the run.
        notify: receives a line when a running server disconnects, and when it is back.

    Returns:
        How it ended; its ``exit_code`` is the command line's.

    Raises:
        ShoalError: it could not begin.
    """
    # First: a server that is running here owns the store, whatever the broker is.
    if is_here(config):
        return submit(config, listener=listener, notify=notify)
    status = _other_server(config.fleet, config.store, config.broker)
    if status is not None:
        try:
            return submit(config, listener=listener, notify=notify)
        except RunRejectedError as error:
            # A user who wanted a separate server must learn that the fleet already has one.
            raise RunRejectedError(
                f"{_describe_other(status, config.broker)}, and {error}. If you want a server for "
                f"{config.store}, stop that one, or choose another `fleet` or [broker]",
                error.exit_code,
            ) from error
    with (
        Server(config.fleet, config.store, config.broker, own=config, listener=listener) as server,
        on_signals(server.stop),
    ):
        return server.run(config)


def _other_server(fleet: str, store: Path, broker: BrokerConfig) -> ServerStatus | None:
    """Return the status of another server of the fleet that is up; None if there is none.

    Raises:
        TransportError: a broker that the server does not start cannot be reached.
    """
    address = broker_address(broker)
    member = member_of(broker, fleet)
    status: ServerStatus | None = None
    if not broker.hosted:
        wait = broker.connect_timeout_seconds
        status = server_status(address, fleet, connect_seconds=wait, member=member)
    elif accepts_connections(address.host, address.port):
        # A broker that answers where this server would start one belongs to a server that is up.
        with contextlib.suppress(TransportError):
            status = server_status(address, fleet, connect_seconds=PROBE_SECONDS, member=member)
    # A status that a killed server left at the broker does not mean that it is running.
    return status if is_other_server(status, store) else None


def _describe_other(status: ServerStatus, broker: BrokerConfig) -> str:
    """Describe the server that a fleet already has."""
    return (
        f"fleet {status.fleet} already has a server on {broker_address(broker)}, store "
        f"{place_of(status)}"
    )


def serve_fleet(  # noqa: PLR0913  (options by keyword)
    fleet: str,
    store: Path,
    broker: BrokerConfig,
    *,
    own: FleetConfig | None = None,
    listener: Listener | None = None,
    on_ready: Callable[[Server], None] | None = None,
) -> None:
    """Run the server of a fleet until SIGTERM or SIGINT.

    Args:
        fleet: name of the fleet.
        store: folder of its store.
        broker: the broker's settings.
        own: the configuration of runs that are requested over MQTT; with None the server accepts no
            such runs.
        listener: receives every event of every run.
        on_ready: called once when the server can receive messages from devices and requests.

    Raises:
        TransportError: the broker cannot be reached, or another server has this fleet.
        ConfigError: the broker's address is malformed, or the embedded broker is not installed.
    """
    status = _other_server(fleet, store, broker)
    if status is not None:
        raise TransportError(
            f"{_describe_other(status, broker)}; give it runs with `shoal run`, stop it "
            "first, or choose another fleet name. If its computer is gone for good, and the "
            "broker did not notice, delete its status from the broker: mosquitto_pub -r -n "
            f"-t {Topics(fleet).server_status}"
        )
    with (
        Server(fleet, store, broker, own=own, listener=listener) as server,
        on_signals(server.stop),
    ):
        if on_ready is not None:
            on_ready(server)
        server.serve()
