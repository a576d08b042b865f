"""Runs a simulation: the server's coordinator with virtual devices.

    result = simulate(load_config(path, SimulationConfig).resolved(path.parent))

The code of `broker_server` plans, samples, folds, merges, evaluates, stores and resumes; the code
of `device_runtime` trains and computes statistics. A simulation differs from a fleet in the
transport of messages and in time: a `RoundRow` has the time that the round would have taken on the
emulated devices.
"""

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.coordinator import Coordinator
from broker_server.rounds.dispatch import RunStorage, Services
from broker_server.rounds.evaluators import Evaluators
from broker_server.rounds.new_version import first_version
from broker_server.rounds.reporting import Reporter
from broker_server.rounds.run_context import RunContext, new_run_id, prepare_run
from broker_server.rounds.stopping import StopRequested
from broker_server.settings.fleet import FleetConfig
from broker_server.store import RoundRecord, Store
from broker_server.store.machine import RoundState
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.locks import held
from fleet_protocol.noise import seeded
from fleet_protocol.signals import on_signals
from simulation.claim import claim_folder
from simulation.clock import load_clock
from simulation.data.held import SampleSplit
from simulation.engines import open_engine
from simulation.judges import chosen_judges
from simulation.orders import WorkerSetup
from simulation.preparing import Prepared, prepare
from simulation.results.history import HistoryWriter
from simulation.results.rounds import RoundRow
from simulation.round_rows import RowMaker
from simulation.settings import SimulationConfig
from simulation.virtual_dispatcher import VirtualDispatcher
from simulation.virtual_fleet import VirtualFleet

Listener = Callable[[control.RunEvent], None]


@dataclass(frozen=True)
class SimulationResult:
    """The result of a simulation.

    Attributes:
        run: id of the run.
        folder: folder of the simulation.
        finished: the coordinator's report; its status is ``stopped`` after Ctrl-C.
        rounds: a row for each closed round, including those of earlier processes.
        artifacts: folder of the exported tiers, each in a folder of its id.
    """

    run: str
    folder: Path
    finished: control.RunFinished
    rounds: tuple[RoundRow, ...]
    artifacts: Path


def _no_progress(_stage: str) -> None:
    """Report nothing."""


def _no_row(_row: RoundRow) -> None:
    """Report nothing."""


def simulate(
    config: SimulationConfig,
    *,
    listener: Listener | None = None,
    stage: Callable[[str], None] = _no_progress,
    watch: Callable[[RoundRow], None] = _no_row,
) -> SimulationResult:
    """Run a simulation, or resume the one in its folder.

    A finished simulation is continued if the configuration has more rounds; otherwise its results
    are read.

    Args:
        config: the simulation, with absolute paths.
        listener: receives the events of the run.
        stage: receives the current stage of the preparation.
        watch: receives the row of each closed round.

    Returns:
        The result; for the status ``failed`` or ``stopped`` with the reason.

    Raises:
        ConfigError: a setting is invalid, or the folder has another or a running simulation.
        ShoalError: the simulation cannot start; an OSError if its folder cannot be created.
    """
    # Check now, because an export may take minutes.
    config.strategy.require_loadable()
    config.out.mkdir(parents=True, exist_ok=True, mode=0o700)
    refusal = f"another simulation is running in {config.out}: wait for it, or use another `out`"
    with (
        held(config.out, refusal),
        # Data that is lost in a power cut is computed again.
        contextlib.closing(Store(config.out / "store", durable=False)) as store,
    ):
        runs = store.runs()
        has_failed = bool(runs) and runs[0].status == "failed"
        corrected = claim_folder(config, begun=bool(runs), has_failed=has_failed)
        if corrected:
            store.log("strategy-corrected", f"{corrected} was changed", run=runs[0].id)
        prepared = prepare(config, stage)
        fleet = config.fleet(
            artifacts=prepared.artifacts,
            weights=prepared.weights,
            test_set=prepared.test_set,
        )
        return _Simulation(config, prepared, fleet, store, watch).run(listener)


