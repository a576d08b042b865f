"""Predictions on the board, without a network: of its own model, or of the newest model of the
fleet that it was sent.

Everything is read from the agent's state folder, beside a running agent. That replaces its index at
once when a newer model is whole on disk, so a reader sees the one or the other and never parts of
both.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.agent.cache import CacheIndex, read_index
from device_runtime.settings import DeviceConfig
from device_runtime.training.backends import ForwardSession, choose_backend
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
from fleet_protocol.data.readers import ArrayOrNamed
from fleet_protocol.data.samples import read_samples
from fleet_protocol.data.terms import NO_CONTRACT, read_contract
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import (
    BlobError,
    ConfigError,
    DataError,
    RefusalReason,
    RefusedError,
    StorageError,
)
from fleet_protocol.manifest import Manifest, parameter_input
from fleet_protocol.messages import TrainSettings

_BATCH = 32
_Found = tuple[Mapping[str, str | int], list[dict[str, Any]]]


@dataclass(frozen=True)
class _Model:
    """A model on disk: which it is, its manifest, the files of its graphs by key, and its weights
    by name.
    """

    about: Mapping[str, str | int]
    manifest: Manifest
    graphs: Mapping[str, Path]
    parameters: Mapping[str, NDArray[Any]]


class Predictor:
    """The board's newest model, opened when there is a newer one.

    A call of it may take so many seconds.
    """

    def __init__(self, config: DeviceConfig, seconds: float = threading.TIMEOUT_MAX) -> None:
        self._config = config
        self._seconds = seconds
        self._turn = threading.Lock()
        self._key: object = None
        self._model: Any = None

    def __call__(
        self, samples: Path | ArrayOrNamed, seconds: float = threading.TIMEOUT_MAX
    ) -> _Found:
        """As `predict`, of a file or of arrays, of several threads.

        A DataError where there is no time for it.
        """
        seconds = min(seconds, self._seconds)
        ends = time.monotonic() + seconds
        if not self._turn.acquire(timeout=seconds):
            raise DataError(
                f"others have asked for so much that {seconds:g} seconds are over; ask again"
            )
        try:
            return self._run(samples, ends)
        finally:
            self._turn.release()

    def _run(self, samples: Path | ArrayOrNamed, ends: float) -> _Found:
        config = self._config
        index = read_index(self._config.state_dir)
        try:
            own = [
                (path.name, path.stat().st_mtime_ns)
                for path in sorted(config.state_dir.glob("own-model-*"))
            ]
            key = (
                (index.newest, index.sets[-1:], index.weights[-1:])
                if config.own_model is None
                else own
            )
            if self._key != key:
                self._key = None  # until it is open
                choose_backend(
                    config.backend
                )  # whatever else is missing, without a runtime nothing helps
                self._model = _fleets(config, index) if config.own_model is None else _own(config)
                self._graph, self._fixed = _opened(config, self._model)
                self._key = key
            manifest = self._model.manifest
            contract = read_contract(config.state_dir)
            data = read_samples(samples, config.data, manifest, contract)
            outputs = self._outputs(data.batches(_BATCH, manifest.input_dtype), ends)
            data.check_unchanged()
            return self._model.about, _rows(manifest, outputs)
        except (BlobError, StorageError, OSError):
            if read_index(config.state_dir) == index:
                raise
        return self._run(samples, ends)  # the agent has replaced what was being read

    def _outputs(
        self, data: Iterator[tuple[NDArray[Any], Any]], ends: float
    ) -> dict[str, NDArray[Any]]:
        """``logits``, or ``logits.<head>`` of every head, ``[N, ...]``."""
        parts: list[list[NDArray[Any]]] = []
        for x, _ in data:
            if time.monotonic() > ends:
                raise DataError(
                    f"no time for more than {_BATCH * len(parts)} of the samples; ask for fewer at once"
                )
            try:
                parts.append(self._graph.run(None, {"x": x, **self._fixed}))
            except Exception as error:  # the runtime's own exceptions share no base class
                raise DataError(f"the graph does not run on these samples: {error}") from error
        names = [port.name for port in self._graph.get_outputs()]
        return {
            name: np.concatenate(found)
            for name, found in zip(names, zip(*parts, strict=True), strict=True)
        }


def predict(config: DeviceConfig, path: Path) -> _Found:
    """Let the board's model judge the samples of a file, see `fleet_protocol.data.samples`.

    Returns:
        Which model it is, and of each sample its outputs by head, for a model of labels also the
        largest one's ``label`` and its ``share`` (softmax); ready for JSON.

    Raises:
        ConfigError: there is no model on this board yet, or it has no graph that predicts; the
            message says why.
        DataError: the samples are not what the model takes.
        DataChangedError: their file, or a file of the board's own data, changed meanwhile.
        BlobError: a file of the model is damaged.
        RefusedError: the graph is none that a board runs, or its outputs are not finite.
    """
    return Predictor(config)(path)


def _fleets(config: DeviceConfig, index: CacheIndex) -> _Model:
    """The newest that the fleet has sent."""
    if not (index.newest and index.sets and index.weights):
        raise ConfigError(
            f"there is no model of the fleet in {config.state_dir} yet: let the board take part in a round first"
            " (shoal device run), with predict = true in device.toml and max_cache_bytes for more than one model"
        )
    blobs = BlobStore(config.state_dir)
    digest = index.weights[-1]
    manifest = Manifest.model_validate_json(blobs.read(index.sets[-1].manifest))
    blobs.read(digest)  # sees that it is whole
    graphs = {
        key: blobs.path(spec.digest)
        for key, spec in manifest.graphs.items()
        if blobs.has(spec.digest)
    }
    weights = read_weights(blobs.path(digest), manifest)
    return _Model(
        {**index.newest, "digest": digest},
        manifest,
        graphs,
        base_tensors(manifest, blobs) | weights,
    )


def _own(config: DeviceConfig) -> _Model:
    """The board's own as its last round left it, or as its set starts it."""
    assert config.own_model is not None
    model = OwnModel(config.own_model.set, config.state_dir, config.own_model.keep_runs)
    own = model.manifest().own
    kept = model.files.newest()
    about = {
        "own": own.arch,
        "tier": own.tier,
        "from": "its set" if kept is None else kept.path.name,
    }
    if kept is not None:
        about["digest"] = blob_digest(kept.path.read_bytes())
    graphs = {key: model.path(own.graphs[key]) for key in (INFER, STATS) if key in own.graphs}
    return _Model(about, own, graphs, model.parameters(kept))


