"""The operator's wishes for a run: that it continues, is held, or ends."""

from dataclasses import dataclass
from typing import get_args

from typing_extensions import Self

from broker_server.store import RunRecord
from fleet_protocol.requests import Wish

ASKED = "an operator asked for: "
"""Prefix of the detail of an unfinished run, before its operator's wish."""


class RunHalted(Exception):  # noqa: N818  (not an error: the operator wants it)
    """The operator has stopped or held the run."""


@dataclass
class OperatorWish:
    """The newest wish of the operator of a run.

    It is that the run continues, is held or ends after the round in progress, or ends immediately
    and abandons that round. A run checks it between rounds, while it waits for devices, and while
    it collects.
    """

    wish: Wish = "go"

    @classmethod
    def from_run(cls, run: RunRecord | None) -> Self:
        """Return the operator's last wish for a run whose server was restarted."""
        if run is None:
            return cls()
        wishes: tuple[Wish, ...] = get_args(Wish)
        for wish in wishes:
            if run.detail == ASKED + wish:
                return cls(wish)
        return cls("pause" if run.status == "paused" else "go")

    def require_go(self) -> None:
        """Raise `RunHalted` if no further round is wanted now."""
        if self.wish != "go":
            raise RunHalted

    @property
    def abandon_reason(self) -> str:
        """Return why the round in progress is abandoned; empty if it should be finished."""
        return "the run was stopped by its operator" if self.wish == "abandon" else ""


class StopRequested(Exception):  # noqa: N818  (not an error: the operator wants the run to stop)
    """The server must end during a run, which continues when the server is started again."""
