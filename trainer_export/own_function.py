"""A function of the user's file that a recipe names: the record made of it, and what it must hold
to.

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
    """A function of the user's as a record of a recipe: it takes outputs, targets and the record's
    numbers as keywords.

    A sample's numbers are brought to one by `join`: ``mean`` or ``sum``, a method of tensors.
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
        """Say in an ExportError what is wrong with the function."""
        raise ExportError(f"{self.place} {wrong}; {remedy}")

    def call(self, outputs: Any, targets: Any) -> Any:
        """Call it on a batch, traced as a model's own operators are.

        An ExportError names the line that fails.
        """
        stack = traceback.current_meta.pop("nn_module_stack", None)
        traceback.current_meta["nn_module_stack"] = {"own": ("", self.place)}
        numbers = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}  # type: ignore[arg-type]
        try:
            with Rewriting():
                return self.function(outputs, targets, **numbers)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise ExportError(
                f"{self.place} fails{at_line_of(error)}: {type(error).__name__}: {first}; use PyTorch's functions of"
                " tensors alone, for any number of samples, and torch.where instead of branches on values"
            ) from error
        finally:
            traceback.current_meta.pop("nn_module_stack")
            if stack is not None:
                traceback.current_meta["nn_module_stack"] = stack

    def require_each(self, found: Any, count: int) -> Tensor:
        """See that a result has one entry for each sample; an ExportError where it has not."""
        if not isinstance(found, Tensor):
            self.refuse(
                f"returned {type(found).__name__}",
                "return a tensor, made by PyTorch's functions alone",
            )
        if found.dim() == 0:
            self.refuse(
                "returned one number for the whole batch",
                f"return one for each sample, a tensor [batch]: reduction='none', and .flatten(1).{self.join}(1)",
            )
        if found.shape[0] != count:
            self.refuse(
                f"returned shape {list(found.shape)} for {count} samples",
                "its first dimension must be the batch; of targets [batch] take outputs[:, 0], or targets[:, None]",
            )
        return found

    def require_alone(
        self, found: Sequence[Tensor], single: Callable[[int], Sequence[Tensor]]
    ) -> None:
        """See that a sample gets what `single` computes for it alone, and finite.

        An ExportError where it does not.
        """
        if not all(bool(part.isfinite().all()) for part in found):
            self.refuse(
                "is not finite for the model's first outputs and targets from 0 to 1",
                "keep what goes into a logarithm, a root or a quotient away from 0, with torch.clamp",
            )
        for place in range(len(found[0])):
            pairs = zip(found, single(place), strict=True)
            apart = [
                (both[place], one[0])
                for both, one in pairs
                if not torch.allclose(both[place], one[0], _NEAR, _NEAR)
            ]
            if apart:
                among, alone = (float(value.detach().flatten()[0]) for value in apart[0])
                self.refuse(
                    f"mixes samples: one has {among:g} in its batch and {alone:g} alone",
                    "reduce over dimensions 1 and later only, and let [batch] meet [batch], not [batch, 1]: the batches"
                    " of boards and server differ",
                )


def one_of(output: Any, place: int) -> Any:
    """The outputs of one sample of a batch, as a batch of one."""
    return tree_map(lambda head: head[place : place + 1], output)


def record_of(function: Callable[..., Any], base: type[RecordT], **fixed: Any) -> type[RecordT]:
    """The class of records that stands for a function.

    Its fields are the function's keyword arguments.

    The function takes outputs, targets, and numbers with defaults; `fixed` are further attributes
    of the class.

    Raises:
        ConfigError: the function has no name, takes fewer arguments, or a further one has no
            default.
    """
    name = getattr(function, "__name__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise ConfigError(f"a {base.kind} needs a function with a name, not {function!r}")
    parameters = list(inspect.signature(function).parameters.values())
    code = function.__code__
    where = f"{base.kind} {name} (line {code.co_firstlineno} of {Path(code.co_filename).name})"
    odd = [
        item.name
        for item in parameters[_TAKEN:]
        if not isinstance(freeze(item.default), (bool, int, float, tuple))
    ]
    if len(parameters) < _TAKEN or odd:
        wrong = f"its {odd[0]} has no number as default" if odd else f"it takes {len(parameters)}"
        raise ConfigError(
            f"{where} must take outputs, targets, then numbers with defaults, but {wrong}"
        )
    return dataclasses.make_dataclass(
        name,
        [
            (item.name, Any, dataclasses.field(default=freeze(item.default)))
            for item in parameters[_TAKEN:]
        ],
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