def _opened(config: DeviceConfig, model: _Model) -> tuple[Any, dict[str, NDArray[Any]]]:
    """The graph that predicts, and all that it takes but samples."""
    manifest = model.manifest
    if not {INFER, *([STATS] if manifest.statistics else [])} <= model.graphs.keys():
        raise ConfigError(
            f"the newest model on this board has no graph that predicts ({manifest.arch} {manifest.tier}): set predict"
            " = true in device.toml and let the board take part in another round"
        )
    graph = open_session(
        model.graphs[INFER],
        manifest.graphs.values(),
        threads=config.threads,
        leaves=False,
    )
    fixed = {
        parameter_input(name): value for name, value in model.parameters.items()
    } | _statistics(config, model)
    return graph, {port.name: fixed[port.name] for port in graph.get_inputs() if port.name in fixed}


def _rows(manifest: Manifest, outputs: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    if not all(np.isfinite(value).all() for value in outputs.values()):
        raise RefusedError(
            RefusalReason.NOT_FINITE,
            "what the model says of these samples is not finite",
        )
    first = next(iter(outputs.values()))
    rows = [{name: value[i].tolist() for name, value in outputs.items()} for i in range(len(first))]
    if (
        len(outputs) > 1
        or manifest.recipe.loss.target != "int64"
        or first.ndim != 2
        or first.shape[1] < 2
    ):
        return rows
    shares = np.exp(first - first.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return [
        {"label": int(s.argmax()), "share": float(s.max()), **row}
        for s, row in zip(shares, rows, strict=True)
    ]


def _statistics(config: DeviceConfig, model: _Model) -> Statistics:
    """Of the static batch norms, on the board's own training samples, as its evaluation has them."""
    if not model.manifest.statistics:
        return {}
    data = order_columns(
        load_data(config.data), read_contract(config.state_dir) or NO_CONTRACT
    ).fit_to(model.manifest)
    settings = TrainSettings(learning_rate=1.0, epochs=1, batch_size=_BATCH, seed=0)
    session = ForwardSession(
        model.manifest, model.graphs[STATS], model.parameters, threads=config.threads
    )
    schedule = TrainingSchedule(data, holdout_split(len(data), config.holdout)[0], settings, 0)
    statistics = measure(session, model.manifest, schedule, Hooks())[0]
    data.check_unchanged()
    return statistics
