"""A stage on the way of an update, as a value that states when it is wanted and what it needs.

Each stage states its value in the module that has its code, in a constant `STAGES`: screens, moves
and encodings in `broker_server.stages`, merges and weights in `broker_server.strategies`.
`broker_server.settings.combinations` collects them and refuses incompatible stages, so that only a
stage's own module states its traits. A new stage also needs its setting, its call, and a row in the
table of docs/privacy.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from broker_server.strategies.traits import Feature


class Settings(Protocol):
    """The tables of a configuration that stages read, of a fleet or of a simulation.

    Their types are in `broker_server.settings`, which lies above the stages.
    """

    @property
    def robust(self) -> Any:
        """Return ``[robust]``."""

    @property
    def strategy(self) -> Any:
        """Return ``[strategy]``."""

    @property
    def round(self) -> Any:
        """Return ``[round]``."""

    @property
    def upload(self) -> Any:
        """Return ``[upload]``."""

    @property
    def download(self) -> Any:
        """Return ``[download]``."""

    @property
    def privacy(self) -> Any:
        """Return ``[privacy]``, or None."""

    @property
    def secure_sum(self) -> Any:
        """Return ``[secure_sum]``, or None."""

    @property
    def private(self) -> Any:
        """Return ``[private]``, or None."""


@dataclass(frozen=True)
class StageDefault:
    """How to switch off a stage that a run has by default, if something conflicts with it.

    Attributes:
        off: value of the stage's setting for a run without the stage.
        asked_by: keys of its table that ask for the stage when somebody writes them.
        gives_way: whether the rest of a configuration asks for a run without the stage, though
            nothing refuses both.
    """

    off: object
    asked_by: frozenset[str]
    gives_way: Callable[[Settings], bool] = lambda _run: False


@dataclass(frozen=True, kw_only=True)
class Stage(Feature):
    """A stage that a configuration may ask for.

    Attributes:
        setting: the setting that asks for it: a table and a key, or a table.
        wanted: whether a configuration asks for it.
        default: how it yields, if a run has it by default; None for a stage that somebody must ask
            for.
    """

    setting: str
    wanted: Callable[[Settings], bool]
    default: StageDefault | None = None

    @property
    def table(self) -> str:
        """Return the table of its setting."""
        return self.setting.partition(".")[0]

    @property
    def key(self) -> str:
        """Return the key of its setting; empty where the table itself asks for the stage."""
        return self.setting.partition(".")[2]


def stated(*stages: Stage) -> dict[str, Stage]:
    """Return the stages of a module by their names, as `STAGES` has them."""
    return {stage.name: stage for stage in stages}
