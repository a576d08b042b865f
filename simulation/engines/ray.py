"""Actors on a Ray cluster, one CPU each; results are those of the local engine, to the bit.

An actor that dies - killed for memory, or with its machine - is replaced, and what it worked on is
computed once more. Tasks are functions of their orders, so the repetition changes nothing. Every
machine needs the same versions of Shoal, onnxruntime, Python and Ray; the last two are checked by
Ray itself.
"""

import contextlib
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from device_runtime.board import available_cores
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.errors import BlobError, ConfigError, TransportError
from simulation.engines.local import WorkerDiedError
from simulation.engines.parcel import packing_list, read_state, write_state
from simulation.orders import Failed, Finished, WorkerSetup, WorkOrder
from simulation.tables import EngineTable

try:
    import ray
except ModuleNotFoundError as error:
    raise ConfigError('[engine] kind = "ray" needs Ray: pip install "shoal[ray]"') from error

from simulation.engines.cluster import connect, disconnect
from simulation.engines.ray_worker import Answer, Greeting, RayWorker, versions

_AHEAD = 2  # orders an actor has at once, so that it need not wait for the way to it and back
_START_SECONDS = 120.0
_END_SECONDS = 5.0
_PIECE = (
    64 * 2**20
)  # bytes of a file in one object; Ray's store moves objects that do not fit to disk, one at a time
_RESULT: TypeAdapter[Finished | Failed] = TypeAdapter(Finished | Failed)


@dataclass
class _Actor:
    """One actor, and the orders it has with the references of their answers.

    The first is under way.
    """

    handle: Any
    shares: bool = True
    machine: str = "?"
    orders: deque[tuple[WorkOrder, Any]] = field(default_factory=deque)


