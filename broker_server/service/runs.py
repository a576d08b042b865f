"""Begins, resumes and executes the runs of a server, one at a time."""

import functools
import logging
import math
import time
from dataclasses import dataclass, replace

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.coordinator import Coordinator
from broker_server.rounds.dispatch import Services
from broker_server.rounds.evaluators import Evaluators, open_test_sets, reopen_test_sets
from broker_server.rounds.new_version import first_version
from broker_server.rounds.reporting import Listener, Reporter
from broker_server.rounds.run_context import RunContext, new_run_id, prepare_run
from broker_server.rounds.stopping import OperatorWish, StopRequested
from broker_server.service.blob_service import BlobService
from broker_server.service.chunk_trial import find_chunk_bytes
from broker_server.service.clock import Clock
from broker_server.service.cohorts import Cohorts
from broker_server.service.connection import Connection, RunServices
from broker_server.service.control import report_start
from broker_server.service.data_findings import note_test_set, note_undescribed
from broker_server.service.dispatcher import MqttDispatcher
from broker_server.service.own_code_log import log_own_code
from broker_server.service.partial_uploads import PartialUploads
from broker_server.service.reassembly import Reassembly
from broker_server.service.receivers import Receivers
from broker_server.service.rollout_service import RolloutService
from broker_server.service.server_requests import ServerRequests
from broker_server.service.trusted import name_differences, trusted_config
from broker_server.service.uploads import Uploads
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from broker_server.store import RunRecord, Store
from broker_server.store.machine import FINAL
from broker_server.store.update_store import UpdateStore
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.control import RunFinished
from fleet_protocol.errors import ConfigError

_LOG = logging.getLogger(__name__)

RETRY_SECONDS = 10.0  # between attempts to resume a run whose store or broker was not available


@dataclass(frozen=True)
class ServerResources:
    """The resources of a server, from its start to its end.

    Attributes:
        store: the database.
        blobs: global versions, slices and statistics.
        updates: updates of devices.
        broker: the settings of the broker.
        connection: to the broker, and the services that use it.
        receivers: the processes that receive updates, if any.
        rollout: sends releases to boards, in a fleet with identities.
    """

    store: Store
    blobs: BlobStore
    updates: UpdateStore
    broker: BrokerConfig
    connection: Connection
    receivers: Receivers | None
    rollout: RolloutService | None


