"""Tensors in checkpoints of transformers that its classes call otherwise, or hold as one.

Its version 5 renamed layers of some models, such as ViT, and still writes and reads the names that
their checkpoints have had before. A checkpoint of a model without a head, such as that of GPT-2 or
of many encoders of sentences, lacks the name under which models with a head have it. The experts of
a mixture are separate tensors in a checkpoint, and one in the class.
"""

import copy
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.architecture import Architecture, call_builder
from models.cut import Cut
from models.zoo.builds import build_for_shapes
from trainer_export.package_form import model_of_package


def current_names(
    arch: Architecture, settings: Mapping[str, Any] | None, names: Collection[str]
) -> dict[str, str]:
    """Return the names of a checkpoint that the model calls otherwise, with the model's names.

    Args:
        arch: the architecture of the model.
        settings: its settings that differ from the defaults.
        names: names of the checkpoint's tensors.
    """
    path, model = _model_of(arch, settings)
    if model is None:
        return {}
    own = set(model.state_dict())
    prefix = f"{path}." if path else ""
    renamed: dict[str, str] = {}
    for name, current in _renamed(model, names):
        found = _with_or_without_base(model, current, own)
        # A tensor that the checkpoint has by the model's own name counts.
        if found and name not in own and found not in names:
            renamed[name] = prefix + found
    return renamed


def merged_tensors(
    arch: Architecture,
    settings: Mapping[str, Any] | None,
    tensors: Mapping[str, NDArray[np.float32]],
) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a checkpoint, with those merged that the model holds as one.

    Args:
        arch: the architecture of the model.
        settings: its settings that differ from the defaults.
        tensors: the checkpoint's tensors by name.
    """
    _path, model = _model_of(arch, settings)
    merged = dict(tensors)
    if model is None:
        return merged
    for sources, results in _conversions(model, tensors):
        for name in sources:
            del merged[name]
        merged |= results
    return merged


def _conversions(
    model: Any, tensors: Mapping[str, NDArray[np.float32]]
) -> Iterable[tuple[list[str], dict[str, NDArray[np.float32]]]]:
    """Yield names of a checkpoint's tensors with what transformers makes of them together."""
    try:
        loading = import_module("transformers.core_model_loading")
    except ModuleNotFoundError:  # versions before 5 hold tensors as they store them
        return
    renamings, converters = _transforms(model)
    by_pattern: dict[str, Any] = {}
    for converter in converters:
        by_pattern |= dict.fromkeys(converter.source_patterns, converter)
    waiting: dict[str, Any] = {}  # converters that collect tensors, by the name of their result
    sources: dict[str, list[str]] = {}
    # In the order of their numbers, which is that of the experts.
    for name in sorted(tensors, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters)
        if pattern is None:
            continue
        converter = waiting.setdefault(target, copy.deepcopy(by_pattern[pattern]))
        converter.add_tensor(target, name, pattern, torch.from_numpy(tensors[name]))
        sources.setdefault(target, []).append(name)
    own = set(model.state_dict())
    for target, converter in waiting.items():
        converted = converter.convert(target, model=model, config=model.config)
        results: dict[str, NDArray[np.float32]] = {}
        for name, value in converted.items():
            results[_with_or_without_base(model, name, own) or name] = value.numpy()
        # Tensors of another model stay as they are, so that the report has their names.
        if results.keys() <= own:
            yield sources[target], results


def _model_of(arch: Architecture, settings: Mapping[str, Any] | None) -> tuple[str, Any]:
    """Return the path and the model of transformers of an architecture, without values."""

    def build(cut: Cut) -> nn.Module:
        return call_builder(arch, cut, settings)  # type: ignore[no-any-return]

    return model_of_package(build_for_shapes(Cut(), build))


def _with_or_without_base(model: Any, name: str, own: Collection[str]) -> str:
    """Return the name that a model has for a tensor, with or without its base; "" for none."""
    base = f"{model.base_model_prefix}."
    for candidate in (name, base + name, name.removeprefix(base)):
        if candidate in own:
            return candidate
    return ""


def _renamed(model: Any, names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield names with those that transformers gives them when it reads them."""
    try:
        loading = import_module("transformers.core_model_loading")
    except ModuleNotFoundError:  # versions before 5 have one name for a tensor
        yield from ((name, name) for name in names)
        return
    renamings, _converters = _transforms(model)
    for name in names:
        current, _converter = loading.rename_source_key(name, renamings, [])
        yield name, current


def _transforms(model: Any) -> tuple[list[Any], list[Any]]:
    """Return how transformers reads a checkpoint: renamings, and conversions of values."""
    mapping = import_module("transformers.conversion_mapping")
    loading = import_module("transformers.core_model_loading")
    renamings: list[Any] = []
    converters: list[Any] = []
    for transform in mapping.get_model_conversion_mapping(model):
        kind = renamings if isinstance(transform, loading.WeightRenaming) else converters
        kind.append(transform)
    return renamings, converters
