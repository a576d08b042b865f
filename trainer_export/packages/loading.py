"""Read a SPEC, such as ``timm:vit_tiny_patch16_224``, and return the package's model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fleet_protocol.errors import ConfigError
from models.zoo.package_call import PackageOutput
from trainer_export.packages.classes import load_class
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.scaled_layers import with_layer_parts
from trainer_export.packages.timm_models import load_timm
from trainer_export.packages.transformers_models import load_transformers

# Settings of Shoal, which no constructor of a package gets.
_SAMPLE_SETTINGS = ("input_shape", "input_dtype")
_OUTPUT_SETTING = "output_name"
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
            that is taken.

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
            f"--model {spec}: package {error.name} is not installed here; install it with pip"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"--model {spec}: the package cannot build it: {error!r}; check the name and --set"
        ) from error
    # The configuration of a model of transformers states its sizes, and its folder must be true.
    return model if kind == "transformers" else with_layer_parts(model)


def _settings_of_shoal(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the settings that no constructor gets out of some arguments, as fields of a model."""
    own: dict[str, Any] = {}
    for name in _SAMPLE_SETTINGS:
        if name in arguments:
            own[name] = arguments.pop(name)
    if "input_shape" in own and not isinstance(own["input_shape"], (tuple, list)):
        own["input_shape"] = (own["input_shape"],)
    if _OUTPUT_SETTING in arguments:
        own["output"] = PackageOutput(str(arguments.pop(_OUTPUT_SETTING)))
    return own


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
