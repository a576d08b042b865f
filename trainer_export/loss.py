"""The exporter's interface of a loss: its target, its value and gradient, and its metrics.

Each loss is a module in `trainer_export.losses` with a row in the module's table ``LOSSES``.
"""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fleet_protocol.discovery import discover
from fleet_protocol.errors import ChoiceError, ExportError
from fleet_protocol.recipe_spec import LossSpec, MetricSpec
from models.zoo.randomized_model import RETURN_LOGITS
from trainer_export.knob import Knob
from trainer_export.numbers import check_numbers, make_record

Dtype = Literal["float32", "int64"]


@dataclass(frozen=True)
class Target:
    """The target of a sample."""

    dtype: Dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """The targets of a batch, and the numbers that the task sets.

    Attributes:
        y: targets of the loss's own type, [batch, *shape].
        mask: 1 for labels that the device has, else 0, float32 [classes]; None for a loss without a
            mask.
        knobs: numbers of the loss by name, float32 [] or a number; one that is missing has its
            initial value.
    """

    y: Tensor
    mask: Tensor | None = None
    knobs: Mapping[str, Tensor | float] = field(default_factory=dict, kw_only=True)

    def number(self, knob: Knob) -> Tensor | float:
        """Return the value of a knob."""
        return self.knobs.get(knob.name, knob.initial)


@dataclass(frozen=True)
class Metric:
    """A sum over the samples or labels of a batch that the evaluation returns."""

    name: str
    dtype: Dtype = "float32"


LOSS_SUM = Metric("loss_sum")
"""The first sum of every loss."""


