"""The sub-models that an export is about: their settings, their weights, what they take and return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fleet_protocol.errors import ConfigError
from models.architecture import Architecture, build
from models.layout import Layout
from models.tier import Tier
from models.zoo.inference import initial_weights
from trainer_export.likeness import refuse_unlike
from trainer_export.model_inputs import Signature, prepared
from trainer_export.progress import Counter
from trainer_export.recipe import Recipe


@dataclass(frozen=True)
class Export:
    """What an export is about.

    Attributes:
        arch: the architecture.
        layout: of its global model.
        recipe: what a training step does.
        seed: of the weights and batches of the checks.
        counter: counts stages.
    """

    arch: Architecture
    layout: Layout
    recipe: Recipe
    seed: int = 0
    counter: Counter = field(default_factory=lambda: Counter(None, 0))

    @property
    def signature(self) -> Signature:
        """What the model takes and returns, but for the shape of its labels."""
        layout = self.layout
        return Signature(layout.input_shape, layout.input_dtype, layout.classes, row=self.arch.row(layout.settings))

    def settings(self, tier: Tier) -> Mapping[str, Any]:
        """The settings that a tier is built with: the model's, with the labels of a head of its own."""
        own = tier.id in self.layout.heads
        return {**self.layout.settings, "classes": self.layout.classes_of(tier)} if own else self.layout.settings

    def head(self, tier: Tier) -> dict[str, NDArray[np.float32]]:
        """The initial weights of a tier's own head; empty if it has none.

        Raises:
            ConfigError: the model's setting ``classes`` is not the number of its labels.
        """
        own, shapes = self.layout.own_head(tier), self.layout.shapes(tier)
        drawn = initial_weights(self.arch, self.settings(tier), self.seed) if own else {}
        head = {item.name: drawn[item.name] for item in own}
        for name, value in head.items():
            if value.shape != shapes[name]:
                raise ConfigError(
                    f"{self.arch.name}: with classes = {self.layout.classes_of(tier)} the parameter {name} is"
                    f" {value.shape}, not {shapes[name]}; a head of a tier's own needs `classes` to be its labels"
                )
        return head

    def module(self, tier: Tier) -> nn.Module:
        """The sub-model with weights that hide nothing, as a scale of 1, a shift of 0 or a matrix of zeros would.

        Raises:
            ExportError: it is another model than the whole one, not only a narrower one.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module: nn.Module = build(self.arch, tier, settings=self.settings(tier))
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.dim() < 2 or not parameter.any():
                        parameter.add_(0.1 * torch.randn_like(parameter))
            if tier.width < 1:
                whole = build(self.arch, 1.0, tier.depth, self.settings(tier))
                name = f"{self.arch.name}: {tier.id}"
                shapes = {**self.layout.shapes(tier), **self.layout.base_of(tier)}
                refuse_unlike(name, prepared(module, "eval"), whole, shapes, self.signature.samples(2))
        return module
