"""The table ``[model.recipe]``, which defines a training step.

It is in ``fleet.toml``, ``sim.toml`` and the demo. The exporter converts it to a recipe. A server
only checks that the exported recipe matches the table.
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
"""The compared property, its value in the export, and its value in the table."""


class NamedComponent(FrozenModel):
    """An optimizer, loss or metric by name: ``"adamw"``, or ``{ name = "adamw", beta1 = 0.95 }``.

    Attributes:
        name: name of the optimizer, loss or metric.
        settings: parameters of the optimizer, loss or metric; omitted parameters have their
            defaults.
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
        loss: the loss to minimise.
        momentum: short form of the key ``momentum`` in the optimizer's own table.
        weight_decay: short form of the key ``weight_decay`` in the optimizer's own table.
        clip_norm: bound on the global gradient norm; 0 for no bound.
        clip_value: bound on each entry of the gradient, applied before the bound on the norm; 0 for
            no bound.
        accumulate: whether devices can compute a batch in pieces (``[train] micro_batch``).
        proximal: whether the training step has FedProx's proximal term.
        metrics: metrics that evaluations report besides loss and accuracy.
    """

    optimizer: NamedComponent = NamedComponent(name="sgd")
    loss: NamedComponent = NamedComponent(name="masked-cross-entropy")
    momentum: float | None = None
    weight_decay: float | None = None
    clip_norm: float = Field(default=1.0, ge=0)
    clip_value: float = Field(default=0.0, ge=0)
    accumulate: bool = False
    proximal: bool = False
    metrics: tuple[NamedComponent, ...] = ()

    @field_validator("loss")
    @classmethod
    def _full_name(cls, loss: NamedComponent) -> NamedComponent:
        """Return the cross entropy with a label mask; the plain one has a mask of ones."""
        if loss.name != "cross-entropy":
            return loss
        return loss.model_copy(update={"name": "masked-cross-entropy"})

    @field_validator("metrics")
    @classmethod
    def _once_each(cls, metrics: tuple[NamedComponent, ...]) -> tuple[NamedComponent, ...]:
        names = [metric.name for metric in metrics]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"{name} is listed twice, but reports identify a metric by its name; "
                    "list it once"
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
        """The optimizer's settings, including those with a short form."""
        settings = dict(self.optimizer.settings)
        if self.momentum is not None:
            settings["momentum"] = self.momentum
        if self.weight_decay is not None:
            settings["weight_decay"] = self.weight_decay
        return settings

    def difference(self, spec: RecipeSpec) -> str:
        """Return how an exported recipe differs from the table.

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
        # Settings of the table that the export lacks differ, too.
        exported = spec.optimizer.settings
        for key, value in self.optimizer_settings.items():
            yield f"optimizer's {key}", exported.get(key), value

    def _compare_loss(self, spec: RecipeSpec) -> Iterator[_Comparison]:
        if "loss" not in self.model_fields_set:
            return
        yield "loss", spec.loss.name, self.loss.name
        exported = spec.loss.settings  # empty if all settings have their defaults
        for key, value in self.loss.settings.items():
            # A setting that is zero or empty counts as the default.
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
