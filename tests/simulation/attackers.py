"""Virtual devices that lie: an engine that changes what some of them have computed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.blob_store import BlobStore
from fleet_protocol.mapped_tensors import blob_in, tensors_in
from fleet_protocol.messages import BlobRef
from fleet_protocol.weights import encode_weights
from simulation.orders import DeviceTask, Engine, Failed, Finished, WorkOrder

Attack = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
"""From what was sent and what was learnt to what is sent back."""


def times(factor: float) -> Attack:
    """Sends its update times a number; a negative one flips it."""
    return lambda sent, learnt: sent + np.float32(factor) * (learnt - sent)


class LyingEngine:
    """Wraps an engine.

    Args:
        engine: computes honestly.
        store: folder of the run's store.
        attacks: by device.
    """

    def __init__(self, engine: Engine, store: Path, attacks: Mapping[str, Attack]) -> None:
        self._engine = engine
        self._attacks = attacks
        self._items: dict[str, DeviceTask] = {}
        self._updates = BlobStore(store / "updates", durable=False)
        self._blobs = BlobStore(store / "blobs", durable=False)

    def submit(self, orders: Sequence[WorkOrder]) -> None:
        self._items.update({task.id: task for order in orders for task in order.tasks})
        self._engine.submit(orders)

    def receive(self, timeout_seconds: float) -> list[Finished | Failed]:
        return [self._lied(result) for result in self._engine.receive(timeout_seconds)]

    def close(self) -> None:
        self._engine.close()

    def _lied(self, result: Finished | Failed) -> Finished | Failed:
        item = self._items[result.task]
        attack = self._attacks.get(item.device)
        if attack is None or isinstance(result, Failed) or item.instructions.routine != "train":
            return result
        data = self._updates.path(result.update.digest).read_bytes()
        sent = tensors_in(self._blobs.path(item.weights.digest).read_bytes())
        learnt = tensors_in(data)
        lies = {
            name: attack(sent[name], value).astype(np.float32) for name, value in learnt.items()
        }
        changed = encode_weights(lies, blob_in(data)[0])
        update = BlobRef(
            digest=self._updates.put(changed),
            size=len(changed),
            chunk_bytes=result.update.chunk_bytes,
        )
        return result.model_copy(update={"update": update})
