"""A training recipe as a manifest states it: optimizer, loss and metrics of its graphs."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from fleet_protocol.frozen import FiniteJson, FrozenModel


class OptimizerSpec(FrozenModel):
    """The update rule that is part of the train graph.

    Attributes:
        name: name of the update rule.
        settings: parameters of the update rule, except the learning rate, which is an input of the
            graph.
    """

    name: str
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)


class ExtendedSpec(FrozenModel):
    """A value that is written without newer keys that are empty.

    So files written before these keys existed keep their digests.
    """

    later: ClassVar[frozenset[str]]

    @model_serializer(mode="wrap")
    def _without_empty_later_keys(self, full: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = full(self)
        for key in self.later:
            if key in written and written[key] in (None, {}, [], ()):
                del written[key]
        return written


class MetricSpec(FrozenModel):
    """A number that an evaluation reports besides loss and accuracy.

    Attributes:
        name: name of the metric.
        rule: rule that computes the metric from its sums (`fleet_protocol.metrics`).
        sums: outputs of the eval graph that the metric uses, or ``examples`` for the number of
            samples.
    """

    name: str
    rule: str
    sums: tuple[str, ...]


class LossSpec(ExtendedSpec):
    """The loss that training minimises, and the outputs of evaluation for it.

    Attributes:
        name: name of the loss; ``masked-cross-entropy`` is the cross entropy of the logits times
            the label mask (specification 1.5).
        target: element type of ``y``; the shape of ``y`` for one sample is the manifest's
            ``label_shape``.
        masked: whether the graphs have the label mask as an input, ``mask``.
        metrics: outputs of the eval graph, which are sums over a batch; the first output is the sum
            of the loss.
        settings: parameters of the loss; empty if all have their defaults.
        ignored: label that is ignored; boards and the server pass it to the graphs as -1.
        bounds: allowed range of the targets, if the targets are numbers.
        parts: number of values in each target of a sample, in order, if there are several targets.
        whole: targets that are labels although they are stored as float32, by name; an empty name
            means the only target. Each entry gives the smallest and the largest label that the loss
            accepts. A third number, if present, is a label outside this range that is ignored.
        knobs: numeric parameters that a task may set, with their defaults; each is an input of the
            train graph.
        figures: metrics that an evaluation with this loss always reports besides loss and accuracy.
        answer: if several outputs of the infer graph predict the same target, the outputs whose
            mean is the model's prediction.
    """

    later: ClassVar[frozenset[str]] = frozenset(
        {"settings", "ignored", "bounds", "parts", "whole", "knobs", "figures", "answer"}
    )

    name: str = "masked-cross-entropy"
    target: Literal["float32", "int64"] = "int64"
    masked: bool = True
    metrics: tuple[str, ...] = ("loss_sum", "correct")
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)
    ignored: int | None = None
    bounds: tuple[float, float] | None = None
    parts: Mapping[str, int] = Field(default_factory=dict)
    whole: Mapping[str, tuple[int, ...]] = Field(default_factory=dict)
    knobs: Mapping[str, float] = Field(default_factory=dict)
    figures: tuple[MetricSpec, ...] = ()
    answer: tuple[str, ...] = ()


class RecipeSpec(ExtendedSpec):
    """The training recipe that is baked into the train graph; the learning rate is an input of it.

    Attributes:
        optimizer: the update rule; its states are listed in the manifest's ``states``.
        loss: the loss to minimise.
        clip_norm: bound on the global gradient norm; None for no bound.
        proximal: whether the graph adds ``mu * (parameter - anchor)`` to the gradient before
            clipping (FedProx). The train graph then takes the scalar ``mu`` and, for every
            parameter, ``anchor.<name>``, which contains the weights that were sent to the device.
        metrics: metrics that an evaluation reports besides loss and accuracy.
        clip_value: bound on each entry of the gradient, applied before the bound on the norm; None
            for no bound.
        accumulate: whether the train graph takes a batch in pieces. The graph's input ``share`` is
            the share of the batch's labels that are in the piece, not counting ignored labels. The
            input ``last`` is 1 for the last piece; no parameter changes before that piece. The
            states then include a ``gradient_sum.<name>`` for every parameter.
    """

    later: ClassVar[frozenset[str]] = frozenset({"metrics", "clip_value", "accumulate"})

    optimizer: OptimizerSpec
    loss: LossSpec = LossSpec()
    clip_norm: float | None = Field(default=1.0, gt=0)
    proximal: bool = False
    metrics: tuple[MetricSpec, ...] = ()
    clip_value: float | None = Field(default=None, gt=0)
    accumulate: bool | None = None

    @property
    def reported(self) -> tuple[MetricSpec, ...]:
        """Return what an evaluation reports besides loss and accuracy: metrics, then figures."""
        return (*self.metrics, *self.loss.figures)
