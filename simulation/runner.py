"""Running a simulation: the server's coordinator with virtual devices.

    result = simulate(load_config(path, SimulationConfig).resolved(path.parent))

Planning, sampling, folding, merging, judging, the store and going on after a kill are `broker_server`'s; training and
statistics are `device_runtime`'s. What is different from a fleet is the way between them, and time: `RoundRow` tells
how long the round would have taken on the emulated devices.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.coordinator import Coordinator
from broker_server.rounds.dispatch import Services
from broker_server.rounds.evaluation import Evaluator
from broker_server.rounds.judging import Evaluators
from broker_server.rounds.new_version import first_version
from broker_server.rounds.reporting import Reporter
from broker_server.rounds.run_context import RunContext, new_run_id, prepare_run
from broker_server.rounds.stopping import StopRequested
from broker_server.settings.fleet import FleetConfig
from broker_server.store import RoundRecord, Store
from broker_server.store.machine import RoundState
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import STORED
from fleet_protocol.locks import held
from fleet_protocol.noise import seeded
from fleet_protocol.signals import on_signals
from simulation.clock import load_clock
from simulation.data.held import Parts
from simulation.engines import open_engine
from simulation.judges import chosen_judges
from simulation.orders import WorkerSetup
from simulation.preparing import Prepared, prepare
from simulation.results.history import HistoryWriter, RoundRow
from simulation.results.rows import RowMaker
from simulation.settings import HOW_COMPUTED, SimulationConfig
from simulation.virtual_dispatcher import Records, VirtualDispatcher
from simulation.virtual_fleet import VirtualFleet

Listener = Callable[[control.RunEvent], None]

_CONFIG = "config.json"
_FILES = "files.json"  # digests of those that it names


@dataclass(frozen=True)
class SimulationResult:
    """How a simulation ended."""

    run: str
    folder: Path
    finished: control.RunFinished  # as the coordinator tells it; ``stopped`` after Ctrl-C
    rounds: tuple[RoundRow, ...]  # one row per closed round, those of earlier processes included


def simulate(
    config: SimulationConfig,
    *,
    listener: Listener | None = None,
    stage: Callable[[str], None] = lambda _text: None,
    watch: Callable[[RoundRow], None] = lambda _row: None,
) -> SimulationResult:
    """Run a simulation, or go on with the one in its folder.

    A folder whose simulation is finished is continued if the configuration asks for more rounds, and read if not. Paths
    of the configuration are absolute; `stage` is told what is being prepared, `watch` every closed round.

    Returns:
        How it ended; its status is ``failed`` or ``stopped`` where that is so, with the reason.

    Raises:
        ConfigError: a setting is wrong, or the folder holds another simulation, or one that is running.
        ShoalError: it cannot begin; an OSError where its folder cannot be made.
    """
    config.out.mkdir(parents=True, exist_ok=True, mode=0o700)
    taken = f"another simulation works in {config.out}: wait for it, or give this one an `out` of its own"
    with held(config.out, taken), contextlib.closing(Store(config.out / "store", durable=False)) as store:
        _claim(config, begun=bool(store.runs()))
        prepared = prepare(config, stage)
        fleet = config.fleet(artifacts=prepared.artifacts, weights=prepared.weights, test_set=prepared.test_set)
        return _Simulation(config, prepared, fleet, store, watch).run(listener)


def _claim(config: SimulationConfig, *, begun: bool) -> None:
    """See that the folder holds this very simulation, with the same files, or none that has begun."""
    path, files = config.out / _CONFIG, config.out / _FILES
    functions = [Path(item.rpartition(":")[0]) for item in config.data.changes if ":" in item]
    named = (config.model.models, config.model.weights, config.clock.table, *functions)
    given = {str(name): blob_digest(Path(name).read_bytes()) for name in named if name and Path(name).is_file()}
    but: Mapping[str, bool | set[str]] = {**dict.fromkeys(HOW_COMPUTED, True), "round": {"rounds"}}
    mine = config.model_dump(mode="json", exclude=but)
    if path.is_file():
        # Read as a configuration, so that keys which came later have their defaults.
        try:
            stored = SimulationConfig.model_validate_json(path.read_bytes(), context=STORED)
        except ValueError as error:
            raise ConfigError(f"{path} cannot be read ({error}); take another `out`, or remove the folder") from error
        before = stored.model_dump(mode="json", exclude=but)
        known = json.loads(files.read_bytes()) if files.is_file() else given
        changed = [f"[{key}]" for key in mine if mine[key] != before.get(key)]
        changed += [name for name in given if given[name] != known.get(name, given[name])]
        if changed and begun:
            raise ConfigError(
                f"{config.out} holds a simulation with another {changed[0]}; take another `out`, or remove the folder"
            )
    for made in () if begun else (*config.out.glob("parts*.npz"), config.out / "init.safetensors"):
        made.unlink(missing_ok=True)  # of a start that failed, and that may have been of something else
    write_atomically(files, json.dumps(given).encode())
    write_atomically(path, config.model_dump_json(indent=1, exclude=set(HOW_COMPUTED)).encode())


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
        """Do what is left of it."""
        artifacts = load_artifacts(
            self._fleet.model.artifacts,
            self._fleet.model.arch,
            chunk_bytes=self._fleet.round.chunk_bytes,
            weights=self._fleet.model.weights,
        )
        known = self._store.runs()
        context = prepare_run(known[0].id if known else new_run_id(), self._fleet, artifacts, seeded)
        if (context.instructions("train", 0).routine != "train") != (self._config.own_models is not None):
            raise ConfigError(f"{context.strategy.name}: [own_models] is for strategies that need it, and no others")
        if not known:
            self._store.add_run(context.begun(), first_version(context, self._blobs))
        parts = Parts.load(self._prepared.parts)
        fleet = VirtualFleet.of(
            self._config.devices,
            [len(held) for held in parts.train],
            load_clock(self._config.clock),
            artifacts.layout,
            seed=self._config.seed,
        )
        own_models = self._config.own_models is not None
        labels = np.load(self._prepared.data / "train_y.npy", mmap_mode="r")
        judges = chosen_judges(self._config.evaluation, context, parts, labels, own_models=own_models)
        rows = RowMaker(context, self._store, self._blobs, fleet, judges)
        closed = [item for item in self._store.rounds(context.run) if item.state is RoundState.CLOSED]
        with HistoryWriter(self._folder, until=closed[-1].number if closed else 0) as history:

            def add(record: RoundRecord) -> None:
                row, devices = rows.make(record, history.rows[-1] if history.rows else None)
                history.add(row, devices)
                if judges.local is not None or judges.others:  # they look at the version, which is not kept for long
                    history.flush()
                self._watch(row)

            for record in closed[len(history.rows) :]:
                add(record)  # it was killed before it wrote them

            def told(event: control.RunEvent) -> None:
                if isinstance(event, control.RoundClosed):
                    record = self._store.last_round(context.run)
                    if record is not None:
                        add(record)
                if listener is not None:
                    listener(event)

            finished = self._work(context, Reporter(context.run, self._store, told), fleet, judges.evaluator)
        return SimulationResult(context.run, self._folder, finished, history.rows)

    def _work(
        self, context: RunContext, reporter: Reporter, fleet: VirtualFleet, evaluator: Evaluator | None
    ) -> control.RunFinished:
        setup, table = self._setup(), self._config.engine
        records = Records(self._store, self._blobs, self._updates, reporter)
        with contextlib.closing(open_engine(table, setup)) as engine, on_signals(lambda _: self._stopping.set()):
            dispatcher = VirtualDispatcher(fleet, engine, records, group=table.group, stopping=self._stopping)
            services = Services(dispatcher, self._store, self._blobs, self._updates)
            coordinator = Coordinator(context, services, Evaluators(evaluator))
            try:
                return coordinator.run()
            except StopRequested:
                return coordinator.stopped()

    def _setup(self) -> WorkerSetup:
        table, own = self._config.engine, self._config.own_models
        return WorkerSetup(
            artifacts=self._prepared.artifacts,
            arch=self._config.model.arch,
            data=self._prepared.data,
            parts=self._prepared.parts,
            blobs=self._blobs.root,
            updates=self._updates.root,
            devices=self._folder / "devices",
            holdout=self._config.evaluation.holdout,
            augment=self._config.data.changes,
            backend=table.backend,
            device=table.device,
            settings=json.dumps(dict(self._prepared.settings), default=dict),
            models=self._config.model.models,
            pairs=self._prepared.pairs,
            tasks=() if own is None else tuple(item.labels for item in own.models),
            own_test=self._config.evaluation.local and own is not None,
        )
