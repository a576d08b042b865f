"""Describes how transformers stores the model of a tier, see `models.package_form`.

Models of transformers are recognised by their class, also within a model of peft. Shoal's own
adapters and those of peft are described by their factors. Transformers reads a folder without
what its class has no place for, and without an error, so such models have a problem.
"""

import copy
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from torch import nn

from fleet_protocol.frozen import problems
from models.cut import Cut
from models.package_form import AdapterForm, PackageForm
from models.user_lines import first_line
from models.zoo.adapters import LoraConv1D, LoraLinear
from models.zoo.builds import build_for_shapes

_PACKAGE = "transformers"
_SAVED = ".modules_to_save."  # peft's trained copy of a module
_LEFT_OUT = ".original_module."  # what peft's copy replaces
_BASE_LAYER = ".base_layer."
# A cache of keys and values is a choice of whoever predicts, and an export needs none.
_OF_EXPORT = ("use_cache", "torch_dtype")
_NO_PRODUCT = "is not one product of two factors beside a linear layer"


class _UnfitError(Exception):
    """The package's class cannot hold what a model consists of; the text says why."""


def package_form(module: nn.Module, names: Iterable[str]) -> PackageForm | None:
    """Return how transformers stores a model; None for models of other origin.

    Args:
        module: the exported model of a tier, converted or not.
        names: the names in the state of its class.
    """
    path, model = model_of_package(module)
    if model is None:
        return None
    class_name = type(model).__name__
    try:
        prefix = f"{path}." if path else ""
        adapters = tuple(_adapters(model, prefix))
        own = tuple(names)
        for adapter in adapters:
            _require_factors(adapter, own)
        renamed = _renamed(own, prefix, adapters)
        stored: dict[str, str] = {}
        for name in own:
            stored[name] = renamed.get(name, name)
        _require_place(model, module, stored)
        return PackageForm(
            class_name=class_name,
            config=_config_of(model, class_name),
            adapters=adapters,
            renamed=renamed,
        )
    except _UnfitError as error:
        return PackageForm(class_name=class_name, problem=str(error))
    except ValidationError as error:
        return PackageForm(class_name=class_name, problem=problems(error, "configuration"))


def model_of_package(module: nn.Module) -> tuple[str, Any]:
    """Return the path and the model of transformers that a module is, or that peft wraps."""
    wrapped: Any = module
    # By what it has, so that peft need not be installed.
    inner = wrapped.get_base_model() if hasattr(module, "peft_config") else module
    if type(inner).__module__.partition(".")[0] != _PACKAGE or not hasattr(inner, "config"):
        return "", None
    for path, layer in module.named_modules():
        if layer is inner:
            return path, inner
    return "", None


def _require_factors(adapter: AdapterForm, names: Collection[str]) -> None:
    """Check that an adapter consists of a weight and two factors.

    Raises:
        _UnfitError: it has others, as that of AdaLoRA.
    """
    for name in (adapter.weight, adapter.down, adapter.up):
        if name not in names:
            raise _UnfitError(f"the adapter of {adapter.layer} {_NO_PRODUCT}")


def _require_place(model: Any, module: nn.Module, stored: Mapping[str, str]) -> None:
    """Check that the package's class has exactly the tensors that are stored.

    Args:
        model: the package's model.
        module: the exported model.
        stored: names in the state of the exported class with those in the folder.

    Raises:
        _UnfitError: a tensor has no place there, or a parameter would stay random.
    """
    kind = type(model)
    config = copy.deepcopy(model.config)
    try:
        fresh = build_for_shapes(Cut(), lambda _cut: kind(config))
    except Exception as error:
        raise _UnfitError(
            f"{kind.__name__} cannot be built from its configuration: {first_line(error)}"
        ) from error
    places = fresh.state_dict()
    exported = module.state_dict()
    for name, package_name in stored.items():
        if not package_name:
            continue
        if package_name not in places:
            raise _UnfitError(
                f"{kind.__name__} has no place for {name}, which its package would leave out"
            )
        # A converted layer may hold the tensor under another name.
        value = exported.get(name)
        place = places[package_name]
        if value is not None and value.numel() != place.numel():
            raise _UnfitError(
                f"{name} has {value.numel()} numbers, and {kind.__name__} has {place.numel()} there"
            )
    present = set(stored.values())
    for name, _ in fresh.named_parameters():
        if name not in present:
            raise _UnfitError(f"the model lacks {name} of {kind.__name__}, which would be random")


def _config_of(model: Any, class_name: str) -> dict[str, Any]:
    """Return the configuration of a model as in ``config.json``."""
    # Only what differs from the defaults, as transformers itself saves it.
    text = model.config.to_json_string(use_diff=True)
    config: dict[str, Any] = json.loads(text)
    for name in _OF_EXPORT:
        config.pop(name, None)
    # The exported class: a configuration may name the class it was trained with.
    config["architectures"] = [class_name]
    config["dtype"] = "float32"
    return config


def _adapters(model: nn.Module, prefix: str) -> Iterator[AdapterForm]:
    """Yield the low-rank adapters of a model.

    Raises:
        _UnfitError: if one computes something else than a product of two factors.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, (LoraLinear, LoraConv1D)):
            yield AdapterForm(
                layer=path,
                weight=f"{prefix}{path}.weight",
                down=f"{prefix}{path}.down",
                up=f"{prefix}{path}.up",
                scale=layer.scale,
                transposed=isinstance(layer, LoraConv1D),
            )
        elif hasattr(layer, "lora_A"):
            yield _peft_adapter(path, layer, prefix)


def _peft_adapter(path: str, layer: Any, prefix: str) -> AdapterForm:
    names = list(getattr(layer, "scaling", {}))
    base = getattr(layer, "base_layer", None)
    is_linear = isinstance(base, nn.Linear) or type(base).__name__ == "Conv1D"
    variants = getattr(layer, "lora_variant", None)
    # Several adapters, or variants such as DoRA, are more than one product.
    if len(names) != 1 or not is_linear or variants:
        raise _UnfitError(f"the adapter of {path} {_NO_PRODUCT}")
    (name,) = names
    return AdapterForm(
        layer=path,
        weight=f"{prefix}{path}.base_layer.weight",
        down=f"{prefix}{path}.lora_A.{name}.weight",
        up=f"{prefix}{path}.lora_B.{name}.weight",
        scale=float(layer.scaling[name]),
        transposed=bool(getattr(layer, "fan_in_fan_out", False)),
    )


def _renamed(
    names: Iterable[str], prefix: str, adapters: Iterable[AdapterForm]
) -> Mapping[str, str]:
    """Return the names of a class that differ in the package; "" for those that it lacks."""
    factors: set[str] = set()
    for adapter in adapters:
        factors |= {adapter.down, adapter.up}
    renamed: dict[str, str] = {}
    for name in names:
        package_name = "" if name in factors else _package_name(name, prefix)
        if package_name != name:
            renamed[name] = package_name
    return renamed


def _package_name(name: str, prefix: str) -> str:
    """Return the name of a tensor without what peft puts into it."""
    if _LEFT_OUT in name:
        return ""
    name = name.removeprefix(prefix).replace(_BASE_LAYER, ".")
    module, saved, tensor = name.partition(_SAVED)
    if not saved:
        return name
    # The name of the adapter lies between module and tensor.
    _adapter, _, tensor = tensor.partition(".")
    return f"{module}.{tensor}"
