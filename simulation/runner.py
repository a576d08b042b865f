"""Running a simulation: the server's coordinator with virtual devices.

    result = simulate(load_config(path, SimulationConfig).resolved(path.parent))

Planning, sampling, folding, merging, judging, the store and going on after a kill are
`broker_server`'s; training and statistics are `device_runtime`'s. What is different from a fleet is
the way between them, and time: `RoundRow` tells how long the round would have taken on the emulated
devices.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from broker_server.settings.combinations import Trait, keeps
from broker_server.settings.fleet import FleetConfig
from broker_server.store import RoundRecord, Store, TaskPhase, TaskRecord
from broker_server.store.machine import RoundState
from broker_server.store.privacy_spent import epsilon_by_round
from broker_server.store.queries import find_run
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import STORED
from fleet_protocol.locks import held
from fleet_protocol.messages import Evaluation
from fleet_protocol.noise import seeded
from fleet_protocol.signals import on_signals
from simulation.clock import load_clock
from simulation.data.held import Parts
from simulation.engines import open_engine
from simulation.judges import Judges, chosen_judges
from simulation.orders import WorkerSetup
from simulation.preparing import Prepared, prepare
from simulation.results.history import DeviceRow, HistoryWriter, RoundRow
from simulation.settings import HOW_COMPUTED, SimulationConfig
from simulation.virtual_dispatcher import Records, VirtualDispatcher
from simulation.virtual_fleet import VirtualFleet

Listener = Callable[[control.RunEvent], None]

_CONFIG = "config.json"
_FILES = "files.json"  # digests of those that it names


class RowMaker:
    """Makes the rows of closed rounds, from the store, so that rows can be made again."""

    def __init__(
        self,
        context: RunContext,
        store: Store,
        blobs: BlobStore,
        fleet: VirtualFleet,
        judges: Judges,
    ) -> None:
        self._context = context
        self._store = store
        self._blobs = blobs
        self._times = fleet.times
        self._index = {board.id: board.index for board in fleet.boards}
        self._judges = judges
        self._began = (
            time.time()
        )  # a round that a process goes on with takes no time while there is none

    def make(
        self, record: RoundRecord, before: RoundRow | None
    ) -> tuple[RoundRow, tuple[DeviceRow, ...]]:
        """The row of a round, of which the last before it is known, and those of its devices."""
        numbers = range(before.round + 1 if before else 1, record.number + 1)
        found = [self._counted(record.run, number) for number in numbers]
        tasks, _ = found[-1]
        lost = (
            self._store.rounds(record.run)[numbers[0] - 1 : record.number - 1]
            if numbers[1:]
            else []
        )
        devices = []
        train = self._context.config.train
        for task in tasks:
            if task.kind != "train" or task.phase is not TaskPhase.MERGED or task.metrics is None:
                continue
            metrics = task.metrics
            devices.append(
                DeviceRow(
                    round=record.number,
                    device=task.device,
                    tier=task.tier,
                    examples=metrics.examples,
                    train_loss=metrics.train_loss,
                    local_accuracy=metrics.evaluation.accuracy
                    if metrics.evaluation is not None
                    else None,
                    simulated_seconds=self._times.round_seconds(
                        self._index[task.device], task, train
                    ),
                    seconds=metrics.train_seconds,
                    payload_bytes=task.update_size or 0,
                )
            )
        evaluation = record.evaluation
        losses = [row.train_loss for row in devices if row.train_loss is not None]
        simulated = sum(item.collect_seconds or 0.0 for item in (*lost, record))
        ended = record.ended_at or record.planned_at
        seconds = ended - (
            max(self._began, record.planned_at) if ended > self._began else record.planned_at
        )
        row = RoundRow(
            round=record.number,
            version=record.version + 1,
            accuracy=evaluation.accuracy if evaluation is not None else None,
            loss=evaluation.loss if evaluation is not None else None,
            train_loss=sum(losses) / len(losses) if losses else None,
            devices=len(devices),
            tiers=Counter(row.tier for row in devices),
            simulated_seconds=simulated,
            simulated_total=(before.simulated_total if before else 0.0) + simulated,
            seconds=max(0.0, seconds),
            payload_bytes=sum(payload for _, payload in found),
            local_accuracy=self._local_accuracy(
                record,
                [
                    task.metrics.evaluation
                    for task in tasks
                    if task.kind == "train" and task.metrics is not None
                ],
            ),
            epsilon=epsilon_by_round(self._store, find_run(self._store, record.run)).get(
                record.number
            ),
            **self._judged(record),
        )
        return row, tuple(devices)

    def _counted(self, run: str, number: int) -> tuple[list[TaskRecord], int]:
        """The tasks that count in a round, late ones with them, and the bytes of their updates and
        of what it sent.
        """
        own = self._store.tasks(run, number)
        weights = {
            task.weights.digest: task.weights.size for task in own
        }  # what several devices share is sent once
        found = [*own]
        if not self._context.keeps(Trait.ONE_VERSION):
            found += self._store.late_tasks(run, number)
        counted = [
            task
            for task in found
            if task.screening is None or task.screening.round in {None, number}
        ]
        return counted, sum(weights.values()) + sum(task.update_size or 0 for task in counted)

    def _judged(self, record: RoundRecord) -> dict[str, float]:
        wanted = bool(self._judges.others) and record.evaluation is not None
        version = self._store.version(record.run, record.version + 1) if wanted else None
        return (
            {}
            if version is None
            else {name: of(version, self._blobs) for name, of in self._judges.others.items()}
        )

    def _local_accuracy(
        self, record: RoundRecord, found: Sequence[Evaluation | None]
    ) -> float | None:
        """Of the global version where the devices have parts of the test set, else of their own
        models.
        """
        if self._judges.local is not None and record.evaluation is not None:
            version = self._store.version(record.run, record.version + 1)
            return None if version is None else self._judges.local(version, self._blobs)
        own = [
            (item.accuracy, item.examples)
            for item in found
            if item is not None and item.accuracy is not None
        ]
        return (
            sum(share * count for share, count in own) / sum(count for _, count in own)
            if own
            else None
        )


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

    A folder whose simulation is finished is continued if the configuration asks for more rounds,
    and read if not. Paths of the configuration are absolute; `stage` is told what is being
    prepared, `watch` every closed round.

    Returns:
        How it ended; its status is ``failed`` or ``stopped`` where that is so, with the reason.

    Raises:
        ConfigError: a setting is wrong, or the folder holds another simulation, or one that is
            running.
        ShoalError: it cannot begin; an OSError where its folder cannot be made.
    """
    config.out.mkdir(parents=True, exist_ok=True, mode=0o700)
    taken = f"another simulation works in {config.out}: wait for it, or give this one an `out` of its own"
    with (
        held(config.out, taken),
        contextlib.closing(Store(config.out / "store", durable=False)) as store,
    ):
        _claim(config, begun=bool(store.runs()))
        prepared = prepare(config, stage)
        fleet = config.fleet(
            artifacts=prepared.artifacts,
            weights=prepared.weights,
            test_set=prepared.test_set,
        )
        return _Simulation(config, prepared, fleet, store, watch).run(listener)


