"""Reports the events of a run: to a listener, and as log lines in the store."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from broker_server.store import Store, TaskRecord
from fleet_protocol import control
from fleet_protocol.errors import RefusalReason
from fleet_protocol.messages import BlobRef, TaskMetrics

Listener = Callable[[control.RunEvent], None]

# Refusals that a run logs: broken or hostile devices must not fill the disk.
_LOGGED_REFUSALS = 20  # of one device for one reason
_LOGGED_AT_ONCE = 200  # of all devices
_LOGGED_PER_SECOND = 1

RefusalKey = tuple[str, RefusalReason, str]
"""Device, reason, and the side that refused."""


class Reporter:
    """Reports one run."""

    def __init__(self, run: str, store: Store, listener: Listener | None = None) -> None:
        self.run = run
        self._store = store
        self._listener = listener
        self._began = time.monotonic()
        self._seen: Counter[RefusalKey] = Counter()
        self._logged_refusals = 0
        self._uncounted: Counter[RefusalKey] = Counter()

    @property
    def seconds(self) -> float:
        """Return the time since the run started or was resumed."""
        return time.monotonic() - self._began

    @property
    def stamp(self) -> dict[str, Any]:
        """Return the fields that every event of the run has."""
        return {"run": self.run, "seconds": self.seconds}

    def emit(
        self, event: control.RunEvent, log: str | None = None, device: str | None = None
    ) -> None:
        """Send an event to the listener.

        Args:
            event: what happened.
            log: a line for the log, if the event is worth one.
            device: device that the line concerns.
        """
        if log is not None:
            self._store.log(
                event.type,
                log,
                run=self.run,
                number=getattr(event, "round", None),
                device=device,
            )
        if self._listener is not None:
            self._listener(event)

    def note(
        self,
        kind: str,
        detail: str,
        number: int | None = None,
        device: str | None = None,
    ) -> None:
        """Write a log line that has no event."""
        self._store.log(kind, detail, run=self.run, number=number, device=device)

    def received(
        self,
        task: TaskRecord,
        update: BlobRef,
        metrics: TaskMetrics,
        *,
        log: bool = True,
    ) -> None:
        """Report that an update is checked and on disk.

        Args:
            task: task of the update.
            update: the update.
            metrics: metrics of the device.
            log: whether the log gets a line.
        """
        event = control.UpdateReceived(
            **self.stamp,
            round=task.round,
            device=task.device,
            kind=task.kind,
            tier=task.tier,
            size=update.size,
            metrics=metrics,
        )
        line = f"{task.kind} update of {update.size} bytes, {task.tier}" if log else None
        self.emit(event, line, task.device)

    def refused(
        self,
        reason: RefusalReason,
        detail: str,
        *,
        device: str | None,
        number: int | None,
        by_device: bool = False,
    ) -> None:
        """Count a refusal; log and report it unless it has occurred too often."""
        by: Literal["server", "device"] = "device" if by_device else "server"
        key = (device or "", reason, by)
        self._seen[key] += 1
        self._uncounted[key] += 1
        if (
            # The second bound is for a flood from many devices with new names.
            self._seen[key] > _LOGGED_REFUSALS
            or self._logged_refusals >= _LOGGED_AT_ONCE + _LOGGED_PER_SECOND * self.seconds
        ):
            return
        self._logged_refusals += 1
        # The last line of a device for a reason says that silence is not success.
        last = " (further ones are only counted)" if self._seen[key] == _LOGGED_REFUSALS else ""
        event = control.UpdateRefused(
            **self.stamp,
            round=number,
            device=device,
            by=by,
            reason=reason,
            detail=detail,
        )
        self.emit(event, f"{by} refused, {reason.value}: {detail}{last}", device)

    def count(self) -> None:
        """Store how many refusals there were since the last call.

        They are counted in memory between calls, so that a flood costs no writes.
        """
        for (device, reason, by), times in self._uncounted.items():
            self._store.count_refusal(self.run, device, reason, by, times)
        self._uncounted.clear()