class RayEngine:
    """Workers on a Ray cluster.

    Args:
        config: ``address`` and ``workers``; 0 workers are one per CPU of the cluster, or per GPU
            with ``device = "cuda"``.
        setup: what they are told.
        shared: False treats every actor as one that does not see the folder; otherwise that is
            found out.
        start_seconds: how long the actors may take to start.

    Raises:
        ConfigError: a machine of the cluster has other versions, or has no GPU where one is needed.
        TransportError: the cluster cannot be reached, or has no room for so many actors.
    """

    def __init__(
        self,
        config: EngineTable,
        setup: WorkerSetup,
        *,
        shared: bool = True,
        start_seconds: float = _START_SECONDS,
    ) -> None:
        self._setup = setup
        self._may_share = shared
        self._start_seconds = start_seconds
        self._session = uuid.uuid4().hex
        self._updates = BlobStore(setup.updates, durable=False)
        self._blobs = BlobStore(setup.blobs, durable=False)
        self._waiting: deque[WorkOrder] = deque()
        self._losses: dict[str, int] = {}
        self._actors: list[_Actor] = []
        self._files: dict[str, list[Any]] | None = None
        self._weights: dict[str, Any] = {}
        self._connected = connect(config.address, workers=config.workers or available_cores())
        try:
            self._count, self._gpus = shares_of(config, ray.cluster_resources())
            self._actors = self._start(self._count)
        except BaseException:
            self.close()
            raise

    # Actors.

    def _start(self, count: int) -> list[_Actor]:
        """Start actors and wait until all of them are ready."""
        remote = ray.remote(RayWorker).options(
            num_cpus=1,
            num_gpus=self._gpus,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        setup = self._setup.model_dump_json().encode()
        actors = [_Actor(remote.remote(self._session)) for _ in range(count)]
        with self._marker() as marker:
            found = self._ready([actor.handle.greet.remote(setup, str(marker)) for actor in actors])
        for actor, said in zip(actors, found, strict=True):
            greeting = Greeting.model_validate_json(said)
            if greeting.versions != versions():
                raise ConfigError(
                    f"{greeting.machine} of the Ray cluster has {greeting.versions}, this machine "
                    f"has {versions()};"
                    " results would depend on who computes them, so install the same everywhere"
                )
            actor.machine = greeting.machine
            actor.shares = greeting.shares and self._may_share
        self._ready(
            [
                actor.handle.unpack.remote(setup, self._packed())
                for actor in actors
                if not actor.shares
            ]
        )
        return actors

    def _ready(self, answers: Sequence[Any]) -> list[Any]:
        """The answers of actors that are starting."""
        try:
            return list(ray.get(list(answers), timeout=self._start_seconds))
        except ray.exceptions.GetTimeoutError as error:
            there = _resources(ray.cluster_resources())
            free = _resources(ray.available_resources())
            raise TransportError(
                f"{len(answers)} workers were not ready within {self._start_seconds:g} s; the Ray "
                f"cluster has {there},"
                f" of which {free} are free; take fewer ([engine] workers)"
            ) from error
        except ray.exceptions.RayError as error:
            raise TransportError(
                f"a worker could not be started on the Ray cluster: {error}\nevery machine of it "
                f"needs {versions()}"
            ) from error

    @contextlib.contextmanager
    def _marker(self) -> Iterator[Path]:
        """A file that only who shares the folder can see."""
        path = self._setup.updates / f".{self._session}"
        write_atomically(path, b"")
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _packed(self) -> dict[str, list[Any]]:
        """The files that do not change, as objects of Ray's store; equal ones once."""
        if self._files is None:
            known: dict[tuple[int, int], list[Any]] = {}
            self._files = {}
            for place, path in packing_list(self._setup).items():
                status = path.stat()
                key = (status.st_dev, status.st_ino)
                if key not in known:
                    known[key] = list(_pieces(path))
                self._files[place] = known[key]
        return self._files

    def _replace(self, actor: _Actor, error: Exception) -> None:
        """An actor is gone: put another in its place, and its orders before all others."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor.handle)
        first = actor.orders[0][0].items
        self._losses[first[0].task] = self._losses.get(first[0].task, 0) + 1
        if self._losses[first[0].task] > 1:
            devices = ", ".join(item.device for item in first)
            raise WorkerDiedError(
                f"a worker died twice over round {first[0].round}, {devices} ({first[0].tier}), "
                f"the last time on"
                f" {actor.machine}: {error}; with too little memory take fewer workers ([engine] "
                f"workers)"
            ) from error
        self._waiting.extendleft(order for order, _ in reversed(actor.orders))
        actor.orders.clear()
        (self._actors[self._actors.index(actor)],) = self._start(1)

    # Work.

    def submit(self, orders: Sequence[WorkOrder]) -> None:
        """Give it work; see `simulation.orders.Engine`."""
        self._waiting.extend(orders)
        needed = {
            item.weights.digest
            for order in (
                *self._waiting,
                *(order for actor in self._actors for order, _ in actor.orders),
            )
            for item in order.items
        }
        self._weights = {digest: kept for digest, kept in self._weights.items() if digest in needed}
        self._hand_out()

    def _hand_out(self) -> None:
        for depth in range(_AHEAD):
            for actor in self._actors:
                if self._waiting and len(actor.orders) == depth:
                    order = self._waiting.popleft()
                    weights, states = ({}, {}) if actor.shares else self._enclosed(order)
                    answer = actor.handle.work.remote(
                        order.model_dump_json().encode(), weights, states
                    )
                    actor.orders.append((order, answer))

    def _enclosed(self, order: WorkOrder) -> tuple[dict[str, Any], dict[str, dict[str, bytes]]]:
        """What an actor needs with an order that does not see the folder."""
        weights = {}
        for digest in dict.fromkeys(item.weights.digest for item in order.items):
            if digest not in self._weights:
                self._weights[digest] = ray.put(self._blobs.read(digest))
            weights[digest] = self._weights[digest]
        return weights, {
            item.device: read_state(self._setup.devices / item.device) for item in order.items
        }

    def take(self, timeout_seconds: float) -> list[Finished | Failed]:
        """Wait for results; see `simulation.orders.Engine`.

        Raises:
            WorkerDiedError: an actor died over an order for the second time.
            TransportError: one that died cannot be replaced.
            BlobError: an update was damaged on its way.
        """
        under_way = [actor.orders[0][1] for actor in self._actors if actor.orders]
        if not under_way:
            return []
        ray.wait(under_way, num_returns=1, timeout=timeout_seconds)
        found: list[Finished | Failed] = []
        for actor in tuple(self._actors):
            found += self._answers(actor)
        self._hand_out()
        return found

    def _answers(self, actor: _Actor) -> list[Finished | Failed]:
        """What an actor has answered by now, without waiting."""
        results: list[Finished | Failed] = []
        while actor.orders:
            ready, _ = ray.wait([actor.orders[0][1]], timeout=0)
            if not ready:
                break
            try:
                answer: Answer = ray.get(ready[0], timeout=_END_SECONDS)
            except ray.exceptions.RayError as error:
                if isinstance(error, ray.exceptions.RayTaskError) and not isinstance(
                    error.cause, ray.exceptions.RayError
                ):
                    raise  # an error in the program, with the actor's traceback
                self._replace(actor, error)
                break
            self._keep(answer)
            results += [_RESULT.validate_json(result) for result in answer.results]
            actor.orders.popleft()
        return results

    def _keep(self, answer: Answer) -> None:
        for digest, content in answer.updates.items():
            if self._updates.put(content) != digest:
                raise BlobError(
                    f"update {digest} was damaged on its way from the Ray cluster; start again to "
                    f"go on"
                )
        for device, files in answer.states.items():
            write_state(self._setup.devices / device, files)

    def close(self) -> None:
        """End the workers; what they work on is lost.

        An actor that is busy leaves its copy of the files in the temporary folder of its machine.
        """
        idle = [
            actor.handle.clear.remote()
            for actor in self._actors
            if not actor.shares and not actor.orders
        ]
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait(idle, num_returns=len(idle), timeout=_END_SECONDS) if idle else None
        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor.handle)
        self._actors = []
        self._weights = {}
        self._files = None
        if self._connected:
            self._connected = False
            disconnect()


def shares_of(config: EngineTable, resources: dict[str, float]) -> tuple[int, float]:
    """How many actors, and what share of a GPU each.

    A ConfigError where a GPU is needed and there is none.
    """
    if config.device != "cuda":
        return config.workers or max(1, int(resources.get("CPU", 1))), 0.0
    gpus = int(resources.get("GPU", 0))
    if not gpus:
        raise ConfigError(
            '[engine] device = "cuda": the Ray cluster has no GPU; take device = "cpu"'
        )
    count = config.workers or gpus
    # Ray deals fractions out of one GPU at a time, so each GPU must hold a whole number of them.
    return count, 1.0 if count <= gpus else 1.0 / -(-count // gpus)


def _resources(found: dict[str, float]) -> str:
    return f"{found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs"


def _pieces(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        yield ray.put(file.read(_PIECE))  # an empty file is one empty piece
        while piece := file.read(_PIECE):
            yield ray.put(piece)
