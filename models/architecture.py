"""What an architecture is: a builder of modules with its settings, the decorator that makes one,
and building from it.

Importing this module does not import torch; building a model does.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.spelling import did_you_mean
from models.conversion_switch import unconverted
from models.cut import Cut
from models.inputs import Row
from models.layout import freeze
from models.tier import Tier
from models.user_lines import at_line_of

Dtype = Literal["float32", "int64"]

_REQUIRED = ("input_shape", "classes")


@dataclass(frozen=True)
class Architecture:
    """A builder of modules, with what is known of it before it is called."""

    name: str  # its id, the name of the builder
    build: Callable[
        ..., Any
    ]  # called with a `Cut` and the settings as keywords; returns a torch module
    input_dtype: (
        Dtype | Mapping[str, Dtype]
    )  # ``float32``, or ``int64`` for tokens; of several inputs also by name
    defaults: Mapping[str, Any]  # every setting with its default
    choices: Mapping[str, tuple[Any, ...]]  # what a setting may be whose annotation is a `Literal`
    paper: str = ""  # where it was described, for people

    def settings(self, overrides: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Complete settings with the defaults.

        Lists become tuples, and so does one value where the default is one.

        Raises:
            ConfigError: if the architecture has no such setting, or no such choice for it.
        """
        given = dict(overrides or {})
        for name, value in given.items():
            if name not in self.defaults:
                raise ConfigError(
                    f"architecture {self.name} has no setting {name!r}{did_you_mean(name, self.defaults)};"
                    f" its settings are {', '.join(self.defaults)}"
                )
            if value not in (known := self.choices.get(name, (value,))):
                listed = " or ".join(map(repr, known))
                raise ConfigError(
                    f"architecture {self.name} has no {name} {value!r}; choose {listed}"
                )
        frozen: Mapping[str, Any] = freeze({**self.defaults, **given})
        wrapped = {
            name: (frozen[name],)
            for name, value in self.defaults.items()
            if isinstance(value, tuple) and isinstance(frozen[name], (bool, int, float, str))
        }
        return MappingProxyType({**frozen, **wrapped})

    def row(self, settings: Mapping[str, Any] | None = None) -> Row:
        """What one sample is; of a model of one input a row of that alone, without a name.

        Raises:
            ConfigError: a dtype is given for an input that there is not, or inputs have no names.
        """
        shapes = self.settings(settings)["input_shape"]
        dtypes = self.input_dtype
        usual = self.defaults["input_shape"]
        if isinstance(usual, Mapping) and not isinstance(shapes, Mapping):
            example = json.dumps({name: list(shape) for name, shape in usual.items()})
            raise ConfigError(
                f"{self.name}: input_shape = {shapes} names no inputs; give, for example, {example}"
            )
        shapes = dict(shapes) if isinstance(shapes, Mapping) else {"": shapes}
        for shape in shapes.values():
            if not isinstance(shape, tuple) or any(
                type(size) is not int or size < 1 for size in shape
            ):
                raise ConfigError(
                    f"{self.name}: input_shape = {shape!r} is no list of whole numbers above 0"
                )
        if isinstance(dtypes, str):
            return Row(shapes, dict.fromkeys(shapes, dtypes))
        odd = next((name for name in dtypes if name not in shapes), None)
        if odd is not None:
            raise ConfigError(
                f"{self.name}: input_dtype names {odd!r}, and input_shape names {', '.join(shapes)}"
            )
        return Row(shapes, {name: dtypes.get(name, "float32") for name in shapes})


def architecture(
    *, input_dtype: Dtype | Mapping[str, Dtype] = "float32", paper: str = ""
) -> Callable[[Callable[..., Any]], Architecture]:
    """Turn a builder into an `Architecture` of the same name.

    The builder takes a `Cut` and then keyword settings, all with defaults, ``input_shape`` and
    ``classes`` among them. Nothing is registered anywhere: a registry finds the architecture in the
    module that defines it. A model of several inputs has as ``input_shape`` their shapes by the
    names of ``forward``'s arguments.

    Args:
        input_dtype: dtype of one sample; of several inputs also by name, float32 where one is left
            out.
        paper: where the architecture was described.
    """

    def decorate(builder: Callable[..., Any]) -> Architecture:
        name = getattr(builder, "__name__", "")
        if not name.isidentifier():
            raise ConfigError(f"an architecture needs a function with a name, not {builder!r}")
        parameters = list(inspect.signature(builder).parameters.values())
        settings = parameters[1:]
        open_ended = [item.name for item in settings if item.default is inspect.Parameter.empty]
        if not parameters or open_ended:
            wrong = f"{', '.join(open_ended)} has none" if open_ended else "it takes no cut"
            raise ConfigError(
                f"architecture {name} must take a cut, then keyword settings with defaults, but {wrong}"
            )
        defaults = {item.name: freeze(item.default) for item in settings}
        missing = [item for item in _REQUIRED if item not in defaults]
        if missing:
            raise ConfigError(
                f"architecture {name} lacks the setting {missing[0]}, which every one must have"
            )
        for item in settings:
            try:
                json.dumps(item.default)
            except TypeError as error:
                wrong = f"{error}; take a number, text, list or table, and choose by that"
                raise ConfigError(
                    f"architecture {name}: the default of {item.name} cannot be stored: {wrong}"
                ) from error
        known = get_args(Dtype)
        for dtype in input_dtype.values() if isinstance(input_dtype, Mapping) else (input_dtype,):
            if dtype not in known:
                raise ConfigError(
                    f"architecture {name}: input_dtype {dtype!r} is none of {', '.join(known)}"
                )
        choices = {
            item.name: get_args(item.annotation)
            for item in settings
            if get_origin(item.annotation) is Literal
        }
        return Architecture(name, builder, input_dtype, MappingProxyType(defaults), choices, paper)

    return decorate


def build(
    arch: Architecture,
    tier: Tier | float = 1.0,
    depth: int | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    convert: bool = True,
) -> Any:
    """Build the module of a sub-model, of a tier or of a width and by default all blocks, with
    fresh random weights.

    Without `convert` a builder that converts its model returns it unconverted, to load weights of
    `export-weights`.

    Raises:
        ConfigError: if a setting is unknown or the builder fails on it.
        PlanError: if the model cannot have this width or depth.
    """
    if isinstance(tier, Tier):
        depth = tier.depth if depth is None else depth
        width = tier.width
    else:
        width = tier
    Tier(width, 1 if depth is None else depth)
    cut = Cut(width, depth)
    if convert:
        module = call_builder(arch, cut, settings)
    else:
        with unconverted():
            module = call_builder(arch, cut, settings)
    if cut.blocks is None and depth not in (None, 1):
        raise PlanError(f"{arch.name} has no sub-model of depth {depth}; its depths are 1")
    return module


def call_builder(arch: Architecture, cut: Cut, settings: Mapping[str, Any] | None) -> Any:
    """Call a builder with a cut of one's own; errors as of `build`."""
    try:
        row, chosen = arch.row(settings), dict(arch.settings(settings))
        if row.named:  # a module may keep it, and only plain dictionaries can be copied
            chosen["input_shape"] = dict(row.shapes)
        module = arch.build(cut, **chosen)
    except PlanError as error:
        raise PlanError(f"{arch.name}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{arch.name}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{arch.name} cannot be built{at_line_of(error)}: {error!r}; check its settings"
        ) from error
    if row.named and hasattr(module, "register_forward_pre_hook"):
        module.register_forward_pre_hook(row, with_kwargs=True)
    return module
