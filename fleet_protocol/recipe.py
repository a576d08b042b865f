"""The table ``[model.recipe]``, which names what a training step does.

It is in ``fleet.toml``, ``sim.toml`` and the demo. The exporter makes a recipe of it. A server only
checks that the recipe that was exported is that of the table.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from fleet_protocol.frozen import FiniteJson, FrozenModel
from fleet_protocol.recipe_spec import RecipeSpec

_Comparison = tuple[str, object, object]
"""What is compared, its value in the export, and its value in the table."""


class Part(FrozenModel):
    """An optimizer, loss or metric by name: ``"adamw"``, or ``{ name = "adamw", beta1 = 0.95 }``.

    Attributes:
        name: of the record.
        settings: its numbers; a missing one has its default.
    """

    name: str
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and "name" in value and "settings" not in value:
            settings = dict(value)
            name = settings.pop("name")
            return {"name": name, "settings": settings}
        return value


class RecipeTable(FrozenModel):
    """``[model.recipe]``.

    Attributes:
        optimizer: the update rule.
        loss: what is made small.
        momentum: short for that number of the optimizer.
        weight_decay: likewise.
        clip_norm: bound of the global gradient norm; 0 for none.
        clip_value: bound of each entry of the gradient, before that of the norm; 0 for none.
        accumulate: whether devices can take a batch in pieces (``[train] micro_batch``).
        proximal: whether the step has FedProx's proximal term.
        metrics: what evaluations report beside loss and accuracy.
    """

    optimizer: Part = Part(name="sgd")
    loss: Part = Part(name="masked-cross-entropy")
    momentum: float | None = None
    weight_decay: float | None = None
    clip_norm: float = Field(default=1.0, ge=0)
    clip_value: float = Field(default=0.0, ge=0)
    accumulate: bool = False
    proximal: bool = False
    metrics: tuple[Part, ...] = ()

    @field_validator("loss")
    @classmethod
    def _full_name(cls, loss: Part) -> Part:
        """Return the cross entropy with a label mask, which is all ones for the plain one."""
        if loss.name != "cross-entropy":
            return loss
        return loss.model_copy(update={"name": "masked-cross-entropy"})

    @field_validator("metrics")
    @classmethod
    def _once_each(cls, metrics: tuple[Part, ...]) -> tuple[Part, ...]:
        names = [metric.name for metric in metrics]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"{name} is listed twice, and reports know a metric by its name; list it once"
                )
        return metrics

    @model_serializer(mode="wrap")
    def _written_keys(self, full: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out keys that were not set, also in the configuration that a store keeps."""
        return {key: value for key, value in full(self).items() if key in self.model_fields_set}

    @property
    def ignored(self) -> int | None:
        """The label that does not count; None if only negative ones do not count."""
        label = self.loss.settings.get("ignore_label")
        return int(label) if isinstance(label, int | float) else None

    @property
    def optimizer_settings(self) -> dict[str, JsonValue]:
        """The optimizer's numbers, those with a short form included."""
        settings = dict(self.optimizer.settings)
        if self.momentum is not None:
            settings["momentum"] = self.momentum
        if self.weight_decay is not None:
            settings["weight_decay"] = self.weight_decay
        return settings

    def difference(self, spec: RecipeSpec) -> str:
        """Return how a recipe that was exported differs from the table.

        Keys that the table leaves out may have any value.

        Returns:
            The first difference, such as ``optimizer is sgd, not adamw``; empty if there is none.
        """
        comparisons = [
            *self._compare_optimizer(spec),
            *self._compare_loss(spec),
            *self._compare_step(spec),
        ]
        for subject, exported, wanted in comparisons:
            if exported != wanted:
                return f"{subject} is {exported}, not {wanted}"
        return ""

    def _compare_optimizer(self, spec: RecipeSpec) -> Iterator[_Comparison]:
        if "optimizer" in self.model_fields_set:
            yield "optimizer", spec.optimizer.name, self.optimizer.name
        # Those of the table that the export lacks differ, too.
        exported = spec.optimizer.settings
        for key, value in self.optimizer_settings.items():
            yield f"optimizer's {key}", exported.get(key), value

    def _compare_loss(self, spec: RecipeSpec) -> Iterator[_Comparison]:
        if "loss" not in self.model_fields_set:
            return
        yield "loss", spec.loss.name, self.loss.name
        exported = spec.loss.settings  # empty where all numbers have their defaults
        for key, value in self.loss.settings.items():
            # A setting that is zero or empty is taken for the default.
            default = "its default" if value else value
            yield f"loss's {key}", exported.get(key, default), value

    def _compare_step(self, spec: RecipeSpec) -> Iterator[_Comparison]:
        written = self.model_fields_set
        if "clip_norm" in written:
            yield "clip_norm", spec.clip_norm or 0.0, self.clip_norm
        if "clip_value" in written:
            yield "clip_value", spec.clip_value or 0.0, self.clip_value
        if "proximal" in written:
            yield "proximal", bool(spec.proximal), self.proximal
        if "accumulate" in written:
            yield "accumulate", bool(spec.accumulate), self.accumulate
        if "metrics" in written:
            exported = [metric.name for metric in spec.metrics]
            yield "list of metrics", exported, [metric.name for metric in self.metrics]
