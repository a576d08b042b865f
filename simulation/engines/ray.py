"""Computes on actors of a Ray cluster, one CPU each, with the same results as the local engine.

An actor that dies (out of memory, or with its machine) is replaced, and its work is repeated. Tasks
are pure functions of their orders, so the repetition does not change results. Every machine needs
the same versions of Shoal, onnxruntime, Python and Ray; Ray itself checks the last two.
"""

import contextlib
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from device_runtime.board import available_cores
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.errors import BlobError, ConfigError, TransportError
from simulation.device_tables import EngineTable
from simulation.engines.local import WorkerDiedError
from simulation.engines.parcel import read_state, write_state
from simulation.orders import Failed, Finished, WorkerSetup, WorkOrder

try:
    import ray
except ModuleNotFoundError as error:
    raise ConfigError('[engine] kind = "ray" needs Ray: pip install "shoal[ray]"') from error

from simulation.engines.cluster import connect, disconnect
from simulation.engines.ray_objects import RayObjects
from simulation.engines.ray_worker import Greeting, OrderAnswer, RayWorker, versions

_ORDERS_PER_ACTOR = 2
"""Orders that an actor has at once, so that it does not wait for the network."""
_START_SECONDS = 120.0
_END_SECONDS = 5.0
_RESULT: TypeAdapter[Finished | Failed] = TypeAdapter(Finished | Failed)


class _SentOrder(NamedTuple):
    """An order of an actor, and Ray's reference to its answer."""

    order: WorkOrder
    answer: Any


@dataclass
class _Actor:
    """One actor.

    Attributes:
        handle: Ray's handle of the actor.
        shares: whether it can access the simulation's folder.
        machine: address of the machine that it runs on.
        orders: its orders; it works on the first.
    """

    handle: Any
    shares: bool = True
    machine: str = "?"
    orders: deque[_SentOrder] = field(default_factory=deque)