@dataclass(frozen=True)
class Loss(ABC):
    """A loss with its parameters, which are the fields of the derived dataclass.

    Raises:
        ConfigError: a parameter is out of range.
    """

    name: ClassVar[str]
    masked: ClassVar[bool] = False
    """Return whether the loss takes a label mask."""
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS_SUM,)
    bounds: ClassVar[tuple[float, float] | None] = None
    """The range of numeric targets; None for any number."""
    takes_several: ClassVar[bool] = False
    """Return whether the loss takes all outputs of a model, however many it returns."""
    has_constants: ClassVar[bool] = False
    """Return whether :meth:`value` treats a part of the output as constant.

    A runtime that differentiates the graph of the loss itself would not.
    """

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """The numbers that a task may set, each an input of the step."""
        return ()

    def checked_numbers(self) -> dict[str, float]:
        """Return the values of the knobs during the check of a graph."""
        return {knob.name: knob.checked_with for knob in self.knobs}

    @property
    def takes_numbers(self) -> bool:
        """Return whether targets are numbers, one for each output, even if all are whole.

        Otherwise, whole targets are labels, and the model has an output for each label.
        """
        return False

    @property
    def ignored(self) -> int | None:
        """The ignored label; boards and server pass it to the graphs as -1."""
        return None

    def output_warning(self, output: Any) -> str | None:  # noqa: ARG002 - some losses read it
        """Return what looks wrong in a model's output for this loss, with a remedy; else None.

        Args:
            output: output of the whole model for random samples, float32 [batch, ...]; of a model
                with several outputs, a tuple, list or mapping of them.
        """
        return None

    def __post_init__(self) -> None:
        # Fields carry their ranges, so every loss checks its parameters here.
        check_numbers(self)

    @abstractmethod
    def target(self, output: tuple[int, ...]) -> Target:
        """Return the target of a sample, for the shape of the model's output for one sample."""

    @abstractmethod
    def value(self, output: Tensor, answer: Answer) -> Tensor:
        """Return the loss of a batch, float32 [], a mean over all counted labels or samples.

        Pure and traceable. The output of the model is float32 [batch, ...].
        """

    def value_and_slope(
        self,
        output: Any,
        answer: Answer,
    ) -> tuple[Tensor, Any]:
        """Return the loss and its gradient with respect to the output.

        The gradient is traced, unless the loss overrides it. For a model with several heads, the
        output is a tuple or mapping of them. The gradient has the form of the output, or is a
        sequence over its heads, with None for a head without a gradient.
        """
        with torch.enable_grad():
            # Separate leaves, so that the gradient stops at the outputs and does not enter the
            # model.
            leaves = tree_map(lambda head: head.detach().requires_grad_(), output)
            loss = self.value(leaves, answer)
            # A head that the loss does not use has None.
            slopes = torch.autograd.grad(loss, tree_leaves(leaves), allow_unused=True)
        # Detached, because nothing differentiates the loss again.
        return loss.detach(), slopes

    def require_outputs(self, outputs: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the loss can use the outputs of a model.

        Args:
            outputs: shapes of several outputs for one sample by name; empty for a single output.

        Raises:
            ExportError: there are several outputs, and the loss takes only one.
        """
        if not outputs or self.takes_several:
            return
        if len(outputs) == 1:
            raise ExportError(
                "the model returns its single output in a tuple or dictionary; return the tensor"
                f" from forward: {RETURN_LOGITS}"
            )
        raise ChoiceError(
            f"the model returns {len(outputs)} outputs ({', '.join(outputs)}), but"
            f" {self.name} uses only one; return only that one ({RETURN_LOGITS}; with --model,"
            " select it by --set output_name=NAME), choose a loss for exits (--loss"
            " all-exits-teach) if these are exits, or write your own loss for all of them,"
            " @shoal.loss() of (outputs, targets)"
        )

    @abstractmethod
    def sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Return each of its metrics for a batch, []; pure and traceable."""

    @abstractmethod
    def pytorch(self, output: Tensor, answer: Answer) -> Tensor:
        """Return the expected result of :meth:`value`, from PyTorch's own loss.

        Every exported graph is compared with it.
        """

    @abstractmethod
    def pytorch_sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Return the expected result of :meth:`sums`, from PyTorch's own functions."""

    def further_sums(
        self,
        output: Any,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Return the sums of its figures for a batch by name, float32; pure and traceable."""
        del output, answer
        return {}

    def pytorch_further_sums(
        self,
        output: Any,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Return the expected result of :meth:`further_sums`, from PyTorch's own functions."""
        return self.further_sums(output, answer)

    def figures(self, outputs: Any) -> tuple[MetricSpec, ...]:
        """Return what an evaluation always reports besides loss, accuracy and metrics.

        Args:
            outputs: the outputs in the form of all outputs of the model.
        """
        del outputs
        return ()

    def answering(self, outputs: Any) -> tuple[int, ...]:
        """Return which of several outputs make up the model's answer, which is their mean.

        Args:
            outputs: the outputs in the form of all outputs of the model.
        """
        del outputs
        return ()

    def decided(
        self,
        output: Tensor,
        answer: Answer,
    ) -> tuple[Tensor, Tensor] | None:
        """Return the classes of output and target; None if the loss does not concern classes.

        Both are float32 0 or 1, [..., classes]; all 0 for an ignored label.
        """
        del output, answer
        return None

    def spec(self, output: tuple[int, ...], zeros: Any = None) -> LossSpec:
        """Return this loss in the form of the manifest.

        Args:
            output: shape of the model's output for one sample.
            zeros: zeros in the form of all outputs for one sample; a user's loss finds its range
                with them, and a loss of exits their number.
        """
        figures: tuple[MetricSpec, ...] = ()
        answer: tuple[str, ...] = ()
        if zeros is not None:
            figures = self.figures(zeros)
            answer = tuple(f"logits.{place}" for place in self.answering(zeros))
        settings = {}
        # Defaults are left out, so that a manifest stays equal when a parameter is added.
        if self != type(self)():
            # As JSON stores it, so that a tuple of the loss equals the list of a manifest.
            settings = json.loads(json.dumps(dataclasses.asdict(self)))
        return LossSpec(
            name=self.name,
            target=self.target(output).dtype,
            masked=self.masked,
            metrics=tuple(metric.name for metric in self.metrics),
            settings=settings,
            ignored=self.ignored,
            bounds=self.bounds,
            knobs={knob.name: knob.initial for knob in self.knobs},
            figures=figures,
            answer=answer,
        )


def loss_named(
    name: str,
    settings: Mapping[str, Any] | None = None,
    own: Mapping[str, type[Any]] = MappingProxyType({}),
) -> Loss:
    """Return a loss of `trainer_export.losses` or of the user by its name.

    Parameters that are not set have their defaults.

    Raises:
        ConfigError: there is no such loss or parameter, or a parameter is out of range.
    """
    classes: Mapping[str, type[Loss]] = discover("trainer_export.losses", "LOSSES")
    return make_record("loss", classes, name, settings, own)