class _Simulation:
    """One simulation in progress."""

    def __init__(
        self,
        config: SimulationConfig,
        prepared: Prepared,
        fleet: FleetConfig,
        store: Store,
        watch: Callable[[RoundRow], None],
    ) -> None:
        self._config = config
        self._prepared = prepared
        self._fleet = fleet
        self._store = store
        self._watch = watch
        self._folder = config.out
        self._blobs = BlobStore(fleet.store / "blobs", durable=False)
        self._updates = BlobStore(fleet.store / "updates", durable=False)
        self._stopping = threading.Event()

    def run(self, listener: Listener | None) -> SimulationResult:
        """Run the rounds that are left."""
        artifacts = load_artifacts(
            self._fleet.model.artifacts,
            self._fleet.model.arch,
            chunk_bytes=self._fleet.round.chunk_bytes,
            weights=self._fleet.model.weights,
        )
        runs = self._store.runs()
        run = runs[0].id if runs else new_run_id()
        # A server draws noise from the operating system; here it comes from the seed, so that a
        # simulation is repeatable.
        context = prepare_run(run, self._fleet, artifacts, seeded)
        self._open_run(context)
        split = SampleSplit.load(self._prepared.split)
        fleet = VirtualFleet.from_table(
            self._config.devices,
            [len(indices) for indices in split.train],
            load_clock(self._config.clock),
            artifacts.layout,
            seed=self._config.seed,
        )
        # Memory-mapped, because there may be a label for each token of a text.
        labels = np.load(self._prepared.data / "train_y.npy", mmap_mode="r")
        judges = chosen_judges(
            self._config.evaluation,
            context,
            split,
            labels,
            devices_judge=self._config.devices_judge,
        )
        rows = RowMaker(context, self._store, self._blobs, fleet, judges)
        # The store is authoritative. Rows beyond its last closed round belong to a round that will
        # run again.
        records = self._store.rounds(context.run)
        closed = [record for record in records if record.state is RoundState.CLOSED]
        with HistoryWriter(self._folder, until=closed[-1].number if closed else 0) as history:

            def add(record: RoundRecord) -> None:
                """Write the row of a closed round."""
                row, devices = rows.make(record, history.rows[-1] if history.rows else None)
                history.add(row, devices)
                if judges.local is not None or judges.further:
                    # The row cannot be rebuilt once the version for the judges is deleted.
                    history.flush()
                self._watch(row)

            # Rounds that closed before a kill, without written rows.
            for record in closed[len(history.rows) :]:
                add(record)

            def receive(event: control.RunEvent) -> None:
                """Write the row of a round when it closes, and pass the event on."""
                if isinstance(event, control.RoundClosed):
                    # The event comes after the store has committed the round.
                    record = self._store.last_round(context.run)
                    if record is not None:
                        add(record)
                if listener is not None:
                    listener(event)

            finished = self._work(
                context,
                Reporter(context.run, self._store, receive),
                fleet,
                Evaluators(judges.evaluator, judges.beside),
            )
        arch = self._prepared.artifacts / self._config.model.arch
        return SimulationResult(context.run, self._folder, finished, history.rows, arch)

    def _open_run(self, context: RunContext) -> None:
        """Begin the run of the folder, or continue it under the configured name."""
        record = self._store.run(context.run)
        if record is None:
            self._store.add_run(context.initial_record(), first_version(context, self._blobs))
            return
        if record.ended_at is not None:
            self._store.reopen_run(record.id)
        # Without a configured name, a resumed run keeps the one that it got.
        if self._config.run_name is not None:
            self._store.rename_run(record.id, self._config.run_name)

    def _work(
        self,
        context: RunContext,
        reporter: Reporter,
        fleet: VirtualFleet,
        evaluators: Evaluators,
    ) -> control.RunFinished:
        """Run the coordinator with virtual devices until the run ends or is stopped."""
        setup = self._setup()
        table = self._config.engine
        storage = RunStorage(self._store, self._blobs, self._updates)
        with (
            contextlib.closing(open_engine(table, setup)) as engine,
            on_signals(lambda _: self._stopping.set()),
        ):
            dispatcher = VirtualDispatcher(
                fleet, engine, storage, reporter, group=table.group, stopping=self._stopping
            )
            services = Services(**vars(storage), dispatcher=dispatcher)
            coordinator = Coordinator(context, services, evaluators)
            try:
                return coordinator.run()
            except StopRequested:
                return coordinator.stopped()

    def _setup(self) -> WorkerSetup:
        """Return the setup of the workers."""
        table = self._config.engine
        own = self._config.own_models
        return WorkerSetup(
            artifacts=self._prepared.artifacts,
            arch=self._config.model.arch,
            data=self._prepared.data,
            split=self._prepared.split,
            blobs=self._blobs.root,
            updates=self._updates.root,
            devices=self._folder / "devices",
            holdout=self._config.evaluation.holdout,
            augment=self._config.data.changes,
            backend=table.backend,
            device=table.device,
            # Settings may contain frozen mappings, but JSON needs dicts.
            settings=json.dumps(dict(self._prepared.settings), default=dict),
            models=self._config.model.models,
            pairs=self._prepared.pairs,
            tasks=() if own is None else tuple(model.labels for model in own.models),
            own_test=self._config.evaluation.local and self._config.devices_judge,
        )
