"""Runs a simulation: the server's coordinator with virtual devices.

    result = simulate(load_config(path, SimulationConfig).resolved(path.parent))

Planning, sampling, folding, merging, judging, the store and going on after a kill are the code of
`broker_server`; training and statistics are that of `device_runtime`. A simulation differs from a
fleet in the way of messages between the two, and in time: a `RoundRow` has the time that the round
would have taken on the emulated devices.
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
from broker_server.rounds.dispatch import Services
from broker_server.rounds.evaluation import Evaluator
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
from simulation.results.history import HistoryWriter, RoundRow
from simulation.round_rows import RowMaker
from simulation.settings import SimulationConfig
from simulation.virtual_dispatcher import Records, VirtualDispatcher
from simulation.virtual_fleet import VirtualFleet

Listener = Callable[[control.RunEvent], None]


@dataclass(frozen=True)
class SimulationResult:
    """How a simulation ended.

    Attributes:
        run: id of the run.
        folder: folder of the simulation.
        finished: the coordinator's report; its status is ``stopped`` after Ctrl-C.
        rounds: a row for each closed round, those of earlier processes included.
    """

    run: str
    folder: Path
    finished: control.RunFinished
    rounds: tuple[RoundRow, ...]


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
    """Run a simulation, or go on with the one in its folder.

    A folder whose simulation is finished is continued if the configuration asks for more rounds,
    and read if not.

    Args:
        config: the simulation, with absolute paths.
        listener: receives the events of the run.
        stage: receives what is being prepared.
        watch: receives the row of each closed round.

    Returns:
        How it ended; its status is ``failed`` or ``stopped`` where that is so, with the reason.

    Raises:
        ConfigError: a setting is wrong, or the folder holds another simulation, or one that is
            running.
        ShoalError: it cannot begin; an OSError where its folder cannot be made.
    """
    # Now, as an export may take minutes.
    config.strategy.require_loadable()
    config.out.mkdir(parents=True, exist_ok=True, mode=0o700)
    refusal = (
        f"another simulation works in {config.out}: wait for it, or give this one an `out` of its "
        "own"
    )
    with (
        held(config.out, refusal),
        # What a power cut takes of it is computed again.
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
        # A server draws noise from the operating system; here it follows from the seed, so that a
        # simulation can be repeated.
        context = prepare_run(run, self._fleet, artifacts, seeded)
        if not runs:
            self._store.add_run(context.initial_record(), first_version(context, self._blobs))
        elif runs[0].ended_at is not None:
            self._store.reopen_run(run)
        split = SampleSplit.load(self._prepared.split)
        fleet = VirtualFleet.from_table(
            self._config.devices,
            [len(indices) for indices in split.train],
            load_clock(self._config.clock),
            artifacts.layout,
            seed=self._config.seed,
        )
        # Mapped, since there may be a label for each token of a text.
        labels = np.load(self._prepared.data / "train_y.npy", mmap_mode="r")
        judges = chosen_judges(
            self._config.evaluation,
            context,
            split,
            labels,
            own_models=self._config.own_models is not None,
        )
        rows = RowMaker(context, self._store, self._blobs, fleet, judges)
        # The store is the truth. Rows beyond its last closed round belong to a round that will be
        # run again.
        records = self._store.rounds(context.run)
        closed = [record for record in records if record.state is RoundState.CLOSED]
        with HistoryWriter(self._folder, until=closed[-1].number if closed else 0) as history:

            def add(record: RoundRecord) -> None:
                """Write the row of a closed round."""
                row, devices = rows.make(record, history.rows[-1] if history.rows else None)
                history.add(row, devices)
                if judges.local is not None or judges.further:
                    # The row cannot be made again once the version is gone that judges read.
                    history.flush()
                self._watch(row)

            # Rounds that closed before their rows were written, when the process was killed.
            for record in closed[len(history.rows) :]:
                add(record)

            def receive(event: control.RunEvent) -> None:
                """Write the row of a round when it closes, and pass the event on."""
                if isinstance(event, control.RoundClosed):
                    record = self._store.last_round(context.run)
                    if record is not None:
                        add(record)
                if listener is not None:
                    listener(event)

            finished = self._work(
                context,
                Reporter(context.run, self._store, receive),
                fleet,
                judges.evaluator,
            )
        return SimulationResult(context.run, self._folder, finished, history.rows)

    def _work(
        self,
        context: RunContext,
        reporter: Reporter,
        fleet: VirtualFleet,
        evaluator: Evaluator | None,
    ) -> control.RunFinished:
        """Run the coordinator with virtual devices until the run ends or is stopped."""
        setup = self._setup()
        table = self._config.engine
        records = Records(self._store, self._blobs, self._updates, reporter)
        with (
            contextlib.closing(open_engine(table, setup)) as engine,
            on_signals(lambda _: self._stopping.set()),
        ):
            dispatcher = VirtualDispatcher(
                fleet, engine, records, group=table.group, stopping=self._stopping
            )
            services = Services(dispatcher, self._store, self._blobs, self._updates)
            coordinator = Coordinator(context, services, Evaluators(evaluator))
            try:
                return coordinator.run()
            except StopRequested:
                return coordinator.stopped()

    def _setup(self) -> WorkerSetup:
        """Return what workers need."""
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
            # Settings may hold frozen mappings, which JSON takes only as dicts.
            settings=json.dumps(dict(self._prepared.settings), default=dict),
            models=self._config.model.models,
            pairs=self._prepared.pairs,
            tasks=() if own is None else tuple(model.labels for model in own.models),
            own_test=self._config.evaluation.local and own is not None,
        )
