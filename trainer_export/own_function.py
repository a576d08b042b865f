"""A function of the user's file that a recipe names: its record, and what it must hold to.

A recipe's records are classes whose fields are their numbers, so a function becomes such a class:
its keyword arguments are the fields. What it returns is one number for each sample; sums over
batches and boards mean nothing else.
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

from fleet_protocol.errors import ConfigError, ExportError
from models.layout import freeze
from models.registry import UserFunction
from models.user_lines import at_line_of
from trainer_export.rewriting import Rewriting

RecordT = TypeVar("RecordT", bound="OwnFunction")

_TAKEN = 2  # outputs and targets
_NEAR = 1e-4  # relative difference of two ways to compute the same


class OwnFunction(UserFunction):
    """A function of the user's as a record of a recipe.

    It takes outputs, targets and the record's numbers as keywords.

    Attributes:
        join: how a sample's numbers are brought to one, ``mean`` or ``sum``: a method of tensors.
    """

    function: ClassVar[Callable[..., Any]]
    join: ClassVar[str]

    @property
    def place(self) -> str:
        """What it is and where it stands, for messages."""
        code = self.function.__code__
        return (
            f"{self.kind} {self.name} (line {code.co_firstlineno} of {Path(code.co_filename).name})"
        )

    def refuse(self, wrong: str, remedy: str) -> NoReturn:
        """Raise an ExportError that says what is wrong with the function."""
        raise ExportError(f"{self.place} {wrong}; {remedy}")

    def call(self, outputs: Any, targets: Any) -> Any:
        """Call it on a batch, traced as a model's own operators are.

        Raises:
            ExportError: it fails; the message names the line.
        """
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
            raise ExportError(
                f"{self.place} fails{at_line_of(error)}: {type(error).__name__}: {first}; use"
                " PyTorch's functions of tensors alone, for any number of samples, and torch.where"
                " instead of branches on values"
            ) from error
        finally:
            traceback.current_meta.pop("nn_module_stack")
            if stack is not None:
                traceback.current_meta["nn_module_stack"] = stack

    def require_each(self, result: Any, count: int) -> Tensor:
        """Return a result that has one entry for each sample.

        Raises:
            ExportError: it has not.
        """
        if not isinstance(result, Tensor):
            self.refuse(
                f"returned {type(result).__name__}",
                "return a tensor, made by PyTorch's functions alone",
            )
        if result.dim() == 0:
            self.refuse(
                "returned one number for the whole batch",
                "return one for each sample, a tensor [batch]: reduction='none', and"
                f" .flatten(1).{self.join}(1)",
            )
        if result.shape[0] != count:
            self.refuse(
                f"returned shape {list(result.shape)} for {count} samples",
                "its first dimension must be the batch; of targets [batch] take outputs[:, 0], or"
                " targets[:, None]",
            )
        return result

    def require_alone(
        self,
        batched: Sequence[Tensor],
        single: Callable[[int], Sequence[Tensor]],
    ) -> None:
        """Check that a sample gets the same in a batch as alone, and finite.

        Args:
            batched: results for a batch.
            single: returns those for one of its samples alone, by its place.

        Raises:
            ExportError: it does not.
        """
        if not all(bool(result.isfinite().all()) for result in batched):
            self.refuse(
                "is not finite for the model's first outputs and targets from 0 to 1",
                "keep what goes into a logarithm, a root or a quotient away from 0, with"
                " torch.clamp",
            )
        for place in range(len(batched[0])):
            for among, alone in zip(batched, single(place), strict=True):
                if not torch.allclose(among[place], alone[0], _NEAR, _NEAR):
                    self._refuse_mixing(among[place], alone[0])

    def _refuse_mixing(self, among: Tensor, alone: Tensor) -> NoReturn:
        """Refuse a function that gives a sample another result in its batch than alone."""
        in_batch = float(among.detach().flatten()[0])
        by_itself = float(alone.detach().flatten()[0])
        self.refuse(
            f"mixes samples: one has {in_batch:g} in its batch and {by_itself:g} alone",
            "reduce over dimensions 1 and later only, and let [batch] meet [batch], not [batch, 1]:"
            " the batches of boards and server differ",
        )


def one_of(output: Any, place: int) -> Any:
    """Return the outputs of one sample of a batch, as a batch of one."""
    return tree_map(lambda head: head[place : place + 1], output)


def record_of(function: Callable[..., Any], base: type[RecordT], **fixed: Any) -> type[RecordT]:
    """Return the class of records that stands for a function.

    Args:
        function: takes outputs, targets, and numbers with defaults, which become the fields.
        base: of the class.
        fixed: further attributes of the class.

    Raises:
        ConfigError: the function has no name, takes fewer arguments, or a further one has no
            default.
    """
    name = getattr(function, "__name__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise ConfigError(f"a {base.kind} needs a function with a name, not {function!r}")
    code = function.__code__
    where = f"{base.kind} {name} (line {code.co_firstlineno} of {Path(code.co_filename).name})"
    refusal = f"{where} must take outputs, targets, then numbers with defaults, but"
    parameters = list(inspect.signature(function).parameters.values())
    fields = []
    for parameter in parameters[_TAKEN:]:
        default = freeze(parameter.default)
        if not isinstance(default, (bool, int, float, tuple)):
            raise ConfigError(f"{refusal} its {parameter.name} has no number as default")
        fields.append((parameter.name, Any, dataclasses.field(default=default)))
    if len(parameters) < _TAKEN:
        raise ConfigError(f"{refusal} it takes {len(parameters)}")
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
