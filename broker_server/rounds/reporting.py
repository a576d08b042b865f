"""What a run tells while it goes: values for whoever listens, and lines of the log in the store."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from broker_server.store import Store, TaskRecord
from fleet_protocol import control
from fleet_protocol.errors import RefusalReason
from fleet_protocol.messages import BlobRef, TaskMetrics

Listener = Callable[[control.RunEvent], None]

_LOGGED_IN_ALL, _LOGGED_PER_SECOND = (
    200,
    1,
)  # refusals of a run, so that neither do many
_LOGGED_REFUSALS = (
    20  # of one device for one reason in a run; a broken board must not fill the disk
)


class Reporter:
    """Reports one run."""

    def __init__(self, run: str, store: Store, listener: Listener | None = None) -> None:
        self.run = run
        self._store = store
        self._listener = listener
        self._began = time.monotonic()
        self._seen: Counter[tuple[str, RefusalReason, str]] = Counter()
        self._told = 0
        self._uncounted: Counter[tuple[str, RefusalReason, str]] = Counter()

    @property
    def seconds(self) -> float:
        """Time since the run started or was resumed."""
        return time.monotonic() - self._began

    @property
    def stamp(self) -> dict[str, Any]:
        """What every event of the run carries."""
        return {"run": self.run, "seconds": self.seconds}

    def emit(
        self, event: control.RunEvent, log: str | None = None, device: str | None = None
    ) -> None:
        """Tell displays what happened, and the log if it is worth a line, which may be about a
        device.
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
        """Write a line of the log that no display needs."""
        self._store.log(kind, detail, run=self.run, number=number, device=device)

    def received(
        self,
        task: TaskRecord,
        update: BlobRef,
        metrics: TaskMetrics,
        *,
        log: bool = True,
    ) -> None:
        """Tell that an update is checked and on the disk, with a line of the log where it is worth
        one.
        """
        same = {name: getattr(task, name) for name in ("round", "device", "kind", "tier")}
        event = control.UpdateReceived(**self.stamp, **same, size=update.size, metrics=metrics)
        self.emit(
            event,
            f"{task.kind} update of {update.size} bytes, {task.tier}" if log else None,
            task.device,
        )

    def refused(
        self,
        reason: RefusalReason,
        detail: str,
        *,
        device: str | None,
        number: int | None,
        by_device: bool = False,
    ) -> None:
        """Count a refusal, and log and show it unless it has been seen too often."""
        by: Literal["server", "device"] = "device" if by_device else "server"
        key = (device or "", reason, by)
        self._seen[key] += 1
        self._uncounted[key] += 1
        if (
            self._seen[key] > _LOGGED_REFUSALS
            or self._told >= _LOGGED_IN_ALL + _LOGGED_PER_SECOND * self.seconds
        ):
            return
        self._told += 1
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
        """Write what was refused since the last call.

        A flood is counted in memory and written now and then.
        """
        for (device, reason, by), times in self._uncounted.items():
            self._store.count_refusal(self.run, device, reason, by, times)
        self._uncounted.clear()
