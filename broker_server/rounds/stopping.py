"""What an operator wants of a run that goes on: to be held or ended, or to stop in the middle and
be gone on with.
"""

from dataclasses import dataclass
from typing import get_args

from typing_extensions import Self

from broker_server.store import RunRecord
from fleet_protocol.requests import Wish

ASKED = "an operator asked for: "
"""How the detail of a run that is not over begins where an operator wants something of it."""


class Halted(Exception):  # noqa: N818  (no error: an operator wants it)
    """Whoever waits for devices before a round shall wait no longer."""


@dataclass
class OperatorWish:
    """The newest wish.

    A run looks at it between rounds, while it waits for devices, and while it collects.

    It is to go on, to hold or end after the round in progress, or to end at once and give that
    round up.
    """

    wish: Wish = "go"

    @classmethod
    def from_run(cls, run: RunRecord | None) -> Self:
        """That of a run whose server was started again, with what an operator wanted of it last."""
        held: Wish = "pause" if run is not None and run.status == "paused" else "go"
        wishes: tuple[Wish, ...] = get_args(Wish)
        return cls(
            next(
                (wish for wish in wishes if run is not None and run.detail == ASKED + wish),
                held,
            )
        )

    def require_go(self) -> None:
        """Ask before a round is planned; `Halted` where no further one is wanted now."""
        if self.wish != "go":
            raise Halted

    @property
    def abandon_reason(self) -> str:
        """Why the round in progress is worth nothing more; empty where it is to be finished."""
        return "the run was stopped by its operator" if self.wish == "abandon" else ""


class StopRequested(Exception):  # noqa: N818  (not an error: the operator wants the run to stop)
    """Whoever waits for a run's devices was asked to stop.

    The run goes on when it is started again.
    """
