"""Runs virtual devices in an actor of the Ray engine, on any machine of the cluster.

Inputs and outputs are JSON and bytes. An actor that can access the simulation's folder, locally or
on a shared file system, reads and writes there. Other actors receive files and weights as objects
of Ray's store, fetch the missing ones, and send updates back.
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
# Number of kept slices of weights: enough for a usual number of tiers, because many devices get the
# same slice.
_KEPT_BLOBS = 8


def versions() -> str:
    """Return the versions that must be equal on all machines for equal results."""
    return f"Shoal {runtime_version()}, onnxruntime {installed_backends().get('onnx', 'none')}"


class Greeting(FrozenModel):
    """The first message of an actor.

    Attributes:
        versions: its installed versions.
        machine: address of its machine.
        shares: whether it can access the simulation's folder.
    """

    versions: str
    machine: str
    shares: bool


@dataclass(frozen=True)
class OrderAnswer:
    """The answer to an order.

    Attributes:
        results: `Finished` or `Failed` of every item, as JSON.
        updates: content of the updates by digest, from an actor without access to the folder.
        states: states that devices keep between rounds, by device and name; likewise.
    """

    results: tuple[bytes, ...]
    updates: Mapping[str, bytes] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)


class RayWorker:
    """Runs as a Ray actor; actors of one session on one machine share the constant files."""

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
        # Another machine may have a folder at the same path, but it lacks the marker.
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
        """Work in a private folder instead of the simulation's.

        Args:
            setup: a `WorkerSetup` as JSON.
            files: references to the chunks of the packing list's files, by path.

        Raises:
            StorageError: the disk is full.
        """
        shared = self._folder / "shared"
        for place, chunks in files.items():
            path = shared / place
            # Several actors of one machine share the constant files.
            if not path.is_file():  # or another actor of this machine has fetched it
                content = b"".join(ray.get(list(chunks), timeout=FETCH_SECONDS))
                write_atomically(path, content)
        self._setup = relocated(WorkerSetup.model_validate_json(setup), shared, self._own)

    def work(
        self,
        order: bytes,
        weights: Mapping[str, Any],
        states: Mapping[str, Mapping[str, bytes]],
    ) -> OrderAnswer:
        """Process a `WorkOrder`.

        Args:
            order: the order as JSON.
            weights: references to weights by digest; empty if the folder is shared.
            states: states that devices keep between rounds, by device and name; likewise.
        """
        if self._setup is None:
            raise AssertionError("the engine must greet an actor first; this is a bug")
        work_order = WorkOrder.model_validate_json(order)
        # The setup was relocated into the private folder if nothing is shared.
        shares = not self._setup.updates.is_relative_to(self._own)
        results: list[Finished | Failed] = []
        try:
            if not shares:
                self._unpack_order(self._setup, weights, states)
            # Created with the first order, when all files are there.
            self._devices = self._devices or VirtualDevices(self._setup)
            results += self._devices.work(work_order)
        # An error here concerns the whole order, so each of its tasks failed.
        except ShoalError as error:
            for task in work_order.tasks:
                detail = str(error)
                results.append(Failed(task=task.id, detail=detail, exit_code=error.exit_code))
        messages = tuple(result.model_dump_json().encode() for result in results)
        if shares:
            return OrderAnswer(messages)
        return OrderAnswer(
            results=messages,
            updates=_pop_updates(self._setup, results),
            states=_pop_states(self._setup, states),
        )

    def clear(self) -> None:
        """Remove its files from its machine."""
        # Another actor of the machine may have removed the shared files already.
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
            # Used weights become the newest.
            if digest in self._kept:
                self._kept.remove(digest)
            self._kept.append(digest)
        # An order that needs more weights than are kept still has all that it needs.
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
            # The engine has the update now, and the folder would grow without end.
            store.path(digest).unlink()
    return updates


def _pop_states(
    setup: WorkerSetup, states: Mapping[str, Mapping[str, bytes]]
) -> dict[str, dict[str, bytes]]:
    """Return the states of the devices of an order, and remove them from this machine."""
    kept = {}
    for device in states:
        folder = setup.devices / device
        kept[device] = read_state(folder)
        # The next order of the device may go to another machine.
        write_state(folder, {})
    return kept
