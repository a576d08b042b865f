"""Names of tensors in checkpoints of transformers that its classes call otherwise.

Its version 5 renamed layers of some models, such as ViT, and still writes and reads the names that
their checkpoints have had before. A checkpoint of a model without a head, such as that of GPT-2 or
of many encoders of sentences, lacks the name under which models with a head have it.
"""

from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

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

    def build(cut: Cut) -> nn.Module:
        return call_builder(arch, cut, settings)  # type: ignore[no-any-return]

    module = build_for_shapes(Cut(), build)
    path, model = model_of_package(module)
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
        mapping = import_module("transformers.conversion_mapping")
        loading = import_module("transformers.core_model_loading")
    except ModuleNotFoundError:  # versions before 5 have one name for a tensor
        yield from ((name, name) for name in names)
        return
    renamings: list[Any] = []
    for transform in mapping.get_model_conversion_mapping(model):
        # Others change values, too, so their tensors keep their names and are reported as left.
        if isinstance(transform, loading.WeightRenaming):
            renamings.append(transform)
    for name in names:
        current, _converter = loading.rename_source_key(name, renamings, [])
        yield name, current
