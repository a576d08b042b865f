"""A worker of the Ray engine: virtual devices in an actor, on any machine of the cluster.

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
# slices of weights at a time: those of a usual number of tiers, which many devices are sent alike
_KEPT_BLOBS = 8


def versions() -> str:
    """What must be the same on every machine for the same results."""
    return f"Shoal {runtime_version()}, onnxruntime {installed_backends().get('onnx', 'none')}"


class Greeting(FrozenModel):
    """What an actor says first: versions, its machine, and whether it sees the simulation's folder."""

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
        self._held: list[str] = []

    def greet(self, setup: bytes, marker: str) -> bytes:
        """Answer a `WorkerSetup` with a `Greeting`.

        The marker is a file that the engine has just written.
        """
        given = WorkerSetup.model_validate_json(setup)
        there = (Path(marker), given.artifacts, given.data, given.parts, given.blobs)
        shares = all(path.exists() for path in there)
        self._setup = given
        greeting = Greeting(
            versions=versions(), machine=ray.util.get_node_ip_address(), shares=shares
        )
        return greeting.model_dump_json().encode()

    def unpack(self, setup: bytes, files: Mapping[str, Sequence[Any]]) -> None:
        """Work in places of its own instead of in the simulation's folder, with the packing list's
        files in pieces.

        Raises:
            StorageError: the disk is full.
        """
        shared = self._folder / "shared"
        for place, pieces in files.items():
            path = shared / place
            if not path.is_file():  # or another actor of this machine has fetched it
                write_atomically(path, b"".join(ray.get(list(pieces), timeout=FETCH_SECONDS)))
        self._setup = relocated(WorkerSetup.model_validate_json(setup), shared, self._own)

    def work(
        self,
        order: bytes,
        weights: Mapping[str, Any],
        states: Mapping[str, Mapping[str, bytes]],
    ) -> Answer:
        """Do a `WorkOrder`, with weights in Ray's store by digest and what devices keep unless the
        folder is shared.
        """
        if self._setup is None:
            raise AssertionError("an actor is greeted first")
        asked = WorkOrder.model_validate_json(order)
        shares = not self._setup.updates.is_relative_to(self._own)
        try:
            if not shares:
                self._receive(self._setup, weights, states)
            self._devices = self._devices or VirtualDevices(self._setup)
            found = self._devices.work(asked)
        except ShoalError as error:
            found = [
                Failed(task=item.task, detail=str(error), exit_code=error.exit_code)
                for item in asked.items
            ]
        results = tuple(result.model_dump_json().encode() for result in found)
        return Answer(results) if shares else self._parcel(self._setup, results, found, states)

    def clear(self) -> None:
        """Remove what it keeps on its machine."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)

    def _receive(
        self,
        setup: WorkerSetup,
        weights: Mapping[str, Any],
        states: Mapping[str, Mapping[str, bytes]],
    ) -> None:
        blobs = BlobStore(setup.blobs, durable=False)
        for digest, reference in weights.items():
            if not blobs.has(digest):
                blobs.put(ray.get(reference, timeout=FETCH_SECONDS))
        self._held = [digest for digest in self._held if digest not in weights] + list(weights)
        # An order that needs more than are kept still has all of its own.
        for digest in self._held[: max(0, len(self._held) - max(_KEPT_BLOBS, len(weights)))]:
            blobs.path(digest).unlink(missing_ok=True)
            self._held.remove(digest)
        for device, files in states.items():
            write_state(setup.devices / device, files)

    def _parcel(
        self,
        setup: WorkerSetup,
        results: tuple[bytes, ...],
        found: Sequence[Finished | Failed],
        states: Mapping[str, Mapping[str, bytes]],
    ) -> Answer:
        """Pack what the order left on this machine, and remove it."""
        store = BlobStore(setup.updates, durable=False)
        updates = {}
        for result in found:
            if isinstance(result, Finished):
                updates[result.update.digest] = store.read(result.update.digest)
                store.path(result.update.digest).unlink()
        kept = {device: read_state(setup.devices / device) for device in states}
        for device in states:
            write_state(setup.devices / device, {})
        return Answer(results, updates, kept)
