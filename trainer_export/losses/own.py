"""Losses that are functions of the user's file, for any outputs and targets.

Traced, and checked like all others.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fleet_protocol.errors import ConfigError
from fleet_protocol.recipe_spec import LossSpec
from fleet_protocol.targets import EXACT
from models.inputs import Row
from trainer_export.loss import Answer, Dtype, Loss, Target
from trainer_export.own_function import OwnFunction, one_of, record_of


@dataclass(frozen=True)
class OwnLoss(OwnFunction, Loss):
    """A loss that a function computes for each sample; its mean is made small.

    Boards and server hand targets over as float32, whole numbers included; the function gets the
    type it asked for.
    """

    kind: ClassVar[str] = "loss"
    join: ClassVar[str] = "mean"
    row: ClassVar[Row]
    """What a sample is compared with, as the function takes it."""

    def target(self, output: tuple[int, ...]) -> Target:
        """As the function's decorator says."""
        del output
        return Target("float32", self.row.shape)

    def spec(self, output: tuple[int, ...], zeros: Any = None) -> LossSpec:
        """With the numbers of each target, where there are several, and the range of those that are
        labels.
        """
        parts = (
            {name: math.prod(shape) for name, shape in self.row.shapes.items()}
            if self.row.named
            else {}
        )
        labels = [
            name
            for name, dtype in self.row.dtypes.items()
            if dtype == "int64" and zeros is not None
        ]
        whole = {name: self._range(name, zeros) for name in labels}
        return super().spec(output).model_copy(update={"parts": parts, "whole": whole})

    def _range(self, name: str, zeros: Any) -> tuple[int, ...]:
        """The smallest and largest label that the function takes in PyTorch, where a graph reads -1
        as the last.
        """

        def takes(label: int) -> bool:
            parts = self.row.parts(torch.zeros((1, *self.row.shape)))
            parts[name] = torch.full_like(parts[name], label)
            try:
                self.function(
                    zeros, parts if self.row.named else parts[""], **numbers
                )  # as a graph has no bounds
            except Exception:  # noqa: BLE001  (whatever the user's function raises of a label)
                return False
            return True

        numbers = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        sizes = {size for head in tree_leaves(zeros) for size in head.shape[1:]}
        low = next(
            (
                least
                for least in (0, -1, *(-s for s in sizes))
                if takes(least) and not takes(least - 1)
            ),
            -EXACT,
        )
        high = next((size - 1 for size in sizes if takes(size - 1) and not takes(size)), EXACT)
        known = [getattr(self, item.name) for item in dataclasses.fields(self)] + [
            -100,
            255,
        ]  # usual ones
        beyond = [
            item
            for item in known
            if isinstance(item, int) and not low <= item <= high and takes(item)
        ]
        return (low, high, *beyond[:1])

    def targets(self, answer: Answer) -> Any:
        """What the function takes."""
        return self.row.parts(answer.y) if self.row.named else self.row.parts(answer.y)[""]

    def drawn(self, count: int, generator: torch.Generator) -> Tensor:
        """Labels 0 and 1, or numbers from 0 to 1, which every loss takes."""
        y: Tensor = self.row.with_tokens(
            torch.rand((count, *self.row.shape), generator=generator), 2
        )
        return y

    def each(self, output: Any, answer: Answer) -> Tensor:
        """The loss of each sample, float32 [batch]."""
        return self.require_each(self.call(output, self.targets(answer)), answer.y.shape[0])

    def value(self, output: Any, answer: Answer) -> Tensor:
        """The mean over the samples."""
        return self.each(output, answer).mean()

    def sums(self, output: Any, answer: Answer) -> list[Tensor]:
        """The sum over the samples."""
        return [self.each(output, answer).sum()]

    pytorch = value  # the function as it was written, which autograd differentiates
    pytorch_sums = sums

    def try_out(self, output: Any, answer: Answer) -> None:
        """One number for each sample, of that sample alone, with a gradient that says where to go."""
        leaves = tree_map(lambda head: head.detach().requires_grad_(), output)
        found = self.each(leaves, answer)
        if found.dim() != 1 or found.dtype != torch.float32:
            kind = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
            self.refuse(
                f"returned {kind}",
                "return one float32 number for each sample, as by .flatten(1).mean(1)",
            )
        self.require_alone(
            [found],
            lambda i: [self.each(one_of(output, i), Answer(answer.y[i : i + 1]))],
        )
        slopes: list[Tensor] = []
        if found.requires_grad:
            slopes += torch.autograd.grad(
                found.sum(),
                tree_leaves(leaves),
                allow_unused=True,
                materialize_grads=True,
            )
        if not any(bool(slope.any()) for slope in slopes):
            self.refuse(
                "has no gradient with respect to the outputs",
                "use no detach, argmax, rounding or comparison in between, and loss('int64') for labels",
            )
        if not all(bool(slope.isfinite().all()) for slope in slopes):
            self.refuse(
                "has a gradient that is not finite",
                "add a small number under roots, and before quotients",
            )


def loss(
    dtype: Dtype | Mapping[str, Dtype] = "float32",
    shape: tuple[int, ...] | Mapping[str, tuple[int, ...]] = (),
) -> Callable[[Callable[..., Any]], type[OwnLoss]]:
    """Make a function of (outputs, targets) a loss of the same name, which a recipe may name.

    The function takes what the model returns for a batch, and the targets ``[batch, *shape]``, of
    several a mapping; it returns the loss of each sample, float32 ``[batch]``. Further arguments
    are the loss's numbers and have defaults.

    Args:
        dtype: of the targets: ``int64`` for labels; of several by name.
        shape: of one sample's target; empty for one number; of several by name, where it is not
            empty.

    Raises:
        ConfigError: the function takes something else.
    """
    dtypes = dtype if isinstance(dtype, Mapping) else {"": dtype}
    shapes = shape if isinstance(shape, Mapping) else dict.fromkeys(dtypes, shape)
    odd = next((kind for kind in dtypes.values() if kind not in ("float32", "int64")), None)
    if odd is not None:
        raise ConfigError(
            f"targets are float32 or int64, not {odd!r}; write loss('int64') for labels"
        )
    if not set(shapes) <= set(dtypes):
        raise ConfigError(
            f"loss has shapes of {', '.join(shapes)}, and dtypes of {', '.join(dtypes)}; name all dtypes"
        )
    row = Row({name: tuple(shapes.get(name, ())) for name in dtypes}, dtypes)
    return lambda function: record_of(function, OwnLoss, row=row)