class RayEngine:
    """Workers on a Ray cluster.

    Args:
        config: ``address`` and ``workers``; 0 workers are one per CPU of the cluster, or per GPU
            with ``device = "cuda"``.
        setup: the setup of each worker.
        shared: False treats all actors as without access to the folder; otherwise access is
            detected.
        start_seconds: longest time until the actors have started.

    Raises:
        ConfigError: a machine of the cluster has different versions, or lacks a required GPU.
        TransportError: the cluster is unreachable, or has no resources for this many actors.
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
        # Several simulations may use one machine, whose temporary folder has their files apart.
        self._session = uuid.uuid4().hex
        # A simulation that loses power computes its round again, so nothing is synced.
        self._updates = BlobStore(setup.updates, durable=False)
        self._objects = RayObjects(setup)
        self._waiting: deque[WorkOrder] = deque()
        self._losses: dict[str, int] = {}
        self._actors: list[_Actor] = []
        self._connected = connect(config.address, workers=config.workers or available_cores())
        try:
            count, self._gpus = shares_of(config, ray.cluster_resources())
            self._actors = self._start(count)
        # Ctrl-C while actors start must not leave them on the cluster.
        except BaseException:
            self.close()
            raise

    # Actors.

    def _start(self, count: int) -> list[_Actor]:
        """Start actors and wait until all of them are ready."""
        remote = ray.remote(RayWorker).options(
            num_cpus=1,
            num_gpus=self._gpus,
            max_restarts=0,  # the engine replaces actors itself and counts their deaths
            scheduling_strategy="SPREAD",
        )
        setup = self._setup.model_dump_json().encode()
        actors = [_Actor(remote.remote(self._session)) for _ in range(count)]
        with self._marker() as marker:
            calls = [actor.handle.greet.remote(setup, str(marker)) for actor in actors]
            messages = self._wait_for(calls)
        for actor, message in zip(actors, messages, strict=True):
            greeting = Greeting.model_validate_json(message)
            _check_versions(greeting)
            actor.machine = greeting.machine
            actor.shares = greeting.shares and self._may_share
        # Files travel only to machines that do not see the folder.
        calls = []
        for actor in actors:
            if not actor.shares:
                calls.append(actor.handle.unpack.remote(setup, self._objects.files()))
        self._wait_for(calls)
        return actors

    def _wait_for(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for the answers of actors that are starting."""
        try:
            return list(ray.get(list(calls), timeout=self._start_seconds))
        except ray.exceptions.GetTimeoutError as error:
            all_resources = _describe(ray.cluster_resources())
            free_resources = _describe(ray.available_resources())
            raise TransportError(
                f"{len(calls)} workers were not ready within {self._start_seconds:g} s; the Ray"
                f" cluster has {all_resources}, of which {free_resources} are free; use fewer"
                " workers ([engine] workers)"
            ) from error
        except ray.exceptions.RayError as error:
            raise TransportError(
                f"cannot start a worker on the Ray cluster: {error}\nevery machine of the"
                f" cluster needs {versions()}"
            ) from error

    @contextlib.contextmanager
    def _marker(self) -> Iterator[Path]:
        """Create a file that an actor can read only if it shares the folder."""
        path = self._setup.updates / f".{self._session}"
        write_atomically(path, b"")
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _replace(self, actor: _Actor, error: Exception) -> None:
        """Replace a dead actor; its orders come before all others."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor.handle)
        self._count_loss(actor, error)
        # Backwards, so that they stand in their old order at the front of the queue.
        for sent in reversed(actor.orders):
            self._waiting.appendleft(sent.order)
        actor.orders.clear()
        place = self._actors.index(actor)
        self._actors[place] = self._start(1)[0]

    def _count_loss(self, actor: _Actor, error: Exception) -> None:
        """Record that an actor died during its first order; raise an error the second time."""
        tasks = actor.orders[0].order.tasks
        first = tasks[0]
        losses = self._losses.get(first.id, 0) + 1
        self._losses[first.id] = losses
        # Once may be chance; an order that kills two workers would kill all of them.
        if losses > 1:
            devices = ", ".join(task.device for task in tasks)
            raise WorkerDiedError(
                f"a worker died twice during round {first.round}, {devices} ({first.tier}), the"
                f" last time on {actor.machine}: {error}; if memory ran out, use fewer workers"
                " ([engine] workers)"
            ) from error

    # Work.

    def submit(self, orders: Sequence[WorkOrder]) -> None:
        """Add orders; see `simulation.orders.Engine`."""
        self._waiting.extend(orders)
        open_orders = list(self._waiting)
        for actor in self._actors:
            for sent in actor.orders:
                open_orders.append(sent.order)
        needed: set[str] = set()
        for order in open_orders:
            needed.update(_weight_digests(order))
        self._objects.keep_weights(needed)
        self._hand_out()

    def _hand_out(self) -> None:
        """Send waiting orders to actors that have few, first to those that have none."""
        # One to everybody before anybody gets a second.
        for depth in range(_ORDERS_PER_ACTOR):
            for actor in self._actors:
                if self._waiting and len(actor.orders) == depth:
                    self._send(actor, self._waiting.popleft())

    def _send(self, actor: _Actor, order: WorkOrder) -> None:
        """Send an order to an actor, with its data if the actor cannot access the folder."""
        weights: dict[str, Any] = {}
        states: dict[str, dict[str, bytes]] = {}
        if not actor.shares:
            weights = self._objects.weights(_weight_digests(order))
            for task in order.tasks:
                states[task.device] = read_state(self._setup.devices / task.device)
        message = order.model_dump_json().encode()
        answer = actor.handle.work.remote(message, weights, states)
        actor.orders.append(_SentOrder(order, answer))

    def receive(self, timeout_seconds: float) -> list[Finished | Failed]:
        """Wait for results; see `simulation.orders.Engine`.

        Raises:
            WorkerDiedError: an actor died during an order for the second time.
            TransportError: a dead actor cannot be replaced.
            BlobError: an update was damaged in transit.
        """
        under_way = [actor.orders[0].answer for actor in self._actors if actor.orders]
        if not under_way:
            return []
        ray.wait(under_way, num_returns=1, timeout=timeout_seconds)
        results: list[Finished | Failed] = []
        # A copy, because dead actors are replaced in the list.
        for actor in tuple(self._actors):
            results += self._results_of(actor)
        self._hand_out()
        return results

    def _results_of(self, actor: _Actor) -> list[Finished | Failed]:
        """Return the available answers of an actor, without waiting."""
        results: list[Finished | Failed] = []
        while actor.orders:
            reference = actor.orders[0].answer
            ready, _ = ray.wait([reference], timeout=0)
            if not ready:
                break
            try:
                answer: OrderAnswer = ray.get(reference, timeout=_END_SECONDS)
            except ray.exceptions.RayError as error:
                if _is_program_error(error):
                    raise
                self._replace(actor, error)
                break
            self._store(answer)
            for result in answer.results:
                results.append(_RESULT.validate_json(result))
            actor.orders.popleft()
        return results

    def _store(self, answer: OrderAnswer) -> None:
        """Write updates and the states of devices into the simulation's folder."""
        for digest, content in answer.updates.items():
            # The store names content by its digest, which is what the actor has named.
            if self._updates.put(content) != digest:
                raise BlobError(
                    f"update {digest} was damaged on its way from the Ray cluster; start the"
                    " simulation again to resume it"
                )
        for device, files in answer.states.items():
            write_state(self._setup.devices / device, files)

    def close(self) -> None:
        """Stop the workers; their current work is lost.

        A busy actor leaves its copy of the files in the temporary folder of its machine.
        """
        calls = []
        for actor in self._actors:
            if not actor.shares and not actor.orders:
                calls.append(actor.handle.clear.remote())
        if calls:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.wait(calls, num_returns=len(calls), timeout=_END_SECONDS)
        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor.handle)
        self._actors = []
        self._objects.clear()
        if self._connected:
            self._connected = False
            disconnect()


