"""The server of a fleet: it owns the hosted broker, the connection, the store and the run.

    with Server(config.fleet, config.store, config.broker, listener=print) as server:
        finished = server.run(config)          # one run, in this process

    with Server("lab", Path("runs/lab"), BrokerConfig()) as server:
        server.serve()                         # `shoal up`: requested runs, until `server.stop()`

The next server on the same store resumes an interrupted run.
"""

import contextlib
import logging
import math
import queue
import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path

from typing_extensions import Self

from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Listener
from broker_server.service.between_runs import BetweenRuns
from broker_server.service.blob_service import BlobService
from broker_server.service.broker import ChildBroker
from broker_server.service.broker_refusals import KIND, describe_refusal
from broker_server.service.connection import Connection, Stop
from broker_server.service.control import Control, is_open
from broker_server.service.control_socket import ControlSocket, LocalRequest
from broker_server.service.inbox import Inbox
from broker_server.service.introductions import Introductions
from broker_server.service.limits import Limits
from broker_server.service.membership import (
    broker_address,
    hosted_broker,
    member_of,
    membership_notices,
)
from broker_server.service.outbox import Outbox
from broker_server.service.prediction_requests import PredictionRequests
from broker_server.service.receiver_messages import ReceiverSettings
from broker_server.service.receivers import Receivers
from broker_server.service.rollout_service import RolloutService
from broker_server.service.routing import Router
from broker_server.service.runs import Runs, ServerResources
from broker_server.service.server_requests import ServerRequests
from broker_server.service.trusted import log_invalid_run_ids
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store
from broker_server.store.backup import remove_leftovers
from broker_server.store.links import refuse_links
from broker_server.store.update_store import UpdateStore
from fleet_protocol import control
from fleet_protocol.allocator import server_memory
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import DEFAULT_CHUNK_BYTES
from fleet_protocol.errors import ShoalError, StorageError
from fleet_protocol.locks import held
from fleet_protocol.messages import ServerStatus
from fleet_protocol.private_folders import make_private_folder
from fleet_protocol.topics import Topics
from fleet_protocol.transport import (
    Connected,
    Disconnected,
    Event,
    Farewell,
    Received,
    Refused,
    Rejected,
    Transport,
    open_transport,
)

_LOG = logging.getLogger(__name__)

