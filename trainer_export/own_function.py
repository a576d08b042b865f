"""A function of the user's file that a recipe names: its record, and its requirements.

A recipe's records are classes whose fields are their parameters, so a function becomes such a
class, with its keyword arguments as fields. It must return one number per sample; otherwise sums
over batches and boards have no meaning.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils._pytree import tree_map

from fleet_protocol.errors import ChoiceError, ConfigError
from models.layout import freeze
from models.registry import UserFunction
from models.user_lines import at_line_of
from trainer_export.rewriting import Rewriting

RecordT = TypeVar("RecordT", bound="OwnFunction")

_TAKEN = 2  # outputs and targets
_NEAR = 1e-4  # relative difference of two ways to compute the same


class OwnFunction(UserFunction):
    """A user's function as a record of a recipe.

    It takes outputs, targets and the record's parameters as keywords.

    Attributes:
        join: how to reduce a sample's numbers to one, ``mean`` or ``sum``: a method of tensors.
    """

    function: ClassVar[Callable[..., Any]]
    join: ClassVar[str]

    @property
    def place(self) -> str:
        """Return its kind, name and location, for messages."""
        code = self.function.__code__
        return (
            f"{self.kind} {self.name} (line {code.co_firstlineno} of {Path(code.co_filename).name})"
        )

    def refuse(self, wrong: str, remedy: str) -> NoReturn:
        """Return an ExportError about a problem of the function."""
        raise ChoiceError(f"{self.place} {wrong}; {remedy}")

    def call(self, outputs: Any, targets: Any) -> Any:
        """Call the function on a batch, traced like a model's operators.

        Raises:
            ExportError: the function fails; the message names the line.
        """
        # Operators of the function get its place, so that messages name it and not a layer of the
        # model.
        stack = traceback.current_meta.pop("nn_module_stack", None)
        traceback.current_meta["nn_module_stack"] = {"own": ("", self.place)}
        names = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            names.append(field.name)
        numbers = {name: getattr(self, name) for name in names}
        try:
            with Rewriting():
                return self.function(outputs, targets, **numbers)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise ChoiceError(
                f"{self.place} fails{at_line_of(error)}: {type(error).__name__}: {first}; use"
                " only PyTorch's tensor functions, for any number of samples, and torch.where"
                " instead of branches on values"
            ) from error
        finally:
            traceback.current_meta.pop("nn_module_stack")
            if stack is not None:
                traceback.current_meta["nn_module_stack"] = stack

    def require_each(self, result: Any, count: int) -> Tensor:
        """Return a result that has one entry per sample.

        Raises:
            ExportError: it does not.
        """
        if not isinstance(result, Tensor):
            self.refuse(
                f"returned {type(result).__name__}",
                "return a tensor, computed only with PyTorch's functions",
            )
        if result.dim() == 0:
            self.refuse(
                "returned one number for the whole batch",
                "return one number per sample, a tensor [batch]: use reduction='none' and"
                f" .flatten(1).{self.join}(1)",
            )
        if result.shape[0] != count:
            self.refuse(
                f"returned shape {list(result.shape)} for {count} samples",
                "its first dimension must be the batch; with targets [batch] use outputs[:, 0]"
                " or targets[:, None]",
            )
        return result

    def require_alone(
        self,
        batched: Sequence[Tensor],
        single: Callable[[int], Sequence[Tensor]],
    ) -> None:
        """Check that a sample's result is finite, and equal in a batch and on its own.

        Args:
            batched: results for a batch.
            single: returns the results for one of its samples on its own, by its index.

        Raises:
            ExportError: it does not.
        """
        if not all(bool(result.isfinite().all()) for result in batched):
            self.refuse(
                "is not finite for the initial model's outputs and targets from 0 to 1",
                "keep arguments of logarithms, roots and divisions away from 0, for example with"
                " torch.clamp",
            )
        for place in range(len(batched[0])):
            for among, alone in zip(batched, single(place), strict=True):
                if not torch.allclose(among[place], alone[0], _NEAR, _NEAR):
                    self._refuse_mixing(among[place], alone[0])

    def _refuse_mixing(self, among: Tensor, alone: Tensor) -> NoReturn:
        """Refuse a function whose result for a sample depends on its batch."""
        in_batch = float(among.detach().flatten()[0])
        by_itself = float(alone.detach().flatten()[0])
        self.refuse(
            f"mixes samples: the result of one is {in_batch:g} in its batch, but"
            f" {by_itself:g} on its own",
            "reduce only over dimensions from 1 on, and combine [batch] with [batch], not with"
            " [batch, 1]: the batches of boards and server differ",
        )


def one_of(output: Any, place: int) -> Any:
    """Return the outputs of one sample of a batch, as a batch of one."""
    return tree_map(lambda head: head[place : place + 1], output)


def record_of(
    function: Callable[..., Any],
    base: type[RecordT],
    **fixed: Any,
) -> type[RecordT]:
    """Return the record class of a function.

    Args:
        function: takes outputs, targets, and parameters with defaults, which become the fields.
        base: base of the class.
        fixed: further attributes of the class.

    Raises:
        ConfigError: the function has no name or takes too few arguments, or a parameter has no
            default.
    """
    name = getattr(function, "__name__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise ConfigError(f"a {base.kind} needs a function with a name, not {function!r}")
    code = function.__code__
    where = f"{base.kind} {name} (line {code.co_firstlineno} of {Path(code.co_filename).name})"
    refusal = (
        f"{where} must take outputs, targets, and then parameters with numbers as defaults, but"
    )
    parameters = list(inspect.signature(function).parameters.values())
    fields = []
    for parameter in parameters[_TAKEN:]:
        # A list as a default becomes a tuple, because records are immutable.
        default = freeze(parameter.default)
        if not isinstance(default, (bool, int, float, tuple)):
            raise ConfigError(f"{refusal} the default of {parameter.name} is not a number")
        fields.append((parameter.name, Any, dataclasses.field(default=default)))
    if len(parameters) < _TAKEN:
        raise ConfigError(f"{refusal} it takes {len(parameters)} arguments")
    return dataclasses.make_dataclass(
        name,
        fields,
        bases=(base,),
        frozen=True,
        namespace={
            "name": name,
            "function": staticmethod(function),
            "__doc__": function.__doc__ or where,
            "__module__": function.__module__,
            **fixed,
        },
    )
