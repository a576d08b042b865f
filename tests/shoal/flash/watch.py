"""What a run of the emulated board leaves for the comparison with an undisturbed one."""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from broker_server.store import Store
from broker_server.store.update_store import UpdateStore
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.mapped_tensors import tensors_in

__all__ = ["Watch", "joined", "weights_of"]

BOARD = "pi-1"
_SECONDS_BETWEEN_CHECKS = 5.0
KEPT = ("train", 1)
"""Kind and round of the update that is compared; statistics of the same round come after it."""

Tensors = dict[str, NDArray[np.float32]]


class Watch:
    """The events of a run, from the server's thread, and a wait for some of them.

    The board's first update is kept: the server removes updates when their round ends, and writes
    over their files.
    """

    def __init__(self, store: Path) -> None:
        self.events: list[control.RunEvent] = []
        self.store = store
        self.kept = store.with_name(f"{store.name}-kept")
        self._changed = threading.Condition()

    def __call__(self, event: control.RunEvent) -> None:
        if _is_kept(event):
            shutil.copytree(self.store / "updates", self.kept, dirs_exist_ok=True)
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(
        self,
        condition: Callable[[control.RunEvent], bool],
        seconds: float,
        what: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for an event, and fail where the run ends without it, or the time does.

        Meanwhile `check` is called every few seconds; it raises if something else has failed.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._seen(condition) or self._has_ended(), _SECONDS_BETWEEN_CHECKS
            ):
                check()
                if time.monotonic() > deadline:
                    break
            if not self._seen(condition):
                raise TimeoutError(f"no {what} within {seconds} s; last: {self.events[-3:]}")

    def _seen(self, condition: Callable[[control.RunEvent], bool]) -> bool:
        return any(map(condition, self.events))

    def _has_ended(self) -> bool:
        return any(isinstance(event, control.RunFinished) for event in self.events)

    def update(self) -> Tensors:
        """What the board sent in the first round, which shares a file with other updates."""
        with contextlib.closing(Store(self.store)) as store:
            tasks = store.device_tasks(store.runs()[0].id, BOARD)
        digest = next(task.update_digest for task in tasks if (task.kind, task.round) == KEPT)
        with contextlib.closing(UpdateStore(self.kept)) as updates:
            return {name: np.array(value) for name, value in updates.tensors(digest).items()}

    def count(self, kind: type) -> int:
        """How often the board did something."""
        return sum(isinstance(event, kind) and event.device == BOARD for event in self.events)


def _is_kept(event: control.RunEvent) -> bool:
    if not isinstance(event, control.UpdateReceived) or event.device != BOARD:
        return False
    return (event.kind, event.round) == KEPT


def joined(event: control.RunEvent) -> bool:
    """Whether a round starts with the board: of the last device that a round waits for, nothing
    else tells.
    """
    return isinstance(event, control.RoundStarted) and BOARD in event.devices


def weights_of(store: Path) -> Tensors:
    """What the first round has learnt: later a maximum may fall to the other side, for the last bit
    of a sum.
    """
    with contextlib.closing(Store(store)) as opened:
        version = opened.version(opened.runs()[0].id, 1)
    return dict(tensors_in(BlobStore(store / "blobs").read(version.digest)))
