"""Nets whose norms look at one sample each, in place of batch norms.

For a sample, the frozen layers of such a net return values that do not depend on its batch, so a
board may keep them. Wu and He, "Group normalization", ECCV 2018; with one group for all channels.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from models import Cut
from models.architecture import Architecture

BY_SAMPLE = "_by_sample"
"""The suffix of such a net's name."""


def by_sample(arch: Architecture) -> Architecture:
    """Return an architecture with a group norm in place of each batch norm."""

    def build(cut: Cut, **settings: Any) -> nn.Module:
        model: nn.Module = arch.build(cut, **settings)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.BatchNorm2d):
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, nn.GroupNorm(1, module.num_features))
        return model

    return replace(arch, name=arch.name + BY_SAMPLE, build=build)
