"""The server of a fleet: it owns the broker (if embedded), the connection, the store, and the run
in progress.

    with Server(config.fleet, config.store, config.broker, listener=print) as server:
        finished = server.run(config)          # one run, in this process

    with Server("lab", Path("runs/lab"), BrokerConfig()) as server:
        server.serve()                         # `shoal up`: runs are asked for over MQTT, until `server.stop()`

A run that was cut short is continued by the next server on the same store.
"""

import contextlib
import logging
import math
import queue
import secrets
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import Self

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.coordinator import Coordinator
from broker_server.rounds.dispatch import Services
from broker_server.rounds.evaluators import Evaluators, open_test_sets
from broker_server.rounds.fleet import Fleet
from broker_server.rounds.new_version import first_version
from broker_server.rounds.reporting import Listener, Reporter
from broker_server.rounds.run_context import RunContext, new_run_id, prepare_run
from broker_server.rounds.stopping import ASKED, OperatorWish, StopRequested
from broker_server.service.asking import Answer, Asking
from broker_server.service.between_runs import BetweenRuns
from broker_server.service.blob_service import BlobService, chunk_bytes_for
from broker_server.service.broker import ChildBroker
from broker_server.service.clock import Clock
from broker_server.service.connection import Connection, RunParts, Stop
from broker_server.service.control import (
    Control,
    ServerRequested,
    config_of,
    is_open,
    say_started,
)
from broker_server.service.control_socket import ControlSocket, LocalRequest
from broker_server.service.data_findings import note_undescribed
from broker_server.service.dispatcher import MqttDispatcher
from broker_server.service.inbox import Inbox
from broker_server.service.limits import Limits
from broker_server.service.membership import (
    broker_address,
    hosted_broker,
    member_of,
    why_unsealed,
)
from broker_server.service.outbox import Outbox
from broker_server.service.partial_uploads import PartialUploads
from broker_server.service.receiver import Begin
from broker_server.service.receivers import Receivers
from broker_server.service.rollout import Carrier
from broker_server.service.routing import Router
from broker_server.service.trusted import note_nameless, trusted_config, what_differs
from broker_server.service.uploads import Uploads
from broker_server.settings.fleet import BrokerConfig, FleetConfig
from broker_server.store import RunRecord, Store
from broker_server.store.backup import remove_leftovers
from broker_server.store.machine import FINAL
from broker_server.store.update_store import UpdateStore
from fleet_protocol import control, requests
from fleet_protocol.allocator import server_memory
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import DEFAULT_CHUNK_BYTES
from fleet_protocol.errors import ConfigError, ShoalError, StorageError
from fleet_protocol.locks import held
from fleet_protocol.messages import ServerStatus
from fleet_protocol.private_folders import make_private_folder
from fleet_protocol.topics import Topics
from fleet_protocol.transport import (
    Connected,
    Disconnected,
    Farewell,
    Received,
    Rejected,
    Transport,
    open_transport,
)

_LOG = logging.getLogger(__name__)

RETRY_SECONDS = 10.0  # between attempts to go on with a run whose store or broker was not there
QUIET_SECONDS = 0.5  # without a message, after which what waits is written to the store
SESSION_SECONDS = (
    60  # longer than a broken connection lasts, short enough not to queue much for a dead server
)


@dataclass(frozen=True)
class _RequestedRun:
    """A run that a client has requested.

    `followed` says whether the client follows it over MQTT.
    """

    config: FleetConfig
    request: str
    answer: Answer
    followed: bool


def _reject(request: str, error: ShoalError, answer: Answer) -> None:
    rejected = control.RunRejected(request=request, detail=str(error), exit_code=error.exit_code)
    answer(rejected)


