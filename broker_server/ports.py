"""What a coordinator needs of whoever asks the devices: over MQTT it is the `Desk`, in a simulation a virtual one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from broker_server.collecting import Collection
from broker_server.fleet import Fleet
from fleet_protocol import control

__all__ = ["Asking", "Serving", "Telling"]


class Serving(Protocol):
    """Offers blobs to devices."""

    def serve(self, files: Mapping[str, Path]) -> None:
        """Offer files by digest."""

    def withdraw(self, digests: Iterable[str]) -> None:
        """Offer blobs no longer."""

    def take_payload_bytes(self) -> int:
        """Payload bytes sent since the last call."""


class Telling(Protocol):
    """Reports one run."""

    @property
    def run(self) -> str:
        """Id of the run."""

    @property
    def seconds(self) -> float:
        """Time since the run started or was resumed."""

    def emit(self, event: control.RunEvent, log: str | None = None, device: str | None = None) -> None:
        """Tell what happened, and write a line of the log if there is one."""

    def count(self) -> None:
        """Write what was counted since the last call."""


class Asking(Protocol):
    """Puts tasks before devices and waits for their answers."""

    @property
    def fleet(self) -> Fleet:
        """Who is there."""

    @property
    def blobs(self) -> Serving:
        """Offers what the devices fetch."""

    @property
    def reporter(self) -> Telling:
        """Reports the run."""

    def open(self, collection: Collection) -> None:
        """Begin to collect; answers change the records of the collection's tasks, which the store already holds."""

    def close(self, reason: str) -> None:
        """End the collection; whoever still works on it is told why."""

    def pump(self, until: float) -> None:
        """Handle one event, or what is due, and return.

        Args:
            until: ``time.monotonic()`` to wait for at most.

        Raises:
            StopRequested: the run shall stop here and be continued later.
        """
