"""Models by the name of their class, or of a function that makes them."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean
from trainer_export.packages.constructor import (
    WithConfigurations,
    bound_arguments,
    configurations_of,
    holds_layers,
    made_by,
    passed_on,
)
from trainer_export.packages.package_model import (
    INPUT_SHAPE,
    SAMPLE_SHAPE,
    SETTINGS_OF_SHOAL,
    PackageModel,
)
from trainer_export.packages.sizes import with_sizes

LABEL_NAMES = (
    "num_classes",
    "n_classes",
    "classes",
    "num_labels",
    "n_labels",
    "class_num",
    "num_outputs",
    "n_outputs",
    "output_dim",
    "dim_out",
    "out_dim",
    "d_out",
    "out_channels",
    "num_tokens",
    "vocab_size",
)
"""Names that packages give the number of labels, the most certain first."""

_UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")

IMAGE_NAMES = ("image_size", "img_size", "input_size")
"""Names that packages give the size of pictures."""

CHANNEL_NAMES = ("in_chans", "in_channels", "channels", "n_channels", "num_channels")
"""Names that packages give the number of channels of pictures."""


def load_class(spec: str, arguments: Mapping[str, Any]) -> PackageModel:
    """Return the model of a class, or of a function, ``package.module:Name``.

    Args:
        spec: where it is.
        arguments: arguments of the class; those that it needs and that are not here are an error.
            Names with a dot are fields of an argument that takes an object, or entries of a list.

    Raises:
        ConfigError: if there is no such class, it takes other arguments, or makes no torch module.
    """
    module_name, _, attribute = spec.partition(":")
    target: Any = import_module(module_name)
    # A class may lie within another, or be a constructor such as `Model.from_config`.
    for name in attribute.split("."):
        owner, target = target, getattr(target, name, None)
        if target is None:
            raise ConfigError(
                f"--model {spec}: {module_name} has no class or function {attribute!r}"
                f"{did_you_mean(name, vars(owner))}"
            )
    if not callable(target):
        raise ConfigError(f"--model {spec}: {attribute} is neither a class nor a function")
    try:
        make, built_with = _make_and_arguments(target, arguments)
    # Python's own message names the missing or unknown argument.
    except TypeError as error:
        raise ConfigError(
            f"--model {spec}: {error}{_advice_on_arguments(str(error), target, arguments)}"
        ) from error
    if make is None:
        raise ConfigError(f"--model {spec}: {attribute} does not return a torch module")
    # A boolean is an int in Python, and no number of labels.
    labels = ""
    for name in LABEL_NAMES:
        if type(built_with.get(name)) is int:
            labels = name
            break
    # The name of an architecture is that of a function: `ResNet18` becomes `res_net18`.
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", attribute).lower()
    own_name = words.replace(".", "_")
    shape = _image(built_with)
    return PackageModel(spec, own_name, make, built_with, labels, input_shape=shape)


def _advice_on_arguments(
    problem: str, target: Callable[..., Any], arguments: Mapping[str, Any]
) -> str:
    """Return what to do about an argument that is missing or unknown, by Python's message."""
    unknown = _UNKNOWN_ARGUMENT.search(problem)
    hint = ""
    if unknown is not None:
        known = [*inspect.signature(target).parameters, *SETTINGS_OF_SHOAL]
        hint = did_you_mean(unknown[1], known)
    elif repr(INPUT_SHAPE) in problem and SAMPLE_SHAPE not in arguments:
        return (
            f"; with --set {SAMPLE_SHAPE}=3,32,32 for the shape of a sample, the constructor itself"
            f" gets {INPUT_SHAPE}"
        )
    return f"{hint}; give its arguments with --set name=value"


def _make_and_arguments(
    target: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[Callable[..., nn.Module] | None, dict[str, Any]]:
    """Return a function that makes a model, None if it makes no torch module, and all arguments.

    Raises:
        TypeError: if an argument is missing or unknown.
    """
    named, sizes = _by_fields(arguments)
    configurations = configurations_of(target, named)
    for name, kind in configurations.items():
        named[name] = bound_arguments(kind, named[name])
    make: Callable[..., Any] = target
    if configurations:
        make = WithConfigurations(target, configurations)
    built_with = with_sizes(bound_arguments(target, named), sizes)
    if isinstance(target, type):
        return (make if issubclass(target, nn.Module) else None), built_with
    # A function does not say what it makes, so it is called once and the constructor observed.
    factory = partial(make, **named)
    kind, watched = made_by(factory)
    if not issubclass(kind, nn.Module):
        return None, {}
    # Nothing was constructed in a way that can be repeated with other sizes, so the function stays.
    if watched is None:
        return make, built_with
    if holds_layers(watched):
        return make, {**passed_on(factory, watched), **built_with}
    return kind, with_sizes(watched, sizes)


def _by_fields(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Take fields, such as ``config.d_model``, from the entries of lists, such as ``dims.2``."""
    named: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for place, value in arguments.items():
        name, dot, field = place.partition(".")
        if not dot:
            named[name] = value
        # `dims.2` is an entry of a list that exists; `config.d_model` builds its object from
        # fields.
        elif name in arguments or not field.isidentifier():
            sizes[place] = value
        else:
            named.setdefault(name, {})[field] = value
    return named, sizes


def _image(arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a picture according to the arguments; None if they do not contain it."""
    size = next((arguments[name] for name in IMAGE_NAMES if name in arguments), None)
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, (tuple, list)) or not all(isinstance(side, int) for side in size):
        return None
    channels = next((arguments[name] for name in CHANNEL_NAMES if name in arguments), 3)
    return (channels, *size)
