"""A training recipe as a manifest states it: optimizer, loss and metrics of its graphs."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from fleet_protocol.frozen import FiniteJson, FrozenModel


class OptimizerSpec(FrozenModel):
    """The update rule that is baked into the train graph.

    Attributes:
        name: of the rule.
        settings: its numbers; the learning rate is an input of the graph.
    """

    name: str
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)


class ExtendedSpec(FrozenModel):
    """A value that is written without newer keys that are empty.

    So files that were written before these keys existed keep their digests.
    """

    later: ClassVar[frozenset[str]]

    @model_serializer(mode="wrap")
    def _without_empty_later_keys(self, full: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = full(self)
        for key in self.later:
            if key in written and written[key] in (None, {}, [], ()):
                del written[key]
        return written


class LossSpec(ExtendedSpec):
    """What training makes small, and what evaluation returns of it.

    Attributes:
        name: of the loss, such as the cross entropy of the logits times the label mask
            (specification 1.5).
        target: element type of ``y``; its shape for one sample is the manifest's ``label_shape``.
        masked: whether the graphs take the label ``mask``.
        metrics: outputs of the eval graph, sums over a batch; the first is that of the loss.
        settings: its numbers; empty where all have their defaults.
        ignored: label that counts for nothing, which boards and server hand to the graphs as -1.
        bounds: where targets that are numbers must lie.
        parts: numbers of each target of a sample, in order, where there are several.
        whole: which of them are labels though they travel as float32, with the smallest and the
            largest label that the loss takes, and one beyond them that counts for nothing, if there
            is one; an empty name is the only target.
    """

    later: ClassVar[frozenset[str]] = frozenset({"settings", "ignored", "bounds", "parts", "whole"})

    name: str = "masked-cross-entropy"
    target: Literal["float32", "int64"] = "int64"
    masked: bool = True
    metrics: tuple[str, ...] = ("loss_sum", "correct")
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)
    ignored: int | None = None
    bounds: tuple[float, float] | None = None
    parts: Mapping[str, int] = Field(default_factory=dict)
    whole: Mapping[str, tuple[int, ...]] = Field(default_factory=dict)


class MetricSpec(FrozenModel):
    """A metric that an evaluation reports beside loss and accuracy.

    Attributes:
        name: of the metric.
        rule: that makes a number of its sums (`fleet_protocol.metrics`).
        sums: outputs of the eval graph that it takes, or ``examples`` for the number of samples.
    """

    name: str
    rule: str
    sums: tuple[str, ...]


class RecipeSpec(ExtendedSpec):
    """The training recipe that is baked into the train graph; the learning rate is an input of it.

    Attributes:
        optimizer: the update rule; what it keeps is listed in the manifest's ``states``.
        loss: what is made small.
        clip_norm: bound of the global gradient norm, or None.
        proximal: the gradient gains ``mu * (parameter - anchor)`` before clipping (FedProx); the
            train graph then takes ``anchor.<name>`` for every parameter, the weights the device was
            sent, and the scalar ``mu``.
        metrics: what an evaluation reports beside loss and accuracy.
        clip_value: bound of each entry of the gradient, before that of its norm, or None.
        accumulate: the train graph takes a batch in pieces: ``share``, the piece's share of the
            batch's labels that count, and ``last``, 1 for the last piece, before which no parameter
            moves; the states have a ``gradient_sum.<name>`` for every parameter.
    """

    later: ClassVar[frozenset[str]] = frozenset({"metrics", "clip_value", "accumulate"})

    optimizer: OptimizerSpec
    loss: LossSpec = LossSpec()
    clip_norm: float | None = Field(default=1.0, gt=0)
    proximal: bool = False
    metrics: tuple[MetricSpec, ...] = ()
    clip_value: float | None = Field(default=None, gt=0)
    accumulate: bool | None = None
