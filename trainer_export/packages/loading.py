"""Read a SPEC, such as ``timm:vit_tiny_patch16_224``, and return the package's model."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean
from models.architecture import Dtype
from models.zoo.package_call import PackageOutput
from trainer_export.packages.classes import load_class
from trainer_export.packages.package_model import (
    INPUT_DTYPE,
    INPUT_SHAPE,
    OUTPUT_NAME,
    SAMPLE_SHAPE,
    PackageModel,
)
from trainer_export.packages.scaled_layers import with_layer_parts
from trainer_export.packages.timm_models import load_timm
from trainer_export.packages.transformers_models import load_transformers

_FORMS = (
    "transformers:FOLDER with a config.json, timm:NAME, or package.module:Class with --set for its "
    "arguments"
)

_Load = Callable[[str, Mapping[str, Any]], PackageModel]

_LOADERS: Mapping[str, _Load] = MappingProxyType(
    {"transformers": load_transformers, "timm": load_timm}
)


def package_model(spec: str, arguments: Mapping[str, Any] | None = None) -> PackageModel:
    """Return the model of a SPEC.

    Args:
        spec: ``transformers:FOLDER``, ``timm:NAME`` or ``package.module:Class``.
        arguments: arguments of its constructor that differ; ``input_shape`` and ``input_dtype``
            describe a sample where the package does not, and ``output_name`` is that of the output
            that is taken. With ``sample_shape``, the constructor gets its own ``input_shape``.

    Raises:
        ConfigError: if the package is not installed, has no such model, or refuses the arguments.
    """
    kind, colon, target = spec.partition(":")
    if not colon or not target:
        raise ConfigError(f"--model {spec}: a model of a package is {_FORMS}")
    changes = dict(arguments or {})
    arguments = dict(changes)
    own = _settings_of_shoal(arguments)
    load = _LOADERS.get(kind)
    try:
        model = load(target, arguments) if load else load_class(spec, arguments)
        model = _with_shape(replace(model, spec=spec, changes=changes, **own)).with_chosen_call()
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--model {spec}: package {error.name} is not installed here"
            f"{did_you_mean(str(error.name), _installed())}; check the name, or install it with pip"
        ) from error
    except Exception as error:
        advice = _advice_on(error)
        raise ConfigError(
            f"--model {spec}: the package cannot build it: {error!r}; {advice}"
        ) from error
    # The configuration of a model of transformers states its sizes, and its folder must be true.
    return model if kind == "transformers" else with_layer_parts(model)


def _advice_on(error: Exception) -> str:
    """Return what to do about an error of a package."""
    # As the errors of a server that nobody reaches.
    if isinstance(error, OSError):
        return (
            "if it tries to download weights, set the argument that names them to null, for"
            " example --set weights=null"
        )
    return "check the name and --set"


def _installed() -> list[str]:
    """List the modules and packages that can be imported here."""
    return [module.name for module in pkgutil.iter_modules()]


def _settings_of_shoal(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the settings that no constructor gets out of some arguments, as fields of a model."""
    own: dict[str, Any] = {}
    shape = SAMPLE_SHAPE if SAMPLE_SHAPE in arguments else INPUT_SHAPE
    if shape in arguments:
        own["input_shape"] = _read_shape(shape, arguments.pop(shape))
    if INPUT_DTYPE in arguments:
        own["input_dtype"] = _read_dtype(arguments.pop(INPUT_DTYPE))
    if OUTPUT_NAME in arguments:
        own["output"] = PackageOutput(str(arguments.pop(OUTPUT_NAME)))
    return own


def _read_shape(name: str, value: Any) -> tuple[int, ...]:
    """Return the shape of a sample; one number is that of a sample with one dimension.

    Raises:
        ConfigError: if it does not consist of whole numbers above 0.
    """
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for size in sizes:
        if type(size) is not int or size < 1:
            given = ",".join(map(str, sizes))
            raise ConfigError(
                f"--set {name}={given}: the shape of a sample consists of whole numbers above 0,"
                f" not of {size!r}; write the channels of a picture first, as in {name}=3,32,32"
            )
    return sizes


def _read_dtype(value: Any) -> Dtype:
    """Return the type of the numbers of a sample.

    Raises:
        ConfigError: if boards have no such samples.
    """
    if value not in get_args(Dtype):
        raise ConfigError(
            f"--set {INPUT_DTYPE}={value}: a sample consists of {' or '.join(get_args(Dtype))}"
            f"{did_you_mean(str(value), get_args(Dtype))}"
        )
    checked: Dtype = value
    return checked


def _with_shape(model: PackageModel) -> PackageModel:
    """Return a model with the shape of its samples.

    Raises:
        ConfigError: if nothing defines it.
    """
    if model.input_shape is None:
        raise ConfigError(
            f"--model {model.spec}: its arguments do not define the shape of a sample; give it, for"
            " example --set input_shape=3,32,32, and --set input_dtype=int64 for tokens"
        )
    return replace(model, input_shape=tuple(model.input_shape))
