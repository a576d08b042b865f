"""Runs virtual devices in an actor of the Ray engine, on any machine of the cluster.

JSON and bytes go in and out. An actor that finds the simulation's folder on its own machine, or on
a file system that both share, reads and writes there; any other gets files and weights as objects
of Ray's store, fetches those it has not fetched yet, and sends updates back.
"""

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from device_runtime.board import installed_backends, runtime_version
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.errors import ShoalError
from fleet_protocol.frozen import FrozenModel
from simulation.engines.parcel import read_state, relocated, write_state
from simulation.orders import Failed, Finished, WorkerSetup, WorkOrder
from simulation.virtual_device import VirtualDevices

FETCH_SECONDS = 300.0
# Slices of weights at a time: those of a usual number of tiers, which many devices are sent alike.
_KEPT_BLOBS = 8


def versions() -> str:
    """Return what must be the same on every machine for the same results."""
    return f"Shoal {runtime_version()}, onnxruntime {installed_backends().get('onnx', 'none')}"


class Greeting(FrozenModel):
    """The first message of an actor.

    Attributes:
        versions: what it has installed.
        machine: address of its machine.
        shares: whether it sees the simulation's folder.
    """

    versions: str
    machine: str
    shares: bool


@dataclass(frozen=True)
class Answer:
    """What comes back for an order.

    Attributes:
        results: `Finished` or `Failed` of every item, as JSON.
        updates: content of the updates by digest, from an actor that does not share the folder.
        states: what devices keep between rounds, by device and name; likewise.
    """

    results: tuple[bytes, ...]
    updates: Mapping[str, bytes] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)


class RayWorker:
    """Runs as a Ray actor; those of one session and machine share the files that stay the same."""

    def __init__(self, session: str) -> None:
        self._folder = Path(tempfile.gettempdir()) / f"shoal-{session}"
        self._own = self._folder / uuid.uuid4().hex
        self._setup: WorkerSetup | None = None
        self._devices: VirtualDevices | None = None
        self._kept: list[str] = []  # digests of the weights on this machine, the oldest first

    def greet(self, setup: bytes, marker: str) -> bytes:
        """Answer a `WorkerSetup` with a `Greeting`.

        The marker is a file that the engine has just written.
        """
        self._setup = WorkerSetup.model_validate_json(setup)
        paths = (
            Path(marker),
            self._setup.artifacts,
            self._setup.data,
            self._setup.split,
            self._setup.blobs,
        )
        greeting = Greeting(
            versions=versions(),
            machine=ray.util.get_node_ip_address(),
            shares=all(path.exists() for path in paths),
        )
        return greeting.model_dump_json().encode()

    def unpack(self, setup: bytes, files: Mapping[str, Sequence[Any]]) -> None:
        """Work in a folder of its own instead of in the simulation's.

        Args:
            setup: a `WorkerSetup` as JSON.
            files: references of the chunks of the packing list's files, by place.

        Raises:
            StorageError: the disk is full.
        """
        shared = self._folder / "shared"
        for place, chunks in files.items():
            path = shared / place
            if not path.is_file():  # or another actor of this machine has fetched it
                content = b"".join(ray.get(list(chunks), timeout=FETCH_SECONDS))
                write_atomically(path, content)
        self._setup = relocated(WorkerSetup.model_validate_json(setup), shared, self._own)

    def work(
        self,
        order: bytes,
        weights: Mapping[str, Any],
        states: Mapping[str, Mapping[str, bytes]],
    ) -> Answer:
        """Do a `WorkOrder`.

        Args:
            order: as JSON.
            weights: references of weights by digest; none where the folder is shared.
            states: what devices keep between rounds, by device and name; likewise.
        """
        if self._setup is None:
            raise AssertionError("an actor is greeted first")
        work_order = WorkOrder.model_validate_json(order)
        shares = not self._setup.updates.is_relative_to(self._own)
        results: list[Finished | Failed] = []
        try:
            if not shares:
                self._unpack_order(self._setup, weights, states)
            self._devices = self._devices or VirtualDevices(self._setup)
            results += self._devices.work(work_order)
        except ShoalError as error:
            for task in work_order.tasks:
                detail = str(error)
                results.append(Failed(task=task.id, detail=detail, exit_code=error.exit_code))
        messages = tuple(result.model_dump_json().encode() for result in results)
        if shares:
            return Answer(messages)
        return Answer(
            results=messages,
            updates=_pop_updates(self._setup, results),
            states=_pop_states(self._setup, states),
        )

    def clear(self) -> None:
        """Remove what it keeps on its machine."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)

    def _unpack_order(
        self,
        setup: WorkerSetup,
        weights: Mapping[str, Any],
        states: Mapping[str, Mapping[str, bytes]],
    ) -> None:
        """Write the weights and states of an order to this machine, and drop the oldest weights."""
        blobs = BlobStore(setup.blobs, durable=False)
        for digest, reference in weights.items():
            if not blobs.has(digest):
                blobs.put(ray.get(reference, timeout=FETCH_SECONDS))
            if digest in self._kept:
                self._kept.remove(digest)
            self._kept.append(digest)
        # An order that needs more than are kept still has all of its own.
        most = max(_KEPT_BLOBS, len(weights))
        while len(self._kept) > most:
            blobs.path(self._kept.pop(0)).unlink(missing_ok=True)
        for device, files in states.items():
            write_state(setup.devices / device, files)


def _pop_updates(setup: WorkerSetup, results: Sequence[Finished | Failed]) -> dict[str, bytes]:
    """Return the updates of an order by digest, and remove them from this machine."""
    store = BlobStore(setup.updates, durable=False)
    updates = {}
    for result in results:
        if isinstance(result, Finished):
            digest = result.update.digest
            updates[digest] = store.read(digest)
            store.path(digest).unlink()
    return updates


def _pop_states(
    setup: WorkerSetup, states: Mapping[str, Mapping[str, bytes]]
) -> dict[str, dict[str, bytes]]:
    """Return what the devices of an order keep, and remove it from this machine."""
    kept = {}
    for device in states:
        folder = setup.devices / device
        kept[device] = read_state(folder)
        write_state(folder, {})
    return kept