class Server:
    """A server, from entering to leaving the ``with`` block.

    Args:
        fleet: name of the fleet.
        store: folder of its store.
        broker: the broker's settings.
        own: the configuration of runs that are requested over MQTT; with None the server accepts no
            such runs.
        listener: receives every event of every run, in the server's thread.

    Raises:
        ConfigError: the broker's address is malformed.
    """

    def __init__(
        self,
        fleet: str,
        store: Path,
        broker: BrokerConfig,
        *,
        own: FleetConfig | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.fleet = fleet
        self._own = own
        self.address = broker_address(broker)
        self._member = member_of(broker, fleet)
        self._carrier = None
        if self._member is not None and broker.identity is not None:
            self._carrier = Carrier(
                broker.identity.parent, self._member.papers, self._member.members
            )
            self._member = replace(self._member, papers=self._carrier.papers)
        self._folder = store
        self._broker_config = broker
        self._listener = listener
        self._topics = Topics(fleet)
        self._inbox = Inbox()
        self._stopping = threading.Event()
        self._resume_at = math.inf
        self._requested_run: _RequestedRun | None = None
        self._stack = contextlib.ExitStack()
        self._broker: ChildBroker | None = None
        self.receivers: Receivers | None = None

    # Life.

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(server_memory())
            taken = f"another server works on the store {self._folder}: stop it, or give this one a `store` of its own"
            for folder in (
                self._folder,
                self._folder / "blobs",
                self._folder / "updates",
            ):
                make_private_folder(folder)
            stack.enter_context(held(self._folder, taken))
            self._store = stack.enter_context(contextlib.closing(Store(self._folder)))
            self._blobs = BlobStore(self._folder / "blobs")
            remove_leftovers(self._store, self._folder)
            note_nameless(self._store, self.fleet)
            self._updates = stack.enter_context(
                contextlib.closing(UpdateStore(self._folder / "updates"))
            )
            self._broker = hosted_broker(self._broker_config, self.fleet, self._folder / "broker")
            stack.enter_context(self._broker or contextlib.nullcontext())
            self._known = Fleet(self._store.known_devices(self.fleet))
            self._link = self._connect()
            stack.callback(self._link.close, farewell=self._farewell())
            its = self._topics
            for each in (
                its.status("+"),
                its.profile("+"),
                its.reply("+"),
                its.server_control,
                its.server_status,
            ):
                self._link.subscribe(each)
            if self._broker_config.receivers:
                begin = Begin(
                    fleet=self.fleet,
                    store=self._folder.resolve(),
                    broker=self._broker_config,
                )
                self.receivers = stack.enter_context(Receivers(begin, self._inbox))
            else:
                self._link.subscribe(its.upload("+", "+"))
            at_hand = stack.enter_context(ControlSocket(self._folder, self._inbox.put))
            self._outbox = Outbox(self._link, self._topics, self._folder, also=at_hand.greet_with)
            self._releases = BlobService(self._link, self._topics, DEFAULT_CHUNK_BYTES)
            self._asking = Asking(self._known, self._outbox)
            limits = Limits(self._known.knows)
            self._between = BetweenRuns(
                self._topics,
                self._known,
                self._store,
                self._releases,
                self._asking,
                self._outbox,
            )
            handlers = self._between.handlers(self._handle_request)
            self._router = Router(self._topics, limits, self._known.knows, handlers)
            by_mqtt = is_open(self._broker_config)
            self._control = Control(
                self._asking, self._outbox, at_hand, by_mqtt, self._between.count
            )
            heard = self._link, self._topics, self._outbox, self._inbox
            self._connection = Connection(
                *heard, limits, self._asking, self._stopping, self._carry, self._revive_broker
            )
            self._outbox.status(None)
            if (why := why_unsealed(self._broker_config)) is not None:
                self._store.log("unsealed", why)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _farewell(self) -> Farewell:
        return Farewell(
            self._topics.server_status,
            ServerStatus(fleet=self.fleet, online=False).to_bytes(),
        )

    def _connect(self) -> Transport:
        link = open_transport(
            self.address,
            # A session of its own for every start: a broker that still knows an earlier one need
            # not repeat retained messages, and what it queued for a dead server is repeated by the
            # devices anyway.
            f"shoal-{self.fleet}-server-{secrets.token_hex(4)}",
            self._inbox,
            will=self._farewell(),
            session_expiry_seconds=SESSION_SECONDS,
            member=self._member,
        )
        link.connect(self._broker_config.connect_timeout_seconds)
        return link

    def stop(self, _signal: object = None) -> None:
        """End `run` or `serve` soon; may be called from another thread, and by `on_signals`."""
        self._stopping.set()
        self._inbox.put(Stop())

    # Runs.

    def run(self, config: FleetConfig) -> control.RunFinished:
        """Do one run, or go on with the one of the same configuration that was cut short.

        Args:
            config: with absolute paths; its store and broker are this server's.

        Returns:
            How it ended; ``stopped`` if `stop` was called, and then the next server goes on with
            it.

        Raises:
            ShoalError: the run cannot begin: wrong configuration, missing artifacts or test set.
        """
        return self._begin(config, None, followed=False)

    def _begin(
        self, config: FleetConfig, request: str | None, *, followed: bool
    ) -> control.RunFinished:
        """Do the same as `run`, for a request, if any, and for a client that may follow it over
        MQTT.
        """
        if config.fleet != self.fleet:
            raise ConfigError(
                f"the configuration is of fleet {config.fleet}, this server has fleet {self.fleet}"
            )
        unfinished = self._store.unfinished(self.fleet)
        changed = "" if unfinished is None else what_differs(config, unfinished.config)
        if unfinished is not None and not changed:
            return self._go_on(unfinished, config.with_stored_contract(unfinished.config), request)
        self._control.followed = followed
        context, evaluators = self._prepare(new_run_id(), config)
        if unfinished is not None:
            why = f"run {context.run} started again from the beginning, with other settings: {changed}"
            _LOG.warning(
                "run %s ends unfinished: %s; `shoal export-weights` has what it learnt",
                unfinished.id,
                why,
            )
            self._store.end_run(unfinished.id, "stopped", why)
        self._store.add_run(context.begun(), first_version(context, self._blobs))
        return self._work(context, evaluators, request)

    def resume(self) -> control.RunFinished | None:
        """Go on with a run that an earlier server left unfinished.

        Returns:
            How it ended, None if there is none.

        Raises:
            ShoalError: it cannot go on.
        """
        unfinished = self._store.unfinished(self.fleet)
        if unfinished is None:
            return None
        return self._go_on(unfinished, trusted_config(self._store, unfinished, self._own), None)

    def _go_on(
        self, record: RunRecord, config: FleetConfig, request: str | None
    ) -> control.RunFinished:
        self._control.followed = self._control.open
        context, evaluators = self._prepare(record.id, config)
        self._store.record_config(record.id, context.begun().config)  # the folder may have moved
        return self._work(context, evaluators, request)

    def _prepare(self, run: str, config: FleetConfig) -> tuple[RunContext, Evaluators]:
        here = {"store": self._folder.resolve(), "broker": self._broker_config}
        config = config.model_copy(update=here)
        artifacts = load_artifacts(
            config.model.artifacts,
            config.model.arch,
            chunk_bytes=chunk_bytes_for(self._link, config.round.chunk_bytes),
            weights=config.model.weights,
        )
        context = prepare_run(run, config, artifacts)
        if self._carrier is not None:
            context = replace(context, sets=self._carrier.sets)
        return open_test_sets(context)

    def _work(
        self, context: RunContext, evaluators: Evaluators, request: str | None
    ) -> control.RunFinished:
        reporter = Reporter(context.run, self._store, self._tell)
        record = self._store.run(context.run)
        operator = OperatorWish.from_run(record)
        partial = PartialUploads(self._updates, self._blobs)
        clock = Clock(connected=self._link.connected)
        uploads = Uploads(self._store, partial, self._outbox, reporter, clock, self.receivers)
        blobs = BlobService(self._link, self._topics, context.config.round.chunk_bytes)
        blobs.serve(context.artifacts.files)
        dispatcher = MqttDispatcher(
            self._connection,
            RunParts(
                self._store,
                self._known,
                blobs,
                uploads,
                reporter,
                operator,
                clock,
                context.open_labels,
            ),
            nudge_seconds=context.config.round.nudge_seconds,
            on_control=lambda event: self._control.take(
                event,
                lambda request, answer: self._asked_meanwhile(request, answer, reporter, operator),
            ),
        )
        coordinator = Coordinator(
            context,
            Services(dispatcher, self._store, self._blobs, self._updates),
            evaluators,
        )
        last = self._store.last_round(context.run)
        if last is None or (
            last.state in FINAL
            and not self._store.late_tasks(context.run, last.number + 1, waiting=True)
        ):
            partial.clear()
        self._outbox.status(context.run)
        closed = self._store.version(context.run)
        say_started(context, reporter, request, closed.number if closed is not None else 0)
        note_undescribed(context.contracts, reporter)
        try:
            finished = coordinator.run()
        except StopRequested:
            return coordinator.stopped()
        else:
            if (
                finished.status == "stopped"
            ):  # not by an operator: its store or broker was not there
                self._resume_at = time.monotonic() + RETRY_SECONDS
            return finished
        finally:
            partial.close()
            self._outbox.status(None)

    def _carry(self, blobs: BlobService, run: str | None) -> None:
        self._asking.turn()
        if self._carrier is not None and self._carrier.turn(self._known, blobs, self._store):
            self._outbox.status(run)  # and with it what the operator says

    def _revive_broker(self) -> None:
        if self._broker is not None and not self._stopping.is_set() and self._broker.ensure():
            self._store.log(
                "broker-started",
                "the broker had ended, or the fleet has other members now",
            )

    # Requests.

    def serve(self) -> None:
        """Take run requests until `stop` is called.

        First goes on with a run that was left unfinished.

        Raises:
            StorageError: the server's disk is full.
        """
        self._resume_at = 0.0
        while not self._stopping.is_set():
            if time.monotonic() >= self._resume_at:
                self._try_to_resume()
            self._carry(self._releases, None)
            self._releases.flush(time.monotonic())
            try:
                event = self._inbox.get(timeout=QUIET_SECONDS)
            except queue.Empty:
                with contextlib.suppress(
                    StorageError
                ):  # it is written with the next commit that succeeds
                    self._store.flush()
                continue
            if isinstance(event, Stop):
                return
            if isinstance(event, Connected):
                self._outbox.status(None)
            elif isinstance(event, Disconnected):
                self._resume_at = 0.0
            elif isinstance(event, Rejected):
                self._between.refused(event.error)
            elif isinstance(event, Received | LocalRequest):
                self._router.route(event)
                self._begin_requested()

    def _try_to_resume(self) -> None:
        """Go on with a run that an earlier server left, or whose store or broker was not there for
        a while.
        """
        self._resume_at = math.inf
        try:
            self._revive_broker()
            self.resume()
        except (ShoalError, ConnectionError) as error:
            if isinstance(error, StorageError | ConnectionError):
                self._resume_at = time.monotonic() + RETRY_SECONDS
            _LOG.warning(why := f"cannot go on yet: {error}")
            with contextlib.suppress(StorageError):
                self._store.log("resume-failed", why)

    def _handle_request(self, event: Received | LocalRequest) -> None:
        self._control.take(event, self._requested)

    def _begin_requested(self) -> None:
        """Do the run that the last message asked for, if any.

        This is done outside of the message's handler: an error of a run is no fault of a message.
        """
        requested = self._requested_run
        self._requested_run = None
        if requested is None:
            return
        try:
            self._begin(requested.config, requested.request, followed=requested.followed)
        except ShoalError as error:
            _reject(requested.request, error, requested.answer)

    def _requested(self, request: ServerRequested, answer: Answer) -> None:
        try:
            if request.fleet != self.fleet:
                raise ConfigError(
                    f"this server has fleet {self.fleet}, the request is for {request.fleet}"
                )
            if isinstance(request, requests.SteerRequest):
                self._steer_unfinished(request)
            else:
                self._requested_run = _RequestedRun(
                    config_of(request, self._store, self._own),
                    request.request,
                    answer,
                    isinstance(request, requests.RunRequest),
                )
        except ShoalError as error:
            _reject(request.request, error, answer)

    def _steer_unfinished(self, request: requests.SteerRequest) -> None:
        """Do what an operator wants of a run that is not over and cannot go on: end it, or try
        again at once.
        """
        record = self._store.unfinished(self.fleet)
        if record is None or not record.id.startswith(request.run):
            raise ConfigError("no run is in progress; see `shoal runs`")
        if request.wish == "pause":
            raise ConfigError(
                f"run {record.id} cannot go on, so it holds; `shoal log` says why, `shoal stop` ends it"
            )
        if request.wish == "go":
            self._resume_at = 0.0
        else:
            self._store.end_run(record.id, "stopped", "the run was stopped by its operator")
        self._store.log("run-steered", ASKED + request.wish, run=record.id)
        self._tell(
            control.RunSteered(
                run=record.id, seconds=0.0, request=request.request, wish=request.wish
            )
        )

    def _asked_meanwhile(
        self,
        request: ServerRequested,
        answer: Answer,
        reporter: Reporter,
        operator: OperatorWish,
    ) -> None:
        """What a run in progress is asked for: to be steered, as no second one is taken."""
        if request.fleet != self.fleet or not isinstance(request, requests.SteerRequest):
            detail = "another run is in progress; wait for it, watch it (`shoal status`), or end it (`shoal stop`)"
        elif not reporter.run.startswith(request.run):
            detail = f"run {request.run} is not in progress, run {reporter.run} is"
        else:
            operator.wish = request.wish
            steered = control.RunSteered(
                **reporter.stamp, request=request.request, wish=request.wish
            )
            self._store.record_request(
                reporter.run, None if request.wish == "go" else ASKED + request.wish
            )
            reporter.emit(steered, ASKED + request.wish)
            return
        answer(
            control.RunRejected(
                request=request.request, detail=detail, exit_code=ConfigError.exit_code
            )
        )

    def _tell(self, event: control.RunEvent) -> None:
        """Send an event to the server's clients, then to the caller's display."""
        self._control.tell(event)
        if self._listener is not None:
            self._listener(event)
