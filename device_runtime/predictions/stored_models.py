"""The models on a board's disk: the newest from the fleet, and the board's own.

Everything is read from the agent's state folder, while an agent may be running. The agent replaces
its index atomically once a newer model is whole on disk, so a reader sees the old or the new model,
never parts of both.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from device_runtime.agent.cache import CacheIndex
from device_runtime.settings import DeviceConfig
from device_runtime.training.backends import ForwardSession
from device_runtime.training.backends.runtime import open_session
from device_runtime.training.hooks import Hooks
from device_runtime.training.kept_units import values_at
from device_runtime.training.measuring import (
    INFER,
    STATS,
    Statistics,
    graphs_of_prediction,
    measure,
)
from device_runtime.training.own_model import OwnModel
from device_runtime.training.own_model_files import OwnModelFiles, sub_model_of
from device_runtime.training.routines.private import FILES
from device_runtime.training.schedule import TrainingSchedule, holdout_split
from device_runtime.training.task import base_tensors
from device_runtime.training.weights_file import read_weights
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.data import load_data
from fleet_protocol.data.column_order import order_columns
from fleet_protocol.data.terms import NO_CONTRACT, read_contract
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import Manifest, parameter_input
from fleet_protocol.messages import TrainSettings
from fleet_protocol.units import read_units

BATCH_SIZE = 32


@dataclass(frozen=True)
class StoredModel:
    """A model on disk.

    Attributes:
        about: its name, ready for JSON.
        manifest: its manifest.
        graphs: files of its graphs, by key.
        parameters: its weights by name, including frozen ones.
    """

    about: Mapping[str, str | int]
    manifest: Manifest
    graphs: Mapping[str, Path]
    parameters: Mapping[str, NDArray[Any]]


def read_fleet_model(config: DeviceConfig, index: CacheIndex) -> StoredModel:
    """Read the newest model that the fleet has sent.

    Raises:
        ConfigError: there is none yet.
        BlobError: a file of it is damaged.
    """
    if not (index.newest and index.sets and index.weights):
        raise ConfigError(
            f"there is no model of the fleet in {config.state_dir} yet: let the board take "
            "part in a round first (shoal device run), with predict = true in device.toml "
            "and a max_cache_bytes larger than one model"
        )
    blobs = BlobStore(config.state_dir)
    digest = index.weights[-1]
    manifest = Manifest.model_validate_json(blobs.read(index.sets[-1].manifest))
    # The digest is verified here; the weights are then read directly into place below.
    blobs.read(digest)  # raises if the set is not whole
    graphs: dict[str, Path] = {}
    for key, spec in manifest.graphs.items():
        if blobs.has(spec.digest):
            graphs[key] = blobs.path(spec.digest)
    weights = read_weights(blobs.path(digest), manifest)
    parameters = base_tensors(manifest, blobs) | weights
    return StoredModel({**index.newest, "digest": digest}, manifest, graphs, parameters)


def read_board_model(config: DeviceConfig, index: CacheIndex) -> StoredModel:
    """Read the board's newest model, with the values that it keeps for itself.

    It is the one of ``[own_model]``, or the newest of the fleet with the board's private parts.

    Raises:
        ConfigError: there is none yet, or the private parts belong to another model.
        BlobError: a file of it is damaged.
        RefusedError: the positions of its units do not fit the sub-model.
    """
    if config.own_model is not None:
        return read_own_model(config)
    return _with_private_parts(config, read_fleet_model(config, index))


def private_files(config: DeviceConfig) -> OwnModelFiles:
    """Return the files of the board's private parts."""
    return OwnModelFiles(config.state_dir, prefix=f"{FILES}-")


def _with_private_parts(config: DeviceConfig, model: StoredModel) -> StoredModel:
    """Put the board's private parts, as its last round of the run left them, into a model."""
    about = model.about
    tiers = private_files(config).load_tiers(str(about["run"]), sys.maxsize)
    own = tiers.get(sub_model_of(str(about["tier"])), {})
    if not own:
        return model
    path = BlobStore(config.state_dir).path(str(about["digest"]))
    units = read_units(path, model.manifest)
    values: dict[str, NDArray[Any]] = {}
    for name, kept in own.items():
        sent = model.parameters.get(name)
        value = kept
        if sent is not None and name in units and kept.ndim == sent.ndim:
            value = values_at(kept, units[name], sent)
        if sent is None or sent.shape != value.shape:
            raise ConfigError(
                f"the private part {name} of this board, {list(kept.shape)}, belongs to a"
                f" different model from {model.manifest.arch} {model.manifest.tier}: let the board"
                " take part in another round"
            )
        values[name] = value
    private = f"{len(own)} parameters"
    return replace(
        model, about={**about, "private": private}, parameters={**model.parameters, **values}
    )


def read_own_model(config: DeviceConfig) -> StoredModel:
    """Read the board's own model as its last round left it, or else the initial one of its set."""
    assert config.own_model is not None
    model = OwnModel(config.own_model.set, config.state_dir, config.own_model.keep_runs)
    manifest = model.manifest().own
    kept = model.files.newest()
    about = {"own": manifest.arch, "tier": manifest.tier, "from": "its set"}
    if kept is not None:
        about["from"] = kept.path.name
        about["digest"] = blob_digest(kept.path.read_bytes())
    graphs: dict[str, Path] = {}
    for key in graphs_of_prediction(manifest):
        graphs[key] = model.path(manifest.graphs[key])
    return StoredModel(about, manifest, graphs, model.parameters(kept))


def open_model(config: DeviceConfig, model: StoredModel) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Open the graph that predicts.

    Returns:
        An ``onnxruntime.InferenceSession``, and all its inputs except the samples.

    Raises:
        ConfigError: the model has no such graph.
    """
    manifest = model.manifest
    needed = {INFER, STATS} if manifest.statistics else {INFER}
    if not needed <= model.graphs.keys():
        raise ConfigError(
            f"the newest model on this board has no graph that predicts ({manifest.arch} "
            f"{manifest.tier}): set predict = true in device.toml and let the board take "
            "part in another round"
        )
    graph = open_session(
        model.graphs[INFER],
        manifest.graphs.values(),
        threads=config.known_threads,
        leaves=False,
    )
    fixed = fixed_inputs(config, model)
    inputs = {port.name for port in graph.get_inputs()}
    return graph, {name: value for name, value in fixed.items() if name in inputs}


def fixed_inputs(config: DeviceConfig, model: StoredModel) -> dict[str, NDArray[Any]]:
    """Return the inputs of the graphs that predict, except the samples."""
    fixed: dict[str, NDArray[Any]] = {}
    for name, value in model.parameters.items():
        fixed[parameter_input(name)] = value
    return fixed | own_statistics(config, model)


def own_statistics(config: DeviceConfig, model: StoredModel) -> Statistics:
    """Measure the static batch norms of a model with its statistics graph on the board's samples.

    Its evaluation uses the same samples.
    """
    if not model.manifest.statistics:
        return {}
    contract = read_contract(config.state_dir) or NO_CONTRACT
    data = order_columns(load_data(config.data), contract).fit_to(model.manifest)
    settings = TrainSettings(
        learning_rate=1.0,
        epochs=1,
        batch_size=BATCH_SIZE,
        seed=0,
    )
    session = ForwardSession(
        model.manifest, model.graphs[STATS], model.parameters, threads=config.known_threads
    )
    training, _held_out = holdout_split(len(data), config.holdout)
    schedule = TrainingSchedule(data, training, settings, 0)
    statistics, _batches = measure(session, model.manifest, schedule, Hooks())
    data.check_unchanged()
    return statistics
