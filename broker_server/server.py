"""The server of a fleet: it owns the broker (if embedded), the connection, the store, and the run in progress.

    with Server(config.fleet, config.store, config.broker, listener=print) as server:
        finished = server.run(config)          # one run, in this process

    with Server("lab", Path("runs/lab"), BrokerConfig()) as server:
        server.serve()                         # `shoal up`: runs are asked for over MQTT, until `server.stop()`

A run that was cut short is continued by the next server on the same store.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from pathlib import Path

from pydantic import ValidationError
from typing_extensions import Self

from broker_server.artifacts import load_artifacts
from broker_server.blob_service import BlobService
from broker_server.broker import EmbeddedBroker
from broker_server.config import BrokerConfig, FleetConfig
from broker_server.coordinator import Coordinator, Services
from broker_server.desk import Desk, Stop, StopRequested
from broker_server.evaluation import Evaluator
from broker_server.fleet import Fleet
from broker_server.judging import open_evaluators
from broker_server.machine import FINAL
from broker_server.merging import first_version
from broker_server.planning import RunContext, prepare_run
from broker_server.post import Post
from broker_server.reporting import Listener, Reporter
from broker_server.spool import Spool
from broker_server.store import RunRecord, Store
from broker_server.uploads import Uploads
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ConfigError, RefusedError, ShoalError, TransportError
from fleet_protocol.link import BrokerAddress, Connected, Disconnected, Event, Link, Received
from fleet_protocol.messages import ServerStatus, parse_status
from fleet_protocol.topics import Topics

__all__ = ["Server", "broker_address", "new_run_id"]

_Evaluators = tuple[Evaluator | None, tuple[Evaluator, ...]]

SESSION_SECONDS = 60  # longer than a broken connection lasts, short enough not to queue much for a dead server


def broker_address(config: BrokerConfig) -> BrokerAddress:
    """Where the configured broker is reached from this machine.

    Raises:
        ConfigError: the address is malformed.
    """
    if config.url == "embedded":
        host = "127.0.0.1" if config.listen in {"0.0.0.0", "::", ""} else config.listen  # noqa: S104  (compared)
        return BrokerAddress(host, config.port)
    return BrokerAddress.parse(config.url, ca_file=config.ca_file, cert_file=config.cert_file, key_file=config.key_file)


def new_run_id() -> str:
    """A name for a run: when it began, and a few random digits."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


