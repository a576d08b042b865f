"""Calls the functions of a user's strategy, so that a failure ends a run with one line.

Whatever such a function raises becomes a ConfigError, with which the server ends the run as failed.
The traceback goes to the log at level DEBUG.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb
from typing import Any

from broker_server.strategies.strategy import GlobalModel, PlannedTier, Strategy
from fleet_protocol.errors import ConfigError, ShoalError
from fleet_protocol.messages import Instructions
from models.plan import Plan

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnCode:
    """Where the code of a user's strategy is.

    Attributes:
        source: its file or package, as messages name it.
        folder: of the file that has the strategy; None where Python does not know it.
    """

    source: str
    folder: Path | None = None

    def failure(self, where: str, error: BaseException) -> ConfigError:
        """Return an error of one line for what the code raised, with the line that raised it.

        Args:
            where: what failed, such as ``when it is run``.
            error: as raised.
        """
        message = str(error)
        if isinstance(error, SyntaxError):
            message = error.msg  # without the place, which follows
        reason = " ".join(message.split())
        return ConfigError(
            f"{self.source} fails {where}: {type(error).__name__}: {reason}"
            f" ({self._place_of(error)}); correct it there, and give the same command again"
        )

    def guard(self, strategy: Strategy) -> Strategy:
        """Return a strategy whose functions raise nothing but a ShoalError."""
        plan = self._guarded("plan", strategy.plan, PlannedTier)

        def guarded_plan(*arguments: Any) -> PlannedTier:
            planned: PlannedTier = plan(*arguments)
            return replace(planned, make=self._guarded("plan", planned.make, Plan))

        merge = replace(
            strategy.merge,
            start=self._guarded("merge.start", strategy.merge.start),
            fold=self._guarded("merge.fold", strategy.merge.fold),
            finish=self._guarded("merge.finish", strategy.merge.finish, GlobalModel),
        )
        begin = strategy.begin
        if begin is not None:
            begin = self._guarded("begin", begin, Mapping)
        return replace(
            strategy,
            plan=guarded_plan,
            merge=merge,
            begin=begin,
            send=self._guarded("send", strategy.send, Mapping),
            offer=self._guarded("offer", strategy.offer, Sequence),
            instruct=self._guarded("instruct", strategy.instruct, Instructions),
        )

    def _guarded(
        self, field: str, function: Callable[..., Any], result: type = object
    ) -> Callable[..., Any]:
        """Return a function of the strategy that raises a ConfigError for whatever goes wrong.

        Args:
            field: of the strategy, which has the function.
            function: of the user.
            result: the type that it must return.
        """
        where = f"in {field}"
        name = getattr(function, "__name__", "")
        if name.isidentifier() and name != field.rpartition(".")[2]:
            where = f"in {field}, {name}(),"

        @functools.wraps(function, updated=())
        def call(*arguments: Any) -> Any:
            try:
                returned = function(*arguments)
            except ShoalError:
                raise
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                _LOG.debug("%s fails %s", self.source, where, exc_info=True)
                raise self.failure(where, error) from error
            if not isinstance(returned, result):
                raise ConfigError(
                    f"{self.source} fails {where} it returns {type(returned).__name__}, not"
                    f" {result.__name__}; correct it there, and give the same command again"
                )
            return returned

        return call

    def _place_of(self, error: BaseException) -> str:
        """Return the line that raised an error: the user's, where it called other code."""
        if isinstance(error, SyntaxError) and error.filename is not None:
            return f"line {error.lineno} of {Path(error.filename).name}"
        place = "its file"
        own_place = None
        for frame, line in walk_tb(error.__traceback__):
            file = Path(frame.f_code.co_filename)
            if str(file).startswith("<frozen "):  # the import system's own frames
                continue
            place = f"line {line} of {file.name}"
            if file.parent == self.folder:
                own_place = place
        return own_place or place
