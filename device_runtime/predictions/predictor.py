"""Predicts with the board's newest model: its own, or the fleet's with its private parts."""

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.agent.cache import CacheIndex, read_index
from device_runtime.predictions.exits import Stages
from device_runtime.predictions.stored_models import (
    BATCH_SIZE,
    StoredModel,
    open_model,
    private_files,
    read_board_model,
)
from device_runtime.settings import DeviceConfig
from device_runtime.training.backends import choose_backend
from device_runtime.training.own_model_files import OwnModelFiles
from fleet_protocol.data.readers import ArrayOrNamed
from fleet_protocol.data.samples import read_samples
from fleet_protocol.data.terms import read_contract
from fleet_protocol.errors import BlobError, DataError, RefusalReason, RefusedError, StorageError
from fleet_protocol.manifest import Manifest

Predictions = tuple[Mapping[str, str | int], list[dict[str, Any]]]
"""The model that predicts, and a row for each sample; ready for JSON."""


class Predictor:
    """The board's newest model, opened again when there is a newer one.

    A call has a time limit.

    Args:
        config: configuration of the board.
        seconds: the limit.
        confidence: bound at which a sample leaves a model with exits; None predicts with the whole
            model.
    """

    def __init__(
        self,
        config: DeviceConfig,
        seconds: float = threading.TIMEOUT_MAX,
        confidence: float | None = None,
    ) -> None:
        self._config = config
        self._confidence = confidence
        self._stages: Stages | None = None
        self._seconds = seconds
        self._lock = threading.Lock()
        self._key: object = None  # of the open model; None if none is open
        self._model: StoredModel | None = None
        self._graph: Any = None
        self._fixed: dict[str, NDArray[Any]] = {}

    def __call__(
        self, samples: Path | ArrayOrNamed, seconds: float = threading.TIMEOUT_MAX
    ) -> Predictions:
        """Predict as `predict` does, from a file or from arrays; callable from several threads.

        Raises:
            DataError: the time limit is over.
        """
        seconds = min(seconds, self._seconds)
        deadline = time.monotonic() + seconds
        # One call at a time: a board has memory for the intermediate tensors of one batch.
        if not self._lock.acquire(timeout=seconds):
            raise DataError(
                f"other requests took all of the {seconds:g} seconds; send the request again"
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
            if self._stages is not None:
                rows = self._rows_of_exits(self._stages, batches, deadline)
            else:
                rows = _rows(model.manifest, self._outputs(batches, deadline))
            data.check_unchanged()
        except (BlobError, StorageError, OSError):
            if read_index(config.state_dir) == index:
                raise
        else:
            return model.about, rows
        # the agent has replaced the files that were being read
        return self._predict(samples, deadline)

    def _open_newest(self, index: CacheIndex) -> StoredModel:
        """Return the newest model; open it unless it is the one already open."""
        config = self._config
        key = self._newest_key(index)
        if self._model is not None and self._key == key:
            return self._model
        self._key = None  # until it is open
        choose_backend(config.backend)  # first: without a runtime no other remedy helps
        model = read_board_model(config, index)
        self._model = model
        if self._confidence is None:
            self._graph, self._fixed = open_model(config, model)
        else:
            self._stages = Stages(config, model)
        self._key = key
        return model

    def _newest_key(self, index: CacheIndex) -> object:
        """Return a value that changes when there is a newer model."""
        if self._config.own_model is None:
            kept = private_files(self._config).stamps()
            return index.newest, index.sets[-1:], index.weights[-1:], kept
        return OwnModelFiles(self._config.state_dir).stamps()

    def _outputs(
        self, data: Iterator[tuple[NDArray[Any], Any]], deadline: float
    ) -> dict[str, NDArray[Any]]:
        """Return ``logits``, or ``logits.<head>`` of every head, ``[N, ...]``."""
        batches: list[list[NDArray[Any]]] = []
        for x, _ in data:
            _require_time(deadline, BATCH_SIZE * len(batches))
            try:
                batches.append(self._graph.run(None, {"x": x, **self._fixed}))
            except Exception as error:  # the runtime's own exceptions share no base class
                raise DataError(f"the graph does not run on these samples: {error}") from error
        names = [port.name for port in self._graph.get_outputs()]
        outputs = zip(*batches, strict=True)
        return {name: np.concatenate(values) for name, values in zip(names, outputs, strict=True)}

    def _rows_of_exits(
        self, stages: Stages, data: Iterator[tuple[NDArray[Any], Any]], deadline: float
    ) -> list[dict[str, Any]]:
        """Return a row for each sample, with the exit at which it left."""
        assert self._confidence is not None
        rows: list[dict[str, Any]] = []
        for x, _ in data:
            _require_time(deadline, len(rows))
            try:
                left = stages.run(x, self._confidence)
            except RefusedError:
                raise
            except Exception as error:  # the runtime's own exceptions share no base class
                raise DataError(f"the graph does not run on these samples: {error}") from error
            confidences = left.confidences
            for place, logits in enumerate(left.answers):
                row = {
                    "label": int(logits.argmax()),
                    "share": float(confidences[place]),
                    "exit": int(left.exits[place]),
                    "logits": logits.tolist(),
                }
                rows.append(row)
        return rows


def _require_time(deadline: float, finished: int) -> None:
    if time.monotonic() > deadline:
        raise DataError(f"no time for more than {finished} of the samples; send fewer at once")


def predict(config: DeviceConfig, path: Path, confidence: float | None = None) -> Predictions:
    """Predict with the board's model for samples; for their form see `fleet_protocol.data.samples`.

    Returns:
        The model's name, and for each sample its outputs by head; for a classifier also the
        ``label`` of the largest output and its ``share`` (softmax); ready for JSON. With a
        `confidence` also the ``exit`` at which the sample left, and the logits of its answer.

    Raises:
        ConfigError: there is no model on this board yet, or it has no graph that predicts; the
            message says why.
        DataError: the samples do not fit the model.
        DataChangedError: the samples' file, or a file of the board's own data, changed meanwhile.
        BlobError: a file of the model is damaged.
        RefusedError: a board must not run the graph, or its outputs are not finite.
    """
    return Predictor(config, confidence=confidence)(path)


def _rows(manifest: Manifest, outputs: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """Return a row for each sample, with its label if the model has labels."""
    if not all(np.isfinite(value).all() for value in outputs.values()):
        raise RefusedError(
            RefusalReason.NOT_FINITE,
            "the model's outputs for these samples are not finite",
        )
    first = next(iter(outputs.values()))
    rows = [_row(outputs, index) for index in range(len(first))]
    has_labels = manifest.recipe.loss.target == "int64"
    answer = _answer(manifest, outputs)
    if answer is None or not has_labels or answer.ndim != 2 or answer.shape[1] < 2:
        return rows
    shares = np.exp(answer - answer.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    labelled: list[dict[str, Any]] = []
    for share, row in zip(shares, rows, strict=True):
        labelled.append({"label": int(share.argmax()), "share": float(share.max()), **row})
    return labelled


def _answer(manifest: Manifest, outputs: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
    """Return the output that answers; None if several outputs answer different questions."""
    answering = manifest.recipe.loss.answer or tuple(outputs)
    if len(answering) == 1:
        return outputs[answering[0]]
    if not manifest.recipe.loss.answer:
        return None
    mean: NDArray[Any] = np.mean([outputs[name] for name in answering], axis=0)
    return mean


def _row(outputs: Mapping[str, NDArray[Any]], index: int) -> dict[str, Any]:
    """Return the outputs of one sample, ready for JSON."""
    return {name: value[index].tolist() for name, value in outputs.items()}