def shares_of(config: EngineTable, resources: dict[str, float]) -> tuple[int, float]:
    """Return the number of actors to start, and the share of a GPU for each.

    Raises:
        ConfigError: a GPU is required, but the cluster has none.
    """
    if config.device != "cuda":
        return config.workers or max(1, int(resources.get("CPU", 1))), 0.0
    gpus = int(resources.get("GPU", 0))
    if not gpus:
        raise ConfigError(
            '[engine] device = "cuda": the Ray cluster has no GPU; use device = "cpu"'
        )
    count = config.workers or gpus
    if count <= gpus:
        return count, 1.0
    # Ray takes a fraction from a single GPU, so each GPU must fit a whole number of them.
    actors_per_gpu = -(-count // gpus)
    return count, 1.0 / actors_per_gpu


def _check_versions(greeting: Greeting) -> None:
    """Check that an actor has this machine's versions; raises a ConfigError if not."""
    if greeting.versions != versions():
        raise ConfigError(
            f"{greeting.machine} of the Ray cluster has {greeting.versions}, but this machine"
            f" has {versions()}; results would depend on the machine, so install the same"
            " versions everywhere"
        )


def _weight_digests(order: WorkOrder) -> list[str]:
    """Return the digests of the weights of an order in its order, without duplicates."""
    return list(dict.fromkeys(task.weights.digest for task in order.tasks))


def _is_program_error(error: Exception) -> bool:
    """Return whether an error comes from an actor's code, not from Ray."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return False
    return not isinstance(error.cause, ray.exceptions.RayError)


def _describe(resources: dict[str, float]) -> str:
    """Return the resources of a cluster as text."""
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"
