"""Architectures: builders of modules with their settings, and how models are built from them.

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

_INPUT_SHAPE = "input_shape"  # the setting that every architecture has


@dataclass(frozen=True)
class Architecture:
    """A builder of modules, with what is known of it before it is called."""

    name: str  # its id, the name of the builder
    # called with a `Cut` and the settings as keywords; returns a torch module
    build: Callable[..., Any]
    # ``float32``, or ``int64`` for tokens; of several inputs also by name
    input_dtype: Dtype | Mapping[str, Dtype]
    defaults: Mapping[str, Any]  # every setting with its default
    choices: Mapping[str, tuple[Any, ...]]  # of settings whose annotation is a `Literal`
    paper: str = ""  # where it was described, for people

    def settings(self, overrides: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Complete settings with the defaults.

        Lists become tuples, and so does a single value where the default is a tuple.

        Raises:
            ConfigError: if the architecture does not have a setting, or a choice for it.
        """
        overrides = dict(overrides or {})
        for name, value in overrides.items():
            self._check_setting(name, value)
        frozen: Mapping[str, Any] = freeze({**self.defaults, **overrides})
        settings = dict(frozen)
        for name, default in self.defaults.items():
            if isinstance(default, tuple) and isinstance(frozen[name], (bool, int, float, str)):
                settings[name] = (frozen[name],)
        return MappingProxyType(settings)

    def _check_setting(self, name: str, value: Any) -> None:
        if name not in self.defaults:
            raise ConfigError(
                f"architecture {self.name} has no setting {name!r}"
                f"{did_you_mean(name, self.defaults)}; its settings are {', '.join(self.defaults)}"
            )
        choices = self.choices.get(name)
        if choices is not None and value not in choices:
            listed = " or ".join(map(repr, choices))
            raise ConfigError(f"architecture {self.name} has no {name} {value!r}; choose {listed}")

    def row(self, settings: Mapping[str, Any] | None = None) -> Row:
        """Return what one sample is; the single input of a model without names has the name "".

        Raises:
            ConfigError: if a shape is not one, if inputs have no names, or if a dtype is for an
                input that does not exist.
        """
        shapes = self._input_shapes(self.settings(settings)["input_shape"])
        dtypes = self.input_dtype
        if isinstance(dtypes, str):
            return Row(shapes, dict.fromkeys(shapes, dtypes))
        for name in dtypes:
            if name not in shapes:
                raise ConfigError(
                    f"{self.name}: input_dtype names {name!r}, and input_shape names "
                    f"{', '.join(shapes)}"
                )
        return Row(shapes, {name: dtypes.get(name, "float32") for name in shapes})

    def _input_shapes(self, input_shape: Any) -> dict[str, tuple[int, ...]]:
        """Return the shape of each input, by name."""
        default = self.defaults["input_shape"]
        if isinstance(default, Mapping) and not isinstance(input_shape, Mapping):
            example = json.dumps({name: list(shape) for name, shape in default.items()})
            raise ConfigError(
                f"{self.name}: input_shape = {input_shape} names no inputs; give, for example, "
                f"{example}"
            )
        shapes = dict(input_shape) if isinstance(input_shape, Mapping) else {"": input_shape}
        for shape in shapes.values():
            if not _is_shape(shape):
                raise ConfigError(
                    f"{self.name}: input_shape = {shape!r} is no list of whole numbers above 0"
                )
        return shapes


def _is_shape(shape: Any) -> bool:
    # True is an int in Python, but not a size.
    return isinstance(shape, tuple) and all(type(size) is int and size >= 1 for size in shape)


def architecture(
    *, input_dtype: Dtype | Mapping[str, Dtype] = "float32", paper: str = ""
) -> Callable[[Callable[..., Any]], Architecture]:
    """Turn a builder into an `Architecture` of the same name.

    The builder takes a `Cut` and then keyword settings, all with defaults, ``input_shape`` among
    them; one that learns labels has ``classes``, too. Nothing is registered anywhere: a registry
    finds the architecture in the module that defines it. A model of several inputs has as
    ``input_shape`` their shapes by the names of ``forward``'s arguments.

    Args:
        input_dtype: dtype of one sample; of several inputs also by name, float32 for those left
            out.
        paper: where the architecture was described.
    """

    def decorate(builder: Callable[..., Any]) -> Architecture:
        name = getattr(builder, "__name__", "")
        if not name.isidentifier():
            raise ConfigError(f"an architecture needs a function with a name, not {builder!r}")
        settings = _settings_of(name, builder)
        _check_dtypes(name, input_dtype)
        defaults = {setting.name: freeze(setting.default) for setting in settings}
        choices: dict[str, tuple[Any, ...]] = {}
        for setting in settings:
            if get_origin(setting.annotation) is Literal:
                choices[setting.name] = get_args(setting.annotation)
        return Architecture(name, builder, input_dtype, MappingProxyType(defaults), choices, paper)

    return decorate


