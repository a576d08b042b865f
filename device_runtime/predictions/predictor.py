"""Lets the board's newest model judge samples: its own model, or the newest of the fleet."""

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.agent.cache import CacheIndex, read_index
from device_runtime.predictions.stored_models import (
    BATCH_SIZE,
    StoredModel,
    open_model,
    read_fleet_model,
    read_own_model,
)
from device_runtime.settings import DeviceConfig
from device_runtime.training.backends import choose_backend
from fleet_protocol.data.readers import ArrayOrNamed
from fleet_protocol.data.samples import read_samples
from fleet_protocol.data.terms import read_contract
from fleet_protocol.errors import BlobError, DataError, RefusalReason, RefusedError, StorageError
from fleet_protocol.manifest import Manifest

Predictions = tuple[Mapping[str, str | int], list[dict[str, Any]]]
"""Which model predicts, and a row for each sample; ready for JSON."""


class Predictor:
    """The board's newest model, opened when there is a newer one.

    A call of it may take so many seconds.
    """

    def __init__(self, config: DeviceConfig, seconds: float = threading.TIMEOUT_MAX) -> None:
        self._config = config
        self._seconds = seconds
        self._lock = threading.Lock()
        self._key: object = None  # of the model that is open, None where none is
        self._model: StoredModel | None = None
        self._graph: Any = None
        self._fixed: dict[str, NDArray[Any]] = {}

    def __call__(
        self, samples: Path | ArrayOrNamed, seconds: float = threading.TIMEOUT_MAX
    ) -> Predictions:
        """Predict as `predict` does, from a file or from arrays; several threads may call.

        Raises:
            DataError: there is no time for it.
        """
        seconds = min(seconds, self._seconds)
        deadline = time.monotonic() + seconds
        # One at a time: a board has memory for the intermediate tensors of one batch.
        if not self._lock.acquire(timeout=seconds):
            raise DataError(
                f"others have asked for so much that {seconds:g} seconds are over; ask again"
            )
        try:
            return self._predict(samples, deadline)
        finally:
            self._lock.release()

    def _predict(self, samples: Path | ArrayOrNamed, deadline: float) -> Predictions:
        config = self._config
        index = read_index(config.state_dir)
        try:
            model = self._open_newest(index)
            contract = read_contract(config.state_dir)
            data = read_samples(samples, config.data, model.manifest, contract)
            batches = data.batches(BATCH_SIZE, model.manifest.input_dtype)
            outputs = self._outputs(batches, deadline)
            data.check_unchanged()
            return model.about, _rows(model.manifest, outputs)
        except (BlobError, StorageError, OSError):
            if read_index(config.state_dir) == index:
                raise
        return self._predict(samples, deadline)  # the agent has replaced what was being read

    def _open_newest(self, index: CacheIndex) -> StoredModel:
        """Return the newest model, opened if it is not the one that was opened last."""
        config = self._config
        key = self._newest_key(index)
        if self._model is not None and self._key == key:
            return self._model
        self._key = None  # until it is open
        choose_backend(config.backend)  # first: without a runtime nothing else that lacks helps
        if config.own_model is None:
            model = read_fleet_model(config, index)
        else:
            model = read_own_model(config)
        self._model = model
        self._graph, self._fixed = open_model(config, model)
        self._key = key
        return model

    def _newest_key(self, index: CacheIndex) -> object:
        """Return what changes when there is a newer model."""
        if self._config.own_model is None:
            return index.newest, index.sets[-1:], index.weights[-1:]
        files = sorted(self._config.state_dir.glob("own-model-*"))
        return [(path.name, path.stat().st_mtime_ns) for path in files]

    def _outputs(
        self, data: Iterator[tuple[NDArray[Any], Any]], deadline: float
    ) -> dict[str, NDArray[Any]]:
        """Return ``logits``, or ``logits.<head>`` of every head, ``[N, ...]``."""
        batches: list[list[NDArray[Any]]] = []
        for x, _ in data:
            if time.monotonic() > deadline:
                raise DataError(
                    f"no time for more than {BATCH_SIZE * len(batches)} of the samples; "
                    "ask for fewer at once"
                )
            try:
                batches.append(self._graph.run(None, {"x": x, **self._fixed}))
            except Exception as error:  # the runtime's own exceptions share no base class
                raise DataError(f"the graph does not run on these samples: {error}") from error
        names = [port.name for port in self._graph.get_outputs()]
        outputs = zip(*batches, strict=True)
        return {name: np.concatenate(values) for name, values in zip(names, outputs, strict=True)}


def predict(config: DeviceConfig, path: Path) -> Predictions:
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


def _rows(manifest: Manifest, outputs: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """Return a row for each sample, with its label where the model tells one."""
    if not all(np.isfinite(value).all() for value in outputs.values()):
        raise RefusedError(
            RefusalReason.NOT_FINITE,
            "what the model says of these samples is not finite",
        )
    first = next(iter(outputs.values()))
    rows = [_row(outputs, index) for index in range(len(first))]
    has_labels = manifest.recipe.loss.target == "int64"
    if len(outputs) > 1 or not has_labels or first.ndim != 2 or first.shape[1] < 2:
        return rows
    shares = np.exp(first - first.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    labelled: list[dict[str, Any]] = []
    for share, row in zip(shares, rows, strict=True):
        labelled.append({"label": int(share.argmax()), "share": float(share.max()), **row})
    return labelled


def _row(outputs: Mapping[str, NDArray[Any]], index: int) -> dict[str, Any]:
    """Return the outputs of one sample, ready for JSON."""
    return {name: value[index].tolist() for name, value in outputs.items()}