def _claim(config: SimulationConfig, *, begun: bool) -> None:
    """See that the folder holds this very simulation, with the same files, or none that has begun."""
    path = config.out / _CONFIG
    files = config.out / _FILES
    functions = [Path(item.rpartition(":")[0]) for item in config.data.changes if ":" in item]
    named = (config.model.models, config.model.weights, config.clock.table, *functions)
    given = {
        str(name): blob_digest(Path(name).read_bytes())
        for name in named
        if name and Path(name).is_file()
    }
    falls = config.train.rate is not None and config.train.rate.kind in {
        "cosine",
        "linear",
    }
    further = (
        set() if falls or not keeps(config, Trait.ONE_VERSION) else {"rounds"}
    )  # where earlier rounds stay as they are
    but: Mapping[str, bool | set[str]] = {
        **dict.fromkeys(HOW_COMPUTED, True),
        "round": further,
    }
    mine = config.model_dump(mode="json", exclude=but)
    if path.is_file():
        # Read as a configuration, so that keys which came later have their defaults.
        try:
            stored = SimulationConfig.model_validate_json(path.read_bytes(), context=STORED)
        except ValueError as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); take another `out`, or remove the folder"
            ) from error
        before = stored.model_dump(mode="json", exclude=but)
        known = json.loads(files.read_bytes()) if files.is_file() else given
        changed = [f"[{key}]" for key in mine if mine[key] != before.get(key)]
        changed += [name for name in given if given[name] != known.get(name, given[name])]
        if changed and begun:
            raise ConfigError(
                f"{config.out} holds a simulation with another {changed[0]}; take another `out`, or remove the folder"
            )
    for made in () if begun else (*config.out.glob("parts*.npz"), config.out / "init.safetensors"):
        made.unlink(
            missing_ok=True
        )  # of a start that failed, and that may have been of something else
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
        context = prepare_run(
            known[0].id if known else new_run_id(), self._fleet, artifacts, seeded
        )
        if (context.instructions("train", 0).routine != "train") != (
            self._config.own_models is not None
        ):
            need = "needs" if self._config.own_models is None else "has no use for"
            raise ConfigError(f"strategy {context.strategy.name} {need} [own_models]")
        if not known:
            self._store.add_run(context.initial_record(), first_version(context, self._blobs))
        parts = Parts.load(self._prepared.parts)
        fleet = VirtualFleet.from_table(
            self._config.devices,
            [len(held) for held in parts.train],
            load_clock(self._config.clock),
            artifacts.layout,
            seed=self._config.seed,
        )
        own_models = self._config.own_models is not None
        labels = np.load(self._prepared.data / "train_y.npy", mmap_mode="r")
        judges = chosen_judges(
            self._config.evaluation, context, parts, labels, own_models=own_models
        )
        rows = RowMaker(context, self._store, self._blobs, fleet, judges)
        closed = [
            item for item in self._store.rounds(context.run) if item.state is RoundState.CLOSED
        ]
        with HistoryWriter(self._folder, until=closed[-1].number if closed else 0) as history:

            def add(record: RoundRecord) -> None:
                row, devices = rows.make(record, history.rows[-1] if history.rows else None)
                history.add(row, devices)
                if (
                    judges.local is not None or judges.others
                ):  # they look at the version, which is not kept for long
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

            finished = self._work(
                context,
                Reporter(context.run, self._store, told),
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
        table = self._config.engine
        own = self._config.own_models
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
