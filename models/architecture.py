"""Architectures: builders of modules with their settings, and how models are built from them.

Importing this module does not import torch; building a model does.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from fleet_protocol.errors import ConfigError, ModelError, PlanError
from fleet_protocol.python_files import refusing_exits
from fleet_protocol.spelling import did_you_mean
from models.axes import Rounding
from models.conversion_switch import unconverted
from models.cut import Cut
from models.inputs import Row
from models.layout import freeze
from models.tier import Tier
from models.user_lines import at_line_of

Dtype = Literal["float32", "int64"]

_INPUT_SHAPE = "input_shape"  # the setting that every architecture has

_ROUNDING = "rounding"
_COMMON: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        _ROUNDING: get_args(Rounding),
    }
)
"""Settings that every architecture takes and no builder does, with their values, default first."""


@dataclass(frozen=True)
class Architecture:
    """A builder of modules, with the properties that are known before its call."""

    name: str  # its id, the name of the builder
    # called with a `Cut` and the settings as keywords; returns a torch module
    build: Callable[..., Any]
    # ``float32``, or ``int64`` for tokens; of several inputs also by name
    input_dtype: Dtype | Mapping[str, Dtype]
    defaults: Mapping[str, Any]  # every setting with its default
    choices: Mapping[str, tuple[Any, ...]]  # allowed values of settings with a `Literal` annotation
    paper: str = ""  # its publication

    def settings(self, overrides: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Complete settings with the defaults.

        Lists become tuples; a single value becomes a tuple if the default is one.

        Raises:
            ConfigError: the architecture does not have the setting, or its value is not allowed.
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

    def _check_setting(
        self,
        name: str,
        value: Any,
    ) -> None:
        names = (*self.defaults, *_COMMON)
        if name not in names:
            raise ConfigError(
                f"architecture {self.name} has no setting {name!r}"
                f"{did_you_mean(name, names)}; its settings are {', '.join(names)}"
            )
        choices = {**_COMMON, **self.choices}.get(name)
        if choices is not None and value not in choices:
            listed = " or ".join(map(repr, choices))
            raise ConfigError(f"architecture {self.name} has no {name} {value!r}; choose {listed}")
        default = self.defaults.get(name)
        # Exactly int: a bool is a number for Python, and other defaults allow several types.
        is_number = type(default) is int
        if is_number and isinstance(value, str):
            raise ConfigError(
                f"architecture {self.name}: the setting {name} = {value!r} is not a number, as its"
                f" default {default} is"
            )

    def row(self, settings: Mapping[str, Any] | None = None) -> Row:
        """Return the layout of a sample; a single unnamed input has the name "".

        Raises:
            ConfigError: a shape is invalid, inputs have no names, or a dtype names an unknown
                input.
        """
        shapes = self._input_shapes(self.settings(settings)["input_shape"])
        dtypes = self.input_dtype
        if isinstance(dtypes, str):
            return Row(shapes, dict.fromkeys(shapes, dtypes))
        for name in dtypes:
            if name not in shapes:
                raise ConfigError(
                    f"{self.name}: input_dtype names {name!r}, but input_shape names"
                    f" {', '.join(shapes)}"
                )
        return Row(shapes, {name: dtypes.get(name, "float32") for name in shapes})

    def _input_shapes(self, input_shape: Any) -> dict[str, tuple[int, ...]]:
        """Return the shape of each input, by name."""
        default = self.defaults["input_shape"]
        if isinstance(default, Mapping) and not isinstance(input_shape, Mapping):
            example = json.dumps({name: list(shape) for name, shape in default.items()})
            raise ConfigError(
                f"{self.name}: input_shape = {input_shape} does not name the inputs; use, for"
                f" example, {example}"
            )
        # The only input of a model has no name.
        shapes = {"": input_shape}
        if isinstance(input_shape, Mapping):
            shapes = dict(input_shape)
        for shape in shapes.values():
            if not _is_shape(shape):
                raise ConfigError(
                    f"{self.name}: input_shape = {shape!r} is not a list of positive integers"
                )
        return shapes


def _is_shape(shape: Any) -> bool:
    # True is an int in Python, but not a size.
    if not isinstance(shape, tuple):
        return False
    return all(type(size) is int and size >= 1 for size in shape)


def architecture(
    *without_parentheses: object,
    input_dtype: Dtype | Mapping[str, Dtype] = "float32",
    paper: str = "",
) -> Callable[[Callable[..., Any]], Architecture]:
    """Turn a builder into an `Architecture` of the same name.

    The builder takes a `Cut` and then keyword settings, all with defaults, including
    ``input_shape``; a model for labels also has ``classes``. There is no registration: a registry
    finds the architecture in the module that defines it. For several inputs, ``input_shape`` maps
    the names of ``forward``'s arguments to shapes.

    Args:
        without_parentheses: the builder, if the decorator was written without parentheses.
        input_dtype: dtype of one sample; for several inputs also by name, float32 by default.
        paper: publication of the architecture.

    Raises:
        ConfigError: the decorator has no parentheses.
    """
    if without_parentheses:
        raise ConfigError("the decorator needs parentheses: write @architecture()")

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


_NOT_POSITIONAL = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
"""Kinds of parameters to which a cut cannot be passed."""


def _settings_of(name: str, builder: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a builder after its cut, each with a storable default."""
    parameters = list(inspect.signature(builder).parameters.values())
    settings = parameters[1:]
    takes_cut = bool(parameters) and parameters[0].kind not in _NOT_POSITIONAL
    without: list[str] = []
    for setting in settings:
        if setting.default is inspect.Parameter.empty:
            without.append(setting.name)
    if not takes_cut or without:
        problem = f"{', '.join(without)} has no default" if takes_cut else "it does not take a cut"
        raise ConfigError(
            f"architecture {name} must take a cut and then keyword settings with defaults, but"
            f" {problem}"
        )
    names = {setting.name for setting in settings}
    if _INPUT_SHAPE not in names:
        raise ConfigError(
            f"architecture {name} lacks the required setting {_INPUT_SHAPE}, the shape of one"
            f" sample, as in {_INPUT_SHAPE}: tuple[int] = (30,)"
        )
    for setting in settings:
        if setting.name in _COMMON:
            raise ConfigError(
                f"architecture {name}: {setting.name} is a setting of every architecture, which"
                " its builder does not receive; rename the builder's"
            )
        try:
            json.dumps(setting.default)
        except TypeError as error:
            raise ConfigError(
                f"architecture {name}: the default of {setting.name} cannot be stored: {error};"
                " use a number, text, list or table"
            ) from error
    return settings


