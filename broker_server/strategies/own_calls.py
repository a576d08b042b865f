"""Calls the functions of a user's strategy, so that a failure ends a run with one line.

Every exception of such a function becomes a ConfigError, with which the server ends the run as
failed. The traceback goes to the log at level DEBUG.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np

from broker_server.strategies.strategy import GlobalModel, PlannedTier, PlanRequest, Strategy
from fleet_protocol.errors import ConfigError, ShoalError
from fleet_protocol.messages import Instructions
from models.plan import Plan
from models.slicing import CompiledPlan, Tensors

_LOG = logging.getLogger(__name__)

_Finish = Callable[[Any, GlobalModel], GlobalModel]
_Send = Callable[[CompiledPlan, PlanRequest, GlobalModel], Tensors]


def _where(field: str, function: Callable[..., Any]) -> str:
    """Return where a function of the user failed: its field of the strategy, and its name."""
    name = getattr(function, "__name__", "")
    if name.isidentifier() and name != field.rpartition(".")[2]:
        return f"in {field}, {name}(),"
    return f"in {field}"


@dataclass(frozen=True)
class OwnCode:
    """The location of the code of a user's strategy.

    Attributes:
        source: its file or package, as messages name it.
        folder: folder of the file that contains the strategy; None if Python does not know it.
    """

    source: str
    folder: Path | None = None

    def failure(self, where: str, error: BaseException) -> ConfigError:
        """Return a one-line error for the exception that the code raised, with its line number.

        Args:
            where: what failed, such as ``when it is run``.
            error: the raised error.
        """
        message = str(error)
        if isinstance(error, SyntaxError):
            message = error.msg  # without the location, which follows
        reason = " ".join(message.split())
        return ConfigError(
            f"{self.source} fails {where}: {type(error).__name__}: {reason}"
            f" ({self._place_of(error)}); correct it there, and give the same command again"
            " (`shoal -vv` shows the traceback)"
        )

    def guard(self, strategy: Strategy) -> Strategy:
        """Return a strategy whose functions raise nothing but a ShoalError."""
        # `make` is called later, when the plan is needed.
        plan = self._guarded("plan", strategy.plan, PlannedTier)

        def guarded_plan(*arguments: Any) -> PlannedTier:
            planned: PlannedTier = plan(*arguments)
            return replace(planned, make=self._guarded("plan", planned.make, Plan))

        merge = replace(
            strategy.merge,
            start=self._guarded("merge.start", strategy.merge.start),
            fold=self._guarded("merge.fold", strategy.merge.fold),
            finish=self._guarded_finish(strategy.merge.finish),
        )
        begin = strategy.begin
        if begin is not None:
            begin = self._guarded("begin", begin, Mapping)
        return replace(
            strategy,
            plan=guarded_plan,
            merge=merge,
            begin=begin,
            send=self._guarded_send(strategy.send),
            offer=self._guarded("offer", strategy.offer, Sequence),
            instruct=self._guarded("instruct", strategy.instruct, Instructions),
        )

    def _guarded_finish(self, finish: _Finish) -> _Finish:
        """Return a `Merge.finish` whose model has each tensor of the one before, as it was."""
        call = self._guarded("merge.finish", finish, GlobalModel)

        def guarded_finish(sums: Any, old: GlobalModel) -> GlobalModel:
            shapes = {name: value.shape for name, value in old.weights.items()}
            new: GlobalModel = call(sums, old)
            self._require_tensors(_where("merge.finish", finish), new.weights, shapes)
            return new

        return guarded_finish

    def _guarded_send(self, send: _Send) -> _Send:
        """Return a `Strategy.send` whose tensors are those of the plan."""
        call = self._guarded("send", send, Mapping)

        def guarded_send(plan: CompiledPlan, request: PlanRequest, model: GlobalModel) -> Tensors:
            sent: Tensors = call(plan, request, model)
            shapes = {name: plan.tensors[name].local_shape for name in sorted(plan.required)}
            self._require_tensors(_where("send", send), sent, shapes)
            return sent

        return guarded_send

    def _require_tensors(
        self, where: str, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Raise a ConfigError unless there is a float32 array of its shape for each name."""
        for name, shape in shapes.items():
            fault = None
            value = tensors.get(name)
            if value is None:
                fault = f"what it returns lacks the tensor {name}"
            elif not isinstance(value, np.ndarray):
                fault = f"it returns {type(value).__name__} for the tensor {name}, not an array"
            elif value.shape != shape:
                fault = f"it returns the shape {list(value.shape)} for {name}, not {list(shape)}"
            elif value.dtype != np.float32:
                fault = f"it returns the tensor {name} as {value.dtype}, not as float32"
            if fault is not None:
                raise self._wrong_result(where, fault)

    def _wrong_result(self, where: str, fault: str) -> ConfigError:
        return ConfigError(
            f"{self.source} fails {where} {fault}; correct it there, and give the same command"
            " again"
        )

    def _guarded(
        self, field: str, function: Callable[..., Any], result: type = object
    ) -> Callable[..., Any]:
        """Return a function of the strategy that raises a ConfigError for every failure.

        Args:
            field: field of the strategy, which has the function.
            function: function of the user.
            result: the type that it must return.
        """
        where = _where(field, function)

        @functools.wraps(function, updated=())
        def call(*arguments: Any) -> Any:
            try:
                # A strategy may refuse settings in its own words.
                returned = function(*arguments)
            except ShoalError:
                raise
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                _LOG.debug("%s fails %s", self.source, where, exc_info=True)
                raise self.failure(where, error) from error
            if not isinstance(returned, result):
                fault = f"it returns {type(returned).__name__}, not {result.__name__}"
                raise self._wrong_result(where, fault)
            return returned

        return call

    def _place_of(self, error: BaseException) -> str:
        """Return the line that raised an error: the user's line if it called other code."""
        if isinstance(error, SyntaxError) and error.filename is not None:
            return f"line {error.lineno} of {Path(error.filename).name}"
        place = "its file"
        own_place = None
        for frame, line in walk_tb(error.__traceback__):
            file = Path(frame.f_code.co_filename)
            if str(file).startswith("<frozen "):  # the import system's own frames
                continue
            place = f"line {line} of {file.name}"
            # Frames go from the outermost to the innermost, so the last one of the user's counts.
            if file.parent == self.folder:
                own_place = place
        return own_place or place