def _settings_of(name: str, builder: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a builder behind its cut, each with a default that can be stored."""
    parameters = list(inspect.signature(builder).parameters.values())
    settings = parameters[1:]
    without: list[str] = []
    for setting in settings:
        if setting.default is inspect.Parameter.empty:
            without.append(setting.name)
    if not parameters or without:
        problem = f"{', '.join(without)} has none" if without else "it takes no cut"
        raise ConfigError(
            f"architecture {name} must take a cut, then keyword settings with defaults, but "
            f"{problem}"
        )
    names = {setting.name for setting in settings}
    if _INPUT_SHAPE not in names:
        raise ConfigError(
            f"architecture {name} lacks the setting {_INPUT_SHAPE}, which every one must have: the "
            f"shape of one sample, as in {_INPUT_SHAPE}: tuple[int] = (30,)"
        )
    for setting in settings:
        try:
            json.dumps(setting.default)
        except TypeError as error:
            raise ConfigError(
                f"architecture {name}: the default of {setting.name} cannot be stored: {error}; "
                "take a number, text, list or table, and choose by that"
            ) from error
    return settings


def _check_dtypes(name: str, input_dtype: Dtype | Mapping[str, Dtype]) -> None:
    dtypes = list(input_dtype.values()) if isinstance(input_dtype, Mapping) else [input_dtype]
    for dtype in dtypes:
        if dtype not in get_args(Dtype):
            raise ConfigError(
                f"architecture {name}: input_dtype {dtype!r} is none of "
                f"{', '.join(get_args(Dtype))}"
            )


def build(
    arch: Architecture,
    tier: Tier | float = 1.0,
    depth: int | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    convert: bool = True,
) -> Any:
    """Build the module of a sub-model, with new random weights.

    Args:
        arch: the architecture.
        tier: the sub-model, or its width.
        depth: its blocks; those of the tier, or all, if omitted.
        settings: settings that differ from the defaults.
        convert: whether a builder that converts its model may do so. Weights of `export-weights`
            are loaded into unconverted models.

    Raises:
        ConfigError: if a setting is unknown or the builder fails on it.
        PlanError: if the model cannot have this width or depth.
    """
    if isinstance(tier, Tier):
        depth = tier.depth if depth is None else depth
        width = tier.width
    else:
        width = tier
    Tier(width, 1 if depth is None else depth)  # raises if there is no such tier
    cut = Cut(width, depth)
    if convert:
        module = call_builder(arch, cut, settings)
    else:
        with unconverted():
            module = call_builder(arch, cut, settings)
    if cut.blocks is None and depth not in (None, 1):
        raise PlanError(f"{arch.name} has no sub-model of depth {depth}; its depths are 1")
    return module


def needs_values(error: ConfigError) -> bool:
    """Return whether a builder failed because it computes with values on torch's meta device."""
    # These are words of PyTorch's errors about values of a tensor without memory.
    return "meta tensor" in str(error.__cause__).lower()


def call_builder(arch: Architecture, cut: Cut, settings: Mapping[str, Any] | None) -> Any:
    """Call a builder with a cut; errors as of `build`."""
    try:
        row = arch.row(settings)
        keywords = dict(arch.settings(settings))
        if row.named:
            # A module may keep the shapes, and only plain dictionaries can be copied.
            keywords["input_shape"] = dict(row.shapes)
        module = arch.build(cut, **keywords)
    except PlanError as error:
        raise PlanError(f"{arch.name}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{arch.name}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{arch.name} cannot be built{at_line_of(error)}: {error!r}; check its settings"
        ) from error
    # A builder may return something else than a module, which `ModelBuilder` refuses by name.
    if row.named and hasattr(module, "register_forward_pre_hook"):
        module.register_forward_pre_hook(row, with_kwargs=True)
    return module
