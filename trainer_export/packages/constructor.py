"""The arguments that a package's constructor was called with."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args, get_type_hints

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer_export.packages.sizes import with_sizes


def bound_arguments(make: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a constructor by name, defaults included.

    Raises:
        TypeError: if one is missing or unknown.
    """
    bound = inspect.signature(make).bind(**given)
    bound.apply_defaults()
    return _flattened(bound)


def _flattened(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return bound arguments with those of ``**kwargs`` beside the others."""
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            arguments[name] = value
    return arguments


@dataclass(frozen=True)
class WithConfigurations:
    """Makes a model whose constructor takes objects of sizes, from the fields of these.

    They are made anew for each model, because they may compute other fields from these.
    """

    make: Callable[..., nn.Module]
    kinds: Mapping[str, type]  # of the object, by the argument that takes it

    def __call__(self, **arguments: Any) -> nn.Module:
        """Make the model."""
        for name, kind in self.kinds.items():
            arguments[name] = kind(**arguments[name])
        return self.make(**arguments)


def configurations_of(make: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes of the arguments that fields define, according to their types."""
    hints: dict[str, Any] = {}
    constructor: Any = make
    if isinstance(make, type):
        constructor = vars(make).get("__init__", make)
    with suppress(Exception):  # types that name what is imported nowhere
        hints = get_type_hints(constructor)
    kinds: dict[str, type] = {}
    for name, value in given.items():
        hint = hints.get(name)
        for kind in (hint, *get_args(hint)):
            if isinstance(value, Mapping) and isinstance(kind, type) and _takes(kind, value):
                kinds.setdefault(name, kind)
    return kinds


def _takes(kind: type, fields: Mapping[str, Any]) -> bool:
    """Return whether a class, other than a mapping, can be made from some fields."""
    if issubclass(kind, Mapping):
        return False
    try:
        bound_arguments(kind, fields)
    except (TypeError, ValueError):  # other fields, or a class of C without a signature
        return False
    return True


def made_by(
    factory: Callable[..., nn.Module],
) -> tuple[type[nn.Module], dict[str, Any] | None]:
    """Return the class of the model that a factory makes, and the arguments it is built with.

    A factory of a package often takes a name and sets sizes that its class takes as arguments. Two
    models are built, on the meta device where that is possible: one for the class, one while its
    constructor is watched.

    Returns:
        The class, and None for the arguments if these have no names, as those of a sequence of
        layers.
    """
    try:
        with torch.device("meta"):
            return _watch(factory)
    except Exception:  # noqa: BLE001 - constructors that compute raise anything
        with torch.random.fork_rng(devices=[]):
            return _watch(factory)


def holds_layers(arguments: Mapping[str, Any]) -> bool:
    """Return whether some arguments contain layers or tensors, which are made for one model only.

    A factory may build the layers of a model, and pass them to its constructor.
    """
    leaves = tree_leaves(dict(arguments))
    return any(isinstance(leaf, (nn.Module, torch.Tensor)) for leaf in leaves)


def passed_on(factory: Callable[..., nn.Module], built_with: Mapping[str, Any]) -> dict[str, int]:
    """Return the whole numbers that a factory with ``**kwargs`` passes to its constructor.

    Args:
        factory: makes the model.
        built_with: the arguments that the constructor is called with.
    """
    signature = inspect.signature(factory)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        return {}
    numbers: dict[str, int] = {}
    for name, value in built_with.items():
        # A boolean is an int in Python.
        if type(value) is int and name not in signature.parameters:
            larger = value + 1
            with suppress(Exception):  # a function takes other names, or fixes the number itself
                _, watched = made_by(partial(factory, **{name: larger}))
                if watched is not None and watched.get(name) == larger:
                    numbers[name] = value
    return numbers


def made_with(
    factory: Callable[..., nn.Module],
    arguments: Mapping[str, Any],
) -> tuple[type[nn.Module], dict[str, Any] | None]:
    """Return what `made_by` returns for a factory that may set some of the arguments itself.

    Such a factory accepts no other value for these, so its class gets them.

    Raises:
        ConfigError: if the class has no such argument.
    """
    try:
        return made_by(partial(factory, **arguments))
    except Exception:
        kind, built_with = made_by(factory)
        if built_with is None:
            raise
        return kind, with_sizes(built_with, arguments)


def _watch(
    factory: Callable[..., nn.Module],
) -> tuple[type[nn.Module], dict[str, Any] | None]:
    kind = type(factory())
    signature = _named_signature(kind)
    if signature is None:
        return kind, None
    with _watched(kind, signature) as calls:
        factory()
    # The outermost comes first; none was noted if it takes arguments that its bases do not.
    return kind, calls[0] if calls else None


def _named_signature(kind: type[nn.Module]) -> inspect.Signature | None:
    """Return the signature of a constructor, or of the base's to which it passes all arguments.

    None if its arguments have no names, as those of a sequence of layers.
    """
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        signature = inspect.signature(vars(base)["__init__"])
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            return signature
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return None
    return None


@contextmanager
def _watched(kind: type[nn.Module], signature: inspect.Signature) -> Iterator[list[dict[str, Any]]]:
    """Note with which arguments of a signature objects of a class are made."""
    calls: list[dict[str, Any]] = []
    original = kind.__init__

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is kind:
            # A constructor that passes its arguments on may take others besides.
            with suppress(TypeError):
                bound = signature.bind(self, *args, **kwargs)
                bound.apply_defaults()
                arguments = _flattened(bound)
                arguments.pop(next(iter(signature.parameters)))
                # A constructor may take its arguments apart.
                calls.append(copy.deepcopy(arguments))
        original(self, *args, **kwargs)

    watched.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    kind.__init__ = watched  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        kind.__init__ = original  # type: ignore[method-assign]