def _check_dtypes(name: str, input_dtype: Dtype | Mapping[str, Dtype]) -> None:
    dtypes: list[str]
    if isinstance(input_dtype, str):
        dtypes = [input_dtype]
    else:
        dtypes = list(input_dtype.values())
    allowed = get_args(Dtype)
    for dtype in dtypes:
        if dtype not in allowed:
            listed = ", ".join(allowed)
            raise ConfigError(f"architecture {name}: input_dtype {dtype!r} is not one of {listed}")


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
        depth: number of its blocks; by default those of the tier, or all.
        settings: settings that differ from the defaults.
        convert: whether a builder may convert its model. Weights of `export-weights` are loaded
            into unconverted models.

    Raises:
        ConfigError: a setting is unknown, or the builder fails.
        PlanError: the model does not support this width or depth.
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


@contextmanager
def naming_architecture(arch: Architecture) -> Iterator[None]:
    """Name an architecture in the errors of its builder.

    Raises:
        ConfigError: instead of any error.
        PlanError: instead of another one.
    """
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{arch.name}: {error}") from error
    except ModelError as error:
        raise ModelError(f"{arch.name}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{arch.name}: {error}") from error
    except Exception as error:
        raise ModelError(
            f"{arch.name} cannot be built{at_line_of(error)}: {error!r}; check its settings"
        ) from error


def call_builder(
    arch: Architecture,
    cut: Cut,
    settings: Mapping[str, Any] | None,
) -> Any:
    """Call a builder with a cut; raises the errors of `build`."""
    # Their errors name the architecture.
    row = arch.row(settings)
    keywords = dict(arch.settings(settings))
    with naming_architecture(arch):
        cut.round_units(keywords.pop(_ROUNDING, "ceil"))
        if row.named:
            # A module may keep the shapes, and only plain dictionaries can be copied.
            keywords["input_shape"] = dict(row.shapes)
        with refusing_exits():
            module = arch.build(cut, **keywords)
    # By its methods, because this module does not import torch.
    if isinstance(module, type) or not hasattr(module, "named_parameters"):
        returned = repr(module) if isinstance(module, type) else type(module).__name__
        raise ConfigError(
            f"{arch.name} must return a torch module, not {returned}; end its builder with "
            "`return` and the module"
        )
    if row.named:
        module.register_forward_pre_hook(row, with_kwargs=True)
    return module
