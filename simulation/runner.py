"""Running a simulation: the server's coordinator with virtual devices.

    result = simulate(load_config(path, SimulationConfig).relative_to(path.parent))

Planning, sampling, folding, merging, judging, the store and going on after a kill are `broker_server`'s; training and
statistics are `device_runtime`'s. What is different from a fleet is the way between them, and time: `RoundRow` tells
how long the round would have taken on the emulated devices.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker_server.artifacts import load_artifacts
from broker_server.config import FleetConfig
from broker_server.coordinator import Coordinator, Services
from broker_server.desk import StopRequested
from broker_server.evaluation import Evaluator
from broker_server.launch import stop_on_signals
from broker_server.machine import RoundState
from broker_server.merging import first_version
from broker_server.planning import RunContext, prepare_run
from broker_server.reporting import Reporter
from broker_server.server import new_run_id
from broker_server.store import RoundRecord, RunRecord, Store
from broker_server.test_set import load_test_set
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.errors import ConfigError
from fleet_protocol.link import WireCount
from fleet_protocol.topics import Topics
from simulation.board_times import BoardTimes
from simulation.clock import load_clock
from simulation.config import FLEET, HOW_COMPUTED, SimulationConfig
from simulation.engines import open_engine
from simulation.history import HistoryWriter, RoundRow
from simulation.local_judge import LocalJudge
from simulation.matthews import MatthewsJudge
from simulation.perplexity import PerplexityJudge
from simulation.preparing import Parts, Prepared, prepare
from simulation.rows import Judge, RowMaker
from simulation.virtual_desk import VirtualBoard, VirtualDesk
from simulation.work import WorkerSetup

__all__ = ["Listener", "SimulationResult", "simulate"]

Listener = Callable[[control.RunEvent], None]

_CONFIG = "config.json"


@dataclass(frozen=True)
class SimulationResult:
    """How a simulation ended.

    Attributes:
        run: id of the run in the store.
        folder: of the results.
        finished: as the coordinator tells it; ``stopped`` after Ctrl-C.
        rounds: one row per closed round, those of earlier processes included.
    """

    run: str
    folder: Path
    finished: control.RunFinished
    rounds: tuple[RoundRow, ...]


def simulate(
    config: SimulationConfig,
    *,
    listener: Listener | None = None,
    stage: Callable[[str], None] = lambda _text: None,
    watch: Callable[[RoundRow], None] = lambda _row: None,
) -> SimulationResult:
    """Run a simulation, or go on with the one in its folder.

    A folder whose simulation is finished is continued if the configuration asks for more rounds, and read if not.

    Args:
        config: with absolute paths.
        listener: called with every event of the run.
        stage: told what is being prepared.
        watch: called with every closed round.

    Returns:
        How it ended; its status is ``failed`` or ``stopped`` where that is so, with the reason.

    Raises:
        ConfigError: a setting is wrong, or the folder holds another simulation.
        ShoalError: it cannot begin.
    """
    _claim(config)
    prepared = prepare(config, stage)
    fleet = config.fleet(artifacts=prepared.artifacts, weights=prepared.weights, test_set=prepared.test_set)
    store = Store(fleet.store)
    try:
        return _Simulation(config, prepared, fleet, store, watch).run(listener)
    finally:
        store.close()


def _claim(config: SimulationConfig) -> None:
    """See that the folder is empty or holds this very simulation."""
    path = config.out / _CONFIG
    mine = json.loads(config.model_dump_json(exclude=set(HOW_COMPUTED)))
    if path.is_file():
        # Read as a configuration, so that keys which came later have their defaults.
        stored = SimulationConfig.model_validate_json(path.read_bytes())
        before = json.loads(stored.model_dump_json(exclude=set(HOW_COMPUTED)))
        changed = [key for key in mine if _without_rounds(key, mine[key]) != _without_rounds(key, before.get(key))]
        if changed:
            raise ConfigError(
                f"{config.out} holds a simulation with another [{changed[0]}]; take another `out`, or remove the folder"
            )
    write_atomically(path, json.dumps(mine, indent=1).encode())


def _without_rounds(key: str, table: object) -> object:
    if key == "round" and isinstance(table, Mapping):
        return {name: value for name, value in table.items() if name != "rounds"}
    return table


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
        context = prepare_run(known[0].id if known else new_run_id(), self._fleet, artifacts)
        if not known:
            self._store.add_run(self._record(context), first_version(context, self._blobs))
        parts = Parts.load(self._prepared.parts)
        named = zip(self._config.devices.ids, self._config.devices.kinds, parts.train, strict=True)
        boards = [
            VirtualBoard(name, index, len(held), kind.max_width, kind.max_depth)
            for index, (name, kind, held) in enumerate(named)
        ]
        times = BoardTimes(load_clock(self._config.clock), self._config.devices.kinds, artifacts.layout)
        judging, evaluator, local = self._fleet.evaluation, None, None
        judges: dict[str, Judge] = {}
        if judging.data is not None:
            data = load_test_set(judging.data, context.judged.manifest)
            evaluator = Evaluator(context.judged, data, batch_size=judging.batch_size, threads=judging.threads)
            if self._config.evaluation.local and not self._mutual:
                local = LocalJudge(context, evaluator, data, parts)
            if self._config.evaluation.matthews:
                judges["matthews"] = MatthewsJudge(context, evaluator, data)
            if samples := self._config.evaluation.perplexity:
                judges["perplexity"] = PerplexityJudge(context, evaluator, data, samples)
        rows = RowMaker(context, self._store, self._blobs, times, boards, local, judges)
        closed = [item for item in self._store.rounds(context.run) if item.state is RoundState.CLOSED]
        with HistoryWriter(self._folder, until=closed[-1].number if closed else 0) as history:

            def add(record: RoundRecord) -> None:
                row, devices = rows.make(record, history.rows[-1].simulated_total if history.rows else 0.0)
                history.add(row, devices)
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

            reporter = Reporter(context.run, self._store, None, Topics(FLEET), told)
            finished = self._work(context, reporter, boards, times, evaluator)
        return SimulationResult(context.run, self._folder, finished, history.rows)

    @property
    def _mutual(self) -> bool:
        """Whether devices have models of their own, which are judged instead of the global one."""
        return self._config.personal is not None

    def _record(self, context: RunContext) -> RunRecord:
        return RunRecord(
            id=context.run,
            fleet=FLEET,
            arch=self._fleet.model.arch,
            config=self._fleet.model_dump_json(),
            status="running",
            detail=None,
            created_at=time.time(),
            ended_at=None,
            wire_bytes=0,
            payload_bytes=0,
        )

    def _work(
        self,
        context: RunContext,
        reporter: Reporter,
        boards: Sequence[VirtualBoard],
        times: BoardTimes,
        evaluator: Evaluator | None,
    ) -> control.RunFinished:
        table = self._config.engine
        setup = WorkerSetup(
            artifacts=self._prepared.artifacts,
            arch=self._config.model.arch,
            data=self._prepared.data,
            parts=self._prepared.parts,
            blobs=self._blobs.root,
            updates=self._updates.root,
            devices=self._folder / "devices",
            holdout=self._config.evaluation.holdout,
            augment=self._config.data.augment,
            backend=table.backend,
            device=table.device,
            settings=json.dumps(dict(self._prepared.settings)),
            models=self._config.model.models,
            personal=self._prepared.personal,
            tasks=() if self._config.personal is None else tuple(item.labels for item in self._config.personal.models),
            own_test=self._config.evaluation.local and self._mutual,
        )
        with contextlib.closing(open_engine(table, setup)) as engine, stop_on_signals(self._stopping.set):
            desk = VirtualDesk(
                boards=boards,
                engine=engine,
                times=times,
                store=self._store,
                updates=self._updates,
                reporter=reporter,
                group=table.group,
                stopping=self._stopping,
            )
            services = Services(
                desk=desk,
                store=self._store,
                blobs=self._blobs,
                updates=self._updates,
                forget=lambda _task: None,
                upload_bytes=desk.take_upload_bytes,
                wire=lambda: WireCount(0, 0),
            )
            coordinator = Coordinator(context, services, evaluator)
            try:
                return coordinator.run()
            except StopRequested:
                return coordinator.stopped()