class Server:
    """A server, from entering to leaving the ``with`` block.

    Args:
        fleet: name of the fleet.
        store: folder of the database and the blobs.
        broker: which broker.
        listener: called with every event of every run, in the server's thread.

    Raises:
        ConfigError: the broker's address is malformed.
    """

    def __init__(self, fleet: str, store: Path, broker: BrokerConfig, *, listener: Listener | None = None) -> None:
        self.fleet = fleet
        self.address = broker_address(broker)
        self._folder = store
        self._broker_config = broker
        self._listener = listener
        self._topics = Topics(fleet)
        self._inbox: queue.SimpleQueue[Event | Stop] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._stack = contextlib.ExitStack()
        self._broker: EmbeddedBroker | None = None

    # Life.

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._store = Store(self._folder)
            stack.callback(self._store.close)
            self._blobs = BlobStore(self._folder / "blobs")
            self._updates = BlobStore(self._folder / "updates")
            if self._broker_config.url == "embedded":
                self._broker = EmbeddedBroker(
                    self._folder / "broker", port=self._broker_config.port, listen=self._broker_config.listen
                )
                stack.enter_context(self._broker)
            self._known = Fleet(self._store.devices(self.fleet))
            self._link = self._connect()
            stack.callback(self._link.close, farewell=(self._topics.server_status, self._status(online=False)))
            for topic_filter in (
                self._topics.all_status,
                self._topics.all_replies,
                self._topics.all_uploads,
                self._topics.server_control,
            ):
                self._link.subscribe(topic_filter)
            self._post = Post(self._link, self._topics)
            self._post.status(None)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _status(self, *, online: bool) -> bytes:
        return ServerStatus(fleet=self.fleet, online=online).to_bytes()

    def _connect(self) -> Link:
        link = Link(
            self.address,
            # A session of its own for every start: a broker that still knows an earlier one need not repeat retained
            # messages, and what it queued for a dead server is repeated by the devices anyway.
            f"shoal-{self.fleet}-server-{secrets.token_hex(4)}",
            self._inbox,  # type: ignore[arg-type]  # the link only puts, and what it puts belongs here
            will=(self._topics.server_status, self._status(online=False)),
            session_expiry_seconds=SESSION_SECONDS,
        )
        link.connect(self._broker_config.connect_timeout_seconds)
        return link

    def stop(self) -> None:
        """End `run` or `serve` soon; may be called from a signal handler or another thread."""
        self._stopping.set()
        self._inbox.put(Stop())

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    # Runs.

    def run(self, config: FleetConfig, *, request: str | None = None) -> control.RunFinished:
        """Do one run, or go on with the one of the same configuration that was cut short.

        Args:
            config: with absolute paths; its store and broker are this server's.
            request: id of the request it answers.

        Returns:
            How it ended; ``stopped`` if `stop` was called, and then the next server goes on with it.

        Raises:
            ShoalError: the run cannot begin: wrong configuration, missing artifacts or test set.
        """
        if config.fleet != self.fleet:
            raise ConfigError(f"the configuration is of fleet {config.fleet}, this server has fleet {self.fleet}")
        unfinished = self._store.unfinished(self.fleet)
        if unfinished is not None and _same(unfinished, config):
            return self._go_on(unfinished, config, request)
        context, evaluators = self._prepare(new_run_id(), config)
        if unfinished is not None:
            self._store.end_run(unfinished.id, "stopped", f"run {context.run} with another configuration was begun")
        record = RunRecord(
            id=context.run,
            fleet=self.fleet,
            arch=config.model.arch,
            config=config.model_dump_json(),
            status="running",
            detail=None,
            created_at=time.time(),
            ended_at=None,
            wire_bytes=0,
            payload_bytes=0,
        )
        self._store.add_run(record, first_version(context, self._blobs))
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
        return self._go_on(unfinished, FleetConfig.model_validate_json(unfinished.config), None)

    def _go_on(self, record: RunRecord, config: FleetConfig, request: str | None) -> control.RunFinished:
        context, evaluators = self._prepare(record.id, config)
        return self._work(context, evaluators, request)

    def _prepare(self, run: str, config: FleetConfig) -> tuple[RunContext, _Evaluators]:
        artifacts = load_artifacts(
            config.model.artifacts,
            config.model.arch,
            chunk_bytes=config.round.chunk_bytes,
            weights=config.model.weights,
        )
        context = prepare_run(run, config, artifacts)
        return context, open_evaluators(context)

    def _work(self, context: RunContext, evaluators: _Evaluators, request: str | None) -> control.RunFinished:
        reporter = Reporter(context.run, self._store, self._link, self._topics, self._listener)
        spool = Spool(self._updates)
        uploads = Uploads(self._store, spool, self._post, reporter)
        blobs = BlobService(self._link, self._topics, context.config.round.chunk_bytes)
        blobs.serve(context.artifacts.files)
        desk = Desk(
            inbox=self._inbox,
            stopping=self._stopping,
            topics=self._topics,
            store=self._store,
            fleet=self._known,
            blobs=blobs,
            uploads=uploads,
            post=self._post,
            reporter=reporter,
            nudge_seconds=context.config.round.nudge_seconds,
            on_disconnect=self._revive_broker,
            on_control=self._reject_control,
        )
        last = self._store.last_round(context.run)
        if last is None or last.state in FINAL:
            spool.clear()
        self._post.status(context.run)
        closed = self._store.version(context.run)
        reporter.emit(
            control.RunStarted(
                run=context.run,
                seconds=0.0,
                request=request,
                arch=context.artifacts.arch,
                strategy=context.strategy.name,
                rounds=context.config.round.rounds,
                closed=closed.number if closed is not None else 0,
            ),
            f"{context.strategy.name} on {context.artifacts.arch}, tiers "
            + ", ".join(item.tier.id for item in context.tiers),
        )
        services = Services(
            desk=desk,
            store=self._store,
            blobs=self._blobs,
            updates=self._updates,
            forget=spool.drop,
            upload_bytes=uploads.take_payload_bytes,
            wire=lambda: self._link.wire,
        )
        coordinator = Coordinator(context, services, *evaluators)
        try:
            return coordinator.run()
        except StopRequested:
            return coordinator.stopped()
        finally:
            spool.close()
            self._post.status(None)

    # The broker.

    def _revive_broker(self) -> None:
        if self._broker is not None and not self._stopping.is_set():
            self._broker.ensure()

    # Requests.

    def serve(self) -> None:
        """Take run requests until `stop` is called; first goes on with a run that was left unfinished.

        Raises:
            TransportError: the embedded broker died and does not come up again.
            StorageError: the server's disk is full.
        """
        try:
            self.resume()
        except ShoalError as error:
            self._store.log("resume-failed", f"the unfinished run cannot go on yet: {error}")
        while not self._stopping.is_set():
            event = self._inbox.get()
            if isinstance(event, Stop):
                return
            if isinstance(event, Connected):
                self._post.status(None)
            elif isinstance(event, Disconnected):
                self._revive_broker()
            else:
                self._idle(event)

    def _idle(self, event: Received) -> None:
        parts = self._topics.parts(event.topic)
        try:
            if len(parts) == 3 and parts[0] == "devices" and parts[2] == "status":
                status = parse_status(event.payload)
                if (status.fleet, status.device) == (self.fleet, parts[1]):
                    self._known.see(status)
                    self._store.see_device(status)
            elif parts == ("server", "control"):
                self._requested(event.payload)
        except RefusedError as error:
            self._store.count_refusal("", parts[1] if parts[0] == "devices" else "", error.reason, "server")
            self._store.log("refused", f"{error.reason.value}: {error}")

    def _requested(self, payload: bytes) -> None:
        request = control.parse_request(payload)
        try:
            if request.fleet != self.fleet:
                raise ConfigError(f"this server has fleet {self.fleet}, the request is for {request.fleet}")
            self.run(_requested_config(request.config), request=request.request)
        except ShoalError as error:
            self._tell(control.RunRejected(request=request.request, detail=str(error), exit_code=error.exit_code))

    def _reject_control(self, payload: bytes) -> None:
        request = control.parse_request(payload)
        detail = "another run is in progress; wait for it, or watch it with `shoal status`"
        self._tell(control.RunRejected(request=request.request, detail=detail))

    def _tell(self, event: control.RunRejected) -> None:
        with contextlib.suppress(TransportError):
            self._link.publish(self._topics.server_events, event.to_bytes())
        if self._listener is not None:
            self._listener(event)


def _requested_config(text: str) -> FleetConfig:
    try:
        return FleetConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ConfigError(f"the requested configuration: {where}: {first['msg']}") from error


def _same(record: RunRecord, config: FleetConfig) -> bool:
    """Whether a stored run was begun with this configuration, wherever its broker and store are now."""
    before = FleetConfig.model_validate_json(record.config)
    free = {"broker": config.broker, "store": config.store, "keep_versions": config.keep_versions}
    return before.model_copy(update=free) == config
