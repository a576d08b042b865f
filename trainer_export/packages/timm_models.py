"""Models of timm by name, with the sizes that timm builds them with."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean
from trainer_export.packages.constructor import made_with
from trainer_export.packages.package_model import PackageModel

_IMAGE_SIZE = "img_size"


def load_timm(name: str, arguments: Mapping[str, Any]) -> PackageModel:
    """Return a model of timm; weights are not downloaded.

    Args:
        name: name of the model for ``timm.create_model``.
        arguments: further arguments of that function, or of the class that it builds.

    Raises:
        ConfigError: if timm has no model of this name, or its class has no such argument.
    """
    timm: Any = import_module("timm")
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model {name!r}{did_you_mean(name, timm.list_models())}")
    create = partial(timm.create_model, name, pretrained=False)
    try:
        kind, built_with = made_with(create, arguments)
    except ConfigError as error:
        raise ConfigError(
            f"--model timm:{name}: {error}; input_shape sets the shape of a sample"
        ) from error
    if built_with is None:
        raise ConfigError(f"timm:{name}: its class takes arguments without names; write a builder")
    channels, height, width = timm.get_pretrained_cfg(name).input_size
    channels = built_with.get("in_chans", channels)
    image = built_with.get(_IMAGE_SIZE)
    if isinstance(image, int):
        height = width = image
    elif isinstance(image, (tuple, list)):
        height, width = image
    labels = "num_classes" if "num_classes" in built_with else ""
    architecture = name.partition(".")[0]  # behind a dot is the name of the weights
    return PackageModel(
        "", architecture, kind, built_with, labels, input_shape=(channels, height, width)
    )
