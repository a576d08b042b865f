"""What an operator wants of a run: that it continues, is held, or ends."""

from dataclasses import dataclass
from typing import get_args

from typing_extensions import Self

from broker_server.store import RunRecord
from fleet_protocol.requests import Wish

ASKED = "an operator asked for: "
"""Prefix of the detail of a run that is not over, before what its operator wants of it."""


class Halted(Exception):  # noqa: N818  (not an error: the operator wants it)
    """The operator wants no further round now."""


@dataclass
class OperatorWish:
    """The newest wish of the operator of a run.

    It is that the run continues, is held or ends after the round in progress, or ends at once
    without that round. A run checks it between rounds, while it waits for devices, and while it
    collects.
    """

    wish: Wish = "go"

    @classmethod
    def from_run(cls, run: RunRecord | None) -> Self:
        """Return what an operator last wanted of a run whose server was started again."""
        if run is None:
            return cls()
        wishes: tuple[Wish, ...] = get_args(Wish)
        for wish in wishes:
            if run.detail == ASKED + wish:
                return cls(wish)
        return cls("pause" if run.status == "paused" else "go")

    def require_go(self) -> None:
        """Raise `Halted` if no further round is wanted now."""
        if self.wish != "go":
            raise Halted

    @property
    def abandon_reason(self) -> str:
        """Return why the round in progress is abandoned; empty where it is to be finished."""
        return "the run was stopped by its operator" if self.wish == "abandon" else ""


class StopRequested(Exception):  # noqa: N818  (not an error: the operator wants the run to stop)
    """The server shall end in the middle of a run, which continues when it is started again."""