class Runs:
    """The runs of a server.

    Args:
        resources: resources of the server.
        requests: handles requests to the server.
        emit: sends every event of a run to the server's clients.

    Attributes:
        resume_at: the ``time.monotonic()`` at which an unfinished run is tried again.
    """

    def __init__(
        self, resources: ServerResources, requests: ServerRequests, emit: Listener
    ) -> None:
        self.resume_at = math.inf
        self._resources = resources
        self._store = resources.store
        self._connection = resources.connection
        self._requests = requests
        self._control = requests.control
        self._emit = emit

    @property
    def _fleet(self) -> str:
        return self._connection.topics.fleet

    def begin(
        self, config: FleetConfig, request: str | None = None, *, followed: bool = False
    ) -> RunFinished:
        """Do one run, or resume an interrupted one with the same configuration.

        Args:
            config: configuration of the run.
            request: id of the request that started it, if any.
            followed: whether a client may follow it over MQTT.

        Raises:
            ShoalError: the run cannot begin.
        """
        if config.fleet != self._fleet:
            raise ConfigError(
                f"the configuration is for fleet {config.fleet}, but this server has fleet "
                f"{self._fleet}"
            )
        unfinished = self._store.unfinished(self._fleet)
        # With other settings it would be another run under the same id.
        changed = "" if unfinished is None else name_differences(config, unfinished.config)
        if unfinished is not None and not changed:
            config = config.with_stored_contract(unfinished.config)
            if config.run_name is not None:
                self._store.rename_run(unfinished.id, config.run_name)
            return self._continue(unfinished, config, request)
        if config.run_name is not None:
            self._store.require_free_name(config.run_name)
        self._control.followed = followed
        # Only a run that can begin ends the previous one.
        context, evaluators = open_test_sets(self._prepare(new_run_id(), config))
        if unfinished is not None:
            self._end_replaced(unfinished, context.run, changed)
        # A run without a version could not be resumed, so both are stored together.
        self._store.add_run(context.initial_record(), first_version(context, self._resources.blobs))
        return self._execute(context, evaluators, request)

    def retry_later(self) -> None:
        """Try to resume an unfinished run after a pause."""
        self.resume_at = time.monotonic() + RETRY_SECONDS

    def _end_replaced(self, unfinished: RunRecord, run: str, changed: str) -> None:
        why = f"run {run} started again from the beginning, with different settings: {changed}"
        _LOG.warning(
            "run %s ends unfinished: %s; `shoal export-weights` exports its last version",
            unfinished.id,
            why,
        )
        # The next server resumes the run that has not ended, so there must not be two.
        self._store.end_run(unfinished.id, "stopped", why)

    def resume(self) -> RunFinished | None:
        """Resume a run that an earlier server left unfinished.

        Returns:
            How it ended; None if there is none.

        Raises:
            ShoalError: it cannot be resumed.
        """
        unfinished = self._store.unfinished(self._fleet)
        if unfinished is None:
            return None
        config = trusted_config(self._store, unfinished, self._requests.own)
        return self._continue(unfinished, config, None)

    def _continue(self, record: RunRecord, config: FleetConfig, request: str | None) -> RunFinished:
        # Its followers may be anywhere if requests over MQTT are open.
        self._control.followed = self._control.open
        context, evaluators = reopen_test_sets(self._prepare(record.id, config))
        self._store.record_config(
            record.id, context.initial_record().config
        )  # the folder may have been moved
        return self._execute(context, evaluators, request)

    def _prepare(self, run: str, config: FleetConfig) -> RunContext:
        """Return the context of a run, with this server's store and broker."""
        ours = {"store": self._store.folder.resolve(), "broker": self._resources.broker}
        config = config.model_copy(update=ours)
        wanted = config.round.chunk_bytes
        chunk_bytes = find_chunk_bytes(self._connection.link, self._connection.topics, wanted)
        if chunk_bytes < wanted:
            why = (
                f"chunks have {chunk_bytes:,} bytes, because the broker refuses chunks of "
                f"{wanted:,} bytes"
            )
            _LOG.warning(why)
            self._store.log("smaller-chunks", why, run=run)
        artifacts = load_artifacts(
            config.model.artifacts,
            config.model.arch,
            chunk_bytes=chunk_bytes,
            weights=config.model.weights,
        )
        context = prepare_run(run, config, artifacts)
        if self._resources.rollout is not None:
            # A board that has taken a release trains with that release's set.
            context = replace(context, sets=self._resources.rollout.sets)
        return context

    def _execute(
        self, context: RunContext, evaluators: Evaluators, request: str | None
    ) -> RunFinished:
        reporter = Reporter(context.run, self._store, self._emit)
        partial = PartialUploads(self._resources.updates, self._resources.blobs)
        dispatcher = self._dispatcher(context, reporter, partial)
        services = Services(
            self._store,
            self._resources.blobs,
            self._resources.updates,
            dispatcher,
        )
        coordinator = Coordinator(context, services, evaluators)
        # Parts of updates are useful only to a round that continues.
        if self._awaits_no_update(context.run):
            partial.clear()
        outbox = self._connection.outbox
        outbox.publish_status(context.run)
        version = self._store.version(context.run)
        log_own_code(self._store, context.run, context.config)
        record = self._store.run(context.run)
        name = record.name if record is not None else None
        closed = version.number if version is not None else 0
        report_start(context, reporter, request, name, closed)
        note_undescribed(context.contracts, reporter)
        note_test_set(evaluators.findings, reporter)
        if evaluators.unreadable:
            why = f"this run continues without evaluating its versions: {evaluators.unreadable}"
            _LOG.warning(why)
            reporter.note("not-judged", why)
        try:
            finished = coordinator.run()
        except StopRequested:
            return coordinator.stopped()
        finally:
            partial.close()
            outbox.publish_status(None)
        # not by an operator: its store or broker was not available
        if finished.status == "stopped":
            self.retry_later()
        return finished

    def _dispatcher(
        self, context: RunContext, reporter: Reporter, partial: PartialUploads
    ) -> MqttDispatcher:
        connection = self._connection
        operator = OperatorWish.from_run(self._store.run(context.run))
        clock = Clock(connected=connection.link.connected)
        uploads = Uploads(
            self._store,
            Reassembly(partial),
            connection.outbox,
            reporter,
            Cohorts(self._store, partial.blobs, connection.outbox, clock, reporter),
            self._resources.receivers,
        )
        blobs = BlobService(connection.link, connection.topics, context.chunk_bytes)
        # Graphs stay the same for the whole run; slices are offered with each round.
        blobs.serve(context.artifacts.files)
        services = RunServices(
            self._store,
            connection.devices,
            blobs,
            uploads,
            reporter,
            operator,
            clock,
            context.open_labels,
        )
        return MqttDispatcher(
            connection,
            services,
            nudge_seconds=context.config.round.nudge_seconds,
            handle_request=functools.partial(
                self._requests.handle_in_run, reporter=reporter, operator=operator
            ),
        )

    def _awaits_no_update(self, run: str) -> bool:
        """Return whether no round of a run is open, and no update of an earlier one may arrive."""
        last = self._store.last_round(run)
        if last is None:
            return True
        return last.state in FINAL and not self._store.late_tasks(
            run, last.number + 1, waiting=True
        )
