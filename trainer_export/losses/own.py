"""Losses that are functions in the user's file, for any outputs and targets.

They are traced and checked like all other losses.
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
    """A loss that a function computes for each sample; its mean is minimised.

    Boards and server store all targets as float32; the function receives the type that it
    requested.
    """

    kind: ClassVar[str] = "loss"
    join: ClassVar[str] = "mean"
    takes_several: ClassVar[bool] = True
    row: ClassVar[Row]  # the target of a sample

    @property
    def takes_numbers(self) -> bool:
        """Return whether the function's decorator names no target as a label."""
        return "int64" not in self.row.dtypes.values()

    def target(self, output: tuple[int, ...]) -> Target:
        """Return the target that the function's decorator names."""
        del output
        return Target("float32", self.row.shape)

    def spec(self, output: tuple[int, ...], zeros: Any = None) -> LossSpec:
        """Describe the loss, with the sizes of several targets and the ranges of labels.

        Args:
            output: shape of a sample's output.
            zeros: an output of zeros, to try labels with; None leaves the ranges out.
        """
        # Boards join several targets of a sample into one row, so they need the sizes.
        sizes: dict[str, int] = {}
        if self.row.named:
            for name, shape in self.row.shapes.items():
                sizes[name] = math.prod(shape)
        whole: dict[str, tuple[int, ...]] = {}
        if zeros is not None:
            for name, dtype in self.row.dtypes.items():
                if dtype == "int64":
                    whole[name] = self._range(name, zeros)
        return super().spec(output).model_copy(update={"parts": sizes, "whole": whole})

    def _range(self, name: str, zeros: Any) -> tuple[int, ...]:
        """Find the range of labels that the function takes in PyTorch.

        A graph does not check bounds: for instance, it reads -1 as the last label.

        Returns:
            The smallest and the largest label, and possibly one outside, such as a label to ignore.
        """

        def takes(label: int) -> bool:
            return self._takes(name, label, zeros)

        # A label may index any axis of an output, so the size of each is a candidate for the range.
        sizes: set[int] = set()
        for head in tree_leaves(zeros):
            sizes.update(head.shape[1:])
        # Without a refusal on that side, any integer that float32 stores exactly is allowed.
        lowest = -EXACT
        # The range begins at 0 or, if negative labels count from the end, at minus a size.
        for label in (0, -1, *(-size for size in sizes)):
            if takes(label) and not takes(label - 1):
                lowest = label
                break
        highest = EXACT
        for size in sizes:
            if takes(size - 1) and not takes(size):
                highest = size - 1
                break
        # A label to ignore is one of the loss's parameters, or a common value.
        for label in (*self._numbers().values(), -100, 255):
            is_outside = isinstance(label, int) and not lowest <= label <= highest
            if is_outside and takes(label):
                return lowest, highest, label
        return lowest, highest

    def _takes(
        self,
        name: str,
        label: int,
        zeros: Any,
    ) -> bool:
        """Return whether the function takes a label of one target without an error."""
        targets = self.row.parts(torch.zeros((1, *self.row.shape)))
        targets[name] = torch.full_like(targets[name], label)
        try:
            self.function(zeros, self._as_taken(targets), **self._numbers())
        except Exception:  # noqa: BLE001 - whatever the user's function raises for a label
            return False
        return True

    def _numbers(self) -> dict[str, Any]:
        """Return the parameters of the loss by name."""
        numbers: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            numbers[field.name] = getattr(self, field.name)
        return numbers

    def targets(self, answer: Answer) -> Any:
        """Return the targets as the function takes them."""
        return self._as_taken(self.row.parts(answer.y))

    def _as_taken(self, targets: Mapping[str, Any]) -> Any:
        """Return several targets unchanged; return a single target without its mapping."""
        return targets if self.row.named else targets[""]

    def drawn(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw labels 0 and 1, or numbers from 0 to 1, which every loss accepts."""
        numbers = torch.rand((count, *self.row.shape), generator=generator)
        y: Tensor = self.row.with_tokens(numbers, 2)
        return y

    def each(self, output: Any, answer: Answer) -> Tensor:
        """Return the loss of each sample, float32 [batch]."""
        return self.require_each(self.call(output, self.targets(answer)), answer.y.shape[0])

    def value(self, output: Any, answer: Answer) -> Tensor:
        """Return the mean over the samples."""
        return self.each(output, answer).mean()

    def sums(self, output: Any, answer: Answer) -> list[Tensor]:
        """Return the sum over the samples."""
        return [self.each(output, answer).sum()]

    # There is no other implementation to compare a user's function with.
    pytorch = value  # the original function, which autograd differentiates
    pytorch_sums = sums

    def try_out(self, output: Any, answer: Answer) -> None:
        """Require one number per sample that depends only on it and has a useful gradient."""
        # New leaves, so that the gradient is with respect to the outputs.
        variables = tree_map(lambda head: head.detach().requires_grad_(), output)
        losses = self.each(variables, answer)
        if losses.dim() != 1 or losses.dtype != torch.float32:
            kind = f"{str(losses.dtype).removeprefix('torch.')} {list(losses.shape)}"
            self.refuse(
                f"returned {kind}",
                "return one float32 number for each sample, for example by .flatten(1).mean(1)",
            )
        # A loss that mixes samples would depend on how they are batched.
        self.require_alone(
            [losses],
            lambda i: [self.each(one_of(output, i), Answer(answer.y[i : i + 1]))],
        )
        self._require_gradient(losses, tree_leaves(variables))

    def _require_gradient(
        self,
        losses: Tensor,
        variables: list[Tensor],
    ) -> None:
        slopes: list[Tensor] = []
        if losses.requires_grad:
            slopes += torch.autograd.grad(
                losses.sum(), variables, allow_unused=True, materialize_grads=True
            )
        # A gradient of zeros would train nothing.
        if not any(bool(slope.any()) for slope in slopes):
            self.refuse(
                "has no gradient with respect to the outputs",
                "remove detach, argmax, rounding and comparisons, and use loss('int64') for labels",
            )
        if not all(bool(slope.isfinite().all()) for slope in slopes):
            self.refuse(
                "has a gradient that is not finite",
                "add a small number under roots and to divisors",
            )


def loss(
    dtype: Dtype | Mapping[str, Dtype] = "float32",
    shape: tuple[int, ...] | Mapping[str, tuple[int, ...]] = (),
) -> Callable[[Callable[..., Any]], type[OwnLoss]]:
    """Turn a function of (outputs, targets) into a loss with its name, for use in a recipe.

    The function takes the model's outputs for a batch, and the targets ``[batch, *shape]`` or a
    mapping of several targets. It returns the loss of each sample, float32 ``[batch]``. Further
    arguments are parameters of the loss and need defaults.

    Args:
        dtype: dtype of the targets, ``int64`` for labels; for several targets, by name.
        shape: shape of one sample's target, empty for one number; for several targets, by name if
            not empty.

    Raises:
        ConfigError: the function has other arguments.
    """
    dtypes = dtype if isinstance(dtype, Mapping) else {"": dtype}
    shapes = shape if isinstance(shape, Mapping) else dict.fromkeys(dtypes, shape)
    for kind in dtypes.values():
        if kind not in ("float32", "int64"):
            raise ConfigError(
                f"targets must be float32 or int64, not {kind!r}; use loss('int64') for labels"
            )
    if not set(shapes) <= set(dtypes):
        raise ConfigError(
            f"the loss names shapes for {', '.join(shapes)}, but dtypes for {', '.join(dtypes)};"
            " name the dtype of every target"
        )
    # A target without a shape is one number.
    row = Row({name: tuple(shapes.get(name, ())) for name in dtypes}, dtypes)
    return lambda function: record_of(function, OwnLoss, row=row)