QUIET_SECONDS = 0.5  # without a message, after which waiting data is written to the store
# longer than a broken connection lasts, short enough not to queue much for a dead server
SESSION_SECONDS = 60


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
        self.receivers: Receivers | None = None
        self.address = broker_address(broker)
        self._own = own
        self._member = member_of(broker, fleet)
        self._rollout = None
        if self._member is not None and broker.identity is not None:
            self._rollout = RolloutService(
                broker.identity.parent, self._member.papers, self._member.members
            )
            # The rollout adds to what the operator says, so its papers take the place of the
            # registry's.
            self._member = replace(self._member, papers=self._rollout.papers, saves_counters=True)
        self._folder = store
        self._broker_config = broker
        self._listener = listener
        self._topics = Topics(fleet)
        self._inbox = Inbox()
        self._stopping = threading.Event()
        self._stack = contextlib.ExitStack()
        self._broker: ChildBroker | None = None

    # Start and end.

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(server_memory())
            self._open_store(stack)
            self._broker = hosted_broker(self._broker_config, self.fleet, self._folder / "broker")
            stack.enter_context(self._broker or contextlib.nullcontext())
            # From the store, so that offline boards are known, too.
            self._devices = Fleet(self._store.known_devices(self.fleet))
            self._link = self._connect()
            # The farewell replaces the retained status; if the server is killed, the will does.
            stack.callback(self._link.close, farewell=self._farewell())
            self._subscribe(stack)
            self._open_services(stack)
            # Last, because clients take it as the sign that the server handles requests.
            self._outbox.publish_status(None)
            for kind, notice in membership_notices(self._broker_config):
                _LOG.warning(notice)
                self._store.log(kind, notice)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open_store(self, stack: contextlib.ExitStack) -> None:
        make_private_folder(self._folder)
        taken = (
            f"another server uses the store {self._folder}: stop it, or give this one its "
            "own `store`"
        )
        # Before anything in the folder is read or removed.
        stack.enter_context(held(self._folder, taken))
        refuse_links(self._folder)
        for name in ("blobs", "updates"):
            make_private_folder(self._folder / name)
        self._store = stack.enter_context(contextlib.closing(Store(self._folder)))
        self._blobs = BlobStore(self._folder / "blobs")
        remove_leftovers(self._store, self._folder)
        log_invalid_run_ids(self._store, self.fleet)
        updates = UpdateStore(self._folder / "updates")
        self._updates = stack.enter_context(contextlib.closing(updates))

    def _connect(self) -> Transport:
        link = open_transport(
            self.address,
            # A separate session for every start: a broker that still knows an earlier one need not
            # repeat retained messages, and the devices repeat what it queued for a dead server.
            f"shoal-{self.fleet}-server-{secrets.token_hex(4)}",
            self._inbox,
            will=self._farewell(),
            session_expiry_seconds=SESSION_SECONDS,
            member=self._member,
        )
        link.connect(self._broker_config.connect_timeout_seconds)
        return link

    def _farewell(self) -> Farewell:
        return Farewell(
            self._topics.server_status,
            ServerStatus(fleet=self.fleet, online=False).to_bytes(),
        )

    def _subscribe(self, stack: contextlib.ExitStack) -> None:
        """Subscribe to everything that the server handles; receivers, if any, handle the chunks."""
        topics = self._topics
        self._link.subscribe(topics.status("+"))
        self._link.subscribe(topics.profile("+"))
        self._link.subscribe(topics.reply("+"))
        self._link.subscribe(topics.server_control)
        self._link.subscribe(topics.server_status)
        if not self._broker_config.receivers:
            self._link.subscribe(topics.upload("+", "+"))
            return
        settings = ReceiverSettings(
            fleet=self.fleet,
            store=self._folder.resolve(),
            broker=self._broker_config,
        )
        self.receivers = stack.enter_context(Receivers(settings, self._inbox))

    def _open_services(self, stack: contextlib.ExitStack) -> None:
        """Build the message handlers, from the outbox up to the runs."""
        socket = stack.enter_context(ControlSocket(self._folder, self._inbox.put))
        self._outbox = Outbox(
            self._link,
            self._topics,
            self._folder,
            also=socket.greet_with,
            refused=self._inbox.put,
        )
        self._releases = BlobService(self._link, self._topics, DEFAULT_CHUNK_BYTES)
        members = None if self._member is None else self._member.members
        ask = self._outbox.ask_for_introduction
        self._introductions = Introductions(self._devices, members or (lambda: None), ask)
        self._predictions = PredictionRequests(self._devices, self._outbox)
        self._between = BetweenRuns(
            self._topics,
            self._devices,
            self._store,
            self._releases,
            self._predictions,
            self._outbox,
        )
        self._control = Control(
            self._predictions,
            self._outbox,
            socket,
            is_open(self._broker_config),
            self._between.count,
        )
        self._requests = ServerRequests(
            self.fleet, self._store, self._control, self._own, self._emit, self._resume_soon
        )
        connection = Connection(
            link=self._link,
            topics=self._topics,
            devices=self._devices,
            outbox=self._outbox,
            inbox=self._inbox,
            limits=Limits(self._devices.knows),
            predictions=self._predictions,
            stopping=self._stopping,
            do_periodic_work=self._do_periodic_work,
            revive_broker=self._revive_broker,
        )
        handlers = self._between.handlers(self._requests.handle)
        self._router = Router(self._topics, connection.limits, self._devices.knows, handlers)
        resources = ServerResources(
            self._store,
            self._blobs,
            self._updates,
            self._broker_config,
            connection,
            self.receivers,
            self._rollout,
        )
        self._runs = Runs(resources, self._requests, self._emit)

    def stop(self, _signal: object = None) -> None:
        """End `run` or `serve` soon; may be called from another thread, and by `on_signals`."""
        # The flag ends code that does not wait for the inbox; the event ends the wait for it.
        self._stopping.set()
        self._inbox.put(Stop())

    # Runs.

    def run(self, config: FleetConfig) -> control.RunFinished:
        """Do one run, or resume an interrupted one with the same configuration.

        Args:
            config: configuration with absolute paths; its store and broker are this server's.

        Returns:
            How it ended; ``stopped`` if `stop` was called, and then the next server resumes
            it.

        Raises:
            ShoalError: the run cannot begin: wrong configuration, missing artifacts or test set.
        """
        return self._runs.begin(config)

    def resume(self) -> control.RunFinished | None:
        """Resume a run that an earlier server left unfinished.

        Returns:
            How it ended; None if there is none.

        Raises:
            ShoalError: it cannot be resumed.
        """
        return self._runs.resume()

    def serve(self) -> None:
        """Accept requests until `stop` is called.

        An unfinished run is resumed first.

        Raises:
            StorageError: the server's disk is full.
        """
        self._resume_soon()
        while not self._stopping.is_set():
            if time.monotonic() >= self._runs.resume_at:
                self._try_to_resume()
            self._do_periodic_work(self._releases, None)
            # Boards that fetch a release are served between runs, too.
            self._releases.flush(time.monotonic())
            try:
                event = self._inbox.get(timeout=QUIET_SECONDS)
            except queue.Empty:
                # Rows that cannot be written now are written with the next commit that succeeds.
                with contextlib.suppress(StorageError):
                    self._store.flush()
                continue
            if isinstance(event, Stop):
                return
            self._handle(event)

    def _handle(self, event: Event | LocalRequest) -> None:
        """Handle an event while no run is in progress; begin the run that it requests."""
        if isinstance(event, Connected):
            self._outbox.publish_status(None)
        elif isinstance(event, Disconnected):
            self._resume_soon()  # which also restarts a hosted broker
        elif isinstance(event, Rejected):
            self._between.refused(event.error)
        elif isinstance(event, Refused):
            self._store.log(KIND, describe_refusal(event, self.address))
        elif isinstance(event, Received | LocalRequest):
            self._router.route(event)
            self._begin_requested()

    def _begin_requested(self) -> None:
        requested = self._requests.pop_run()
        if requested is None:
            return
        try:
            self._runs.begin(requested.config, requested.request, followed=requested.followed)
        except ShoalError as error:
            requested.reject(error)

    def _resume_soon(self) -> None:
        self._runs.resume_at = 0.0

    def _try_to_resume(self) -> None:
        """Resume a run that an earlier server left unfinished.

        This includes a run whose store or broker was unavailable for a while.
        """
        self._runs.resume_at = math.inf
        try:
            self._revive_broker()
            self._runs.resume()
        except (ShoalError, ConnectionError) as error:
            # A fault of the run itself stays; disk and broker come back.
            if isinstance(error, StorageError | ConnectionError):
                self._runs.retry_later()
            why = f"cannot resume yet: {error}"
            _LOG.warning(why)
            with contextlib.suppress(StorageError):
                self._store.log("resume-failed", why)

    # In a run and between runs.

    def _do_periodic_work(self, blobs: BlobService, run: str | None) -> None:
        """Answer overdue predictions, ask for lost profiles, and announce a changed rollout.

        Args:
            blobs: the current blob service.
            run: id of the run in progress, if any.
        """
        self._predictions.answer_overdue()
        self._introductions.follow(time.monotonic(), connected=self._link.connected)
        if self._rollout is not None and self._rollout.update(self._devices, blobs, self._store):
            self._outbox.publish_status(run)  # carries the operator's messages

    def _revive_broker(self) -> None:
        if self._broker is not None and not self._stopping.is_set() and self._broker.ensure():
            self._store.log(
                "broker-started",
                "the broker has been restarted, or an enrolment is no longer valid",
            )

    def _emit(self, event: control.RunEvent) -> None:
        """Send an event to the server's clients, then to the caller's display."""
        self._control.send_event(event)
        if self._listener is not None:
            self._listener(event)
