"""The models on a board's disk: the newest that the fleet has sent, or the board's own.

Everything is read from the agent's state folder, beside a running agent. That replaces its index at
once when a newer model is whole on disk, so a reader sees the one or the other and never parts of
both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from device_runtime.agent.cache import CacheIndex
from device_runtime.settings import DeviceConfig
from device_runtime.training.backends import ForwardSession
from device_runtime.training.backends.runtime import open_session
from device_runtime.training.hooks import Hooks
from device_runtime.training.measuring import INFER, STATS, Statistics, measure
from device_runtime.training.own_model import OwnModel
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

BATCH_SIZE = 32


@dataclass(frozen=True)
class StoredModel:
    """A model on disk.

    Attributes:
        about: which it is, ready for JSON.
        manifest: its manifest.
        graphs: files of its graphs, by key.
        parameters: its weights by name, frozen ones among them.
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
            f"there is no model of the fleet in {config.state_dir} yet: let the board take part "
            "in a round first (shoal device run), with predict = true in device.toml "
            "and max_cache_bytes for more than one model"
        )
    blobs = BlobStore(config.state_dir)
    digest = index.weights[-1]
    manifest = Manifest.model_validate_json(blobs.read(index.sets[-1].manifest))
    # Its digest is compared; the weights themselves are read into place below.
    blobs.read(digest)  # raises where it is not whole
    graphs: dict[str, Path] = {}
    for key, spec in manifest.graphs.items():
        if blobs.has(spec.digest):
            graphs[key] = blobs.path(spec.digest)
    weights = read_weights(blobs.path(digest), manifest)
    parameters = base_tensors(manifest, blobs) | weights
    return StoredModel({**index.newest, "digest": digest}, manifest, graphs, parameters)


def read_own_model(config: DeviceConfig) -> StoredModel:
    """Read the board's own model as its last round left it, or as its set starts it."""
    assert config.own_model is not None
    model = OwnModel(config.own_model.set, config.state_dir, config.own_model.keep_runs)
    manifest = model.manifest().own
    kept = model.files.newest()
    about = {"own": manifest.arch, "tier": manifest.tier, "from": "its set"}
    if kept is not None:
        about["from"] = kept.path.name
        about["digest"] = blob_digest(kept.path.read_bytes())
    graphs: dict[str, Path] = {}
    for key in (INFER, STATS):
        if key in manifest.graphs:
            graphs[key] = model.path(manifest.graphs[key])
    return StoredModel(about, manifest, graphs, model.parameters(kept))


def open_model(config: DeviceConfig, model: StoredModel) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Open the graph that predicts.

    Returns:
        An ``onnxruntime.InferenceSession``, and all its inputs but samples.

    Raises:
        ConfigError: the model has no such graph.
    """
    manifest = model.manifest
    needed = {INFER, STATS} if manifest.statistics else {INFER}
    if not needed <= model.graphs.keys():
        raise ConfigError(
            f"the newest model on this board has no graph that predicts "
            f"({manifest.arch} {manifest.tier}): set predict = true in device.toml "
            "and let the board take part in another round"
        )
    graph = open_session(
        model.graphs[INFER],
        manifest.graphs.values(),
        threads=config.known_threads,
        leaves=False,
    )
    fixed: dict[str, NDArray[Any]] = {}
    for name, value in model.parameters.items():
        fixed[parameter_input(name)] = value
    fixed |= _own_statistics(config, model)
    inputs = {port.name for port in graph.get_inputs()}
    return graph, {name: value for name, value in fixed.items() if name in inputs}


def _own_statistics(config: DeviceConfig, model: StoredModel) -> Statistics:
    """Measure the static batch norms on the board's own training samples.

    These are the samples that its evaluation takes, too.
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
