"""Writes the board's newest model, including its private parts, into a file of its owner."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from device_runtime.agent.cache import read_index
from device_runtime.predictions.stored_models import (
    StoredModel,
    own_statistics,
    read_board_model,
    read_fleet_model,
)
from device_runtime.settings import DeviceConfig
from device_runtime.training.measuring import STATS
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError
from fleet_protocol.weights import encode_weights


def write_board_weights(
    config: DeviceConfig, path: Path, *, fleet_only: bool = False
) -> Mapping[str, str | int]:
    """Write the parameters and statistics of the board's model as safetensors.

    Nothing is sent. The names are those of `shoal export-weights`, so the same lines of Python load
    the file.

    Args:
        config: the board's configuration.
        path: path of the file; an existing file is replaced.
        fleet_only: whether the file has the weights that the fleet sent, without private parts.

    Returns:
        The model, as predictions name it.

    Raises:
        ConfigError: there is no model yet, or a board with its own model has none of the fleet.
        BlobError: a file of the model is damaged.
        RefusedError: the positions of its units do not fit the sub-model.
        StorageError: the file cannot be written.
    """
    index = read_index(config.state_dir)
    if not fleet_only:
        model = read_board_model(config, index)
    elif config.own_model is None:
        model = read_fleet_model(config, index)
    else:
        raise ConfigError(
            "--fleet-only is for boards that train the fleet's model; this one has [own_model],"
            " and its own model contains no part of the fleet's model"
        )
    tensors: dict[str, NDArray[Any]] = {**model.parameters, **_statistics(config, model)}
    metadata = {"device": config.device, "arch": model.manifest.arch}
    for name, value in model.about.items():
        metadata[name] = str(value)
    write_atomically(path, encode_weights(tensors, metadata))
    return model.about


def _statistics(config: DeviceConfig, model: StoredModel) -> Mapping[str, NDArray[Any]]:
    """Return the statistics of static batch norms on the board's samples.

    Raises:
        ConfigError: the model needs them, and the board does not have the graph for them.
    """
    if model.manifest.statistics and STATS not in model.graphs:
        raise ConfigError(
            "the model has batch norms, and this board has no graph that measures their statistics:"
            " set predict = true in device.toml and let the board take part in another round"
        )
    return own_statistics(config, model)
