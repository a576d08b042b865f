"""The table ``[model.recipe]`` of ``fleet.toml``, ``sim.toml`` and the demo: what a training step
does, by names.

The exporter makes a recipe of it. A server makes none: it sees that what was exported is what the
table says.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from fleet_protocol.frozen import Free, FrozenModel
from fleet_protocol.recipe_spec import RecipeSpec


class Part(FrozenModel):
    """An optimizer, loss or metric by name: ``"adamw"``, or ``{ name = "adamw", beta1 = 0.95 }``.

    Attributes:
        name: of the record.
        settings: its numbers; a missing one has its default.
    """

    name: str
    settings: Mapping[str, Free] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and "name" in value and "settings" not in value:
            return {
                "name": value["name"],
                "settings": {key: item for key, item in value.items() if key != "name"},
            }
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
        """The cross entropy is the one with a label mask, which is all ones where nobody wants one."""
        return (
            loss.model_copy(update={"name": "masked-cross-entropy"})
            if loss.name == "cross-entropy"
            else loss
        )

    @field_validator("metrics")
    @classmethod
    def _once_each(cls, metrics: tuple[Part, ...]) -> tuple[Part, ...]:
        names = [metric.name for metric in metrics]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"{twice} is listed twice, and reports know a metric by its name; list it once"
            )
        return metrics

    @model_serializer(mode="wrap")
    def _what_was_said(self, full: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What was left out stays so, in the configuration that a store keeps, too."""
        return {key: value for key, value in full(self).items() if key in self.model_fields_set}

    @property
    def ignored(self) -> int | None:
        """The label that counts for nothing, None for no other than negative ones."""
        label = self.loss.settings.get("ignore_label")
        return int(label) if isinstance(label, int | float) else None

    @property
    def optimizer_settings(self) -> dict[str, JsonValue]:
        """The optimizer's numbers, those with a short form included."""
        short = {"momentum": self.momentum, "weight_decay": self.weight_decay}
        return {
            **self.optimizer.settings,
            **{key: value for key, value in short.items() if value is not None},
        }

    def difference(self, spec: RecipeSpec) -> str:
        """Where something was exported otherwise than this table says, such as ``optimizer is sgd,
        not adamw``.

        What the table leaves out may be anything; it is empty if there is nothing.
        """
        said = self.model_fields_set
        pairs: list[tuple[str, object, object]] = []
        if "optimizer" in said:
            pairs.append(("optimizer", spec.optimizer.name, self.optimizer.name))
        numbers = spec.optimizer.settings
        pairs += [
            (f"optimizer's {key}", numbers.get(key), value)
            for key, value in self.optimizer_settings.items()
        ]
        if "loss" in said:
            pairs.append(("loss", spec.loss.name, self.loss.name))
            known = spec.loss.settings  # empty where all numbers have their defaults
            pairs += [
                (
                    f"loss's {key}",
                    known.get(key, value if not value else "its default"),
                    value,
                )
                for key, value in self.loss.settings.items()
            ]
        if "clip_norm" in said:
            pairs.append(("clip_norm", spec.clip_norm or 0.0, self.clip_norm))
        if "clip_value" in said:
            pairs.append(("clip_value", spec.clip_value or 0.0, self.clip_value))
        pairs += [
            (key, bool(getattr(spec, key)), getattr(self, key))
            for key in ("proximal", "accumulate")
            if key in said
        ]
        if "metrics" in said:
            there = [metric.name for metric in spec.metrics]
            pairs.append(("list of metrics", there, [part.name for part in self.metrics]))
        return next(
            (
                f"{what} is {found}, not {wanted}"
                for what, found, wanted in pairs
                if found != wanted
            ),
            "",
        )
