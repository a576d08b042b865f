"""Predicts with a model that has exits, and leaves at the first one that is sure enough.

A sample leaves at the first exit whose confidence, the largest softmax of the answer there, reaches
a bound; all others leave at the last. The answer at an exit is the mean of the logits up to it if
the model answers with the mean of its exits, otherwise that exit's.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.predictions.stored_models import StoredModel, fixed_inputs
from device_runtime.settings import DeviceConfig
from device_runtime.training.backends.runtime import open_session
from device_runtime.training.measuring import INFER
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError
from fleet_protocol.graph_parts import exit_keys
from fleet_protocol.manifest import Manifest

Array = NDArray[Any]


@dataclass(frozen=True)
class Left:
    """Where the samples of a batch left, and with which answer.

    Attributes:
        exits: number of the exit of each sample, from 1, int64 [B].
        answers: logits of the answer of each sample, float32 [B, classes].
        seconds: time of all stages.
    """

    exits: Array
    answers: Array
    seconds: float

    @property
    def confidences(self) -> Array:
        """The largest softmax of each answer, float [B]."""
        return confidence_of(self.answers)


def confidence_of(logits: Array) -> Array:
    """Return the largest softmax of logits, [B, classes] to [B]."""
    shares = np.exp(logits - logits.max(1, keepdims=True))
    confidences: Array = shares.max(1) / shares.sum(1)
    return confidences


class Stages:
    """The stages of a model, which end at its exits.

    Args:
        config: configuration of the board.
        model: the model.

    Raises:
        ConfigError: the model has no exits, or they are not on this board.
    """

    def __init__(self, config: DeviceConfig, model: StoredModel) -> None:
        manifest = model.manifest
        keys = _stage_keys(manifest)
        name = f"{manifest.arch} {manifest.tier}"
        if not keys or manifest.label_shape:
            raise ConfigError(
                f"{name} has no exits at which a sample could leave: a confidence needs a model"
                " with exits, one label for each sample, and a loss of exits such as"
                " --loss all-exits-teach; predict without a confidence"
            )
        if not set(keys) <= model.graphs.keys():
            raise ConfigError(
                f"this board has no graphs of the exits of {name}: set predict = true in"
                " device.toml and let the board take part in another round"
            )
        answering = manifest.recipe.loss.answer
        self._is_mean = len(answering) > 1
        self._sessions: list[Any] = []
        self._fixed: list[Mapping[str, Array]] = []
        inputs = fixed_inputs(config, model)
        for key in keys:
            session = open_session(
                model.graphs[key],
                manifest.graphs.values(),
                threads=config.known_threads,
                leaves=False,
            )
            names = {port.name for port in session.get_inputs()}
            self._sessions.append(session)
            self._fixed.append({name: inputs[name] for name in inputs if name in names})

    def __len__(self) -> int:
        """Return the number of exits."""
        return len(self._sessions)

    def run(self, x: Array, confidence: float) -> Left:
        """Predict for a batch.

        Args:
            x: samples ``[B, ...]``.
            confidence: the bound, in (0, 1]; a larger number never leaves before the last exit.

        Raises:
            RefusedError: logits are not finite.
        """
        began = time.perf_counter()
        staying = np.arange(len(x))
        values: dict[str, Array] = {"x": x}
        exits = np.full(len(x), len(self), np.int64)
        answers: Array | None = None
        total: Array | None = None
        for number, (session, fixed) in enumerate(zip(self._sessions, self._fixed, strict=True), 1):
            logits, values = _run_stage(session, fixed, values)
            total = logits if total is None else total + logits
            answer = total / number if self._is_mean else logits
            if answers is None:
                answers = np.zeros((len(x), answer.shape[1]), np.float32)
            is_leaving = confidence_of(answer) >= confidence
            if number == len(self):
                is_leaving[:] = True
            answers[staying[is_leaving]] = answer[is_leaving]
            exits[staying[is_leaving]] = number
            # The next stage computes only the samples that stay.
            staying = staying[~is_leaving]
            total = total[~is_leaving]
            for name, value in values.items():
                values[name] = value[~is_leaving]
            if not len(staying):
                break
        assert answers is not None
        return Left(exits, answers, time.perf_counter() - began)


def _stage_keys(manifest: Manifest) -> tuple[str, ...]:
    """Return the keys of the stages; a sub-model with one exit is a stage as a whole."""
    inference = manifest.graphs.get(INFER)
    # Only a loss of exits names the outputs that answer.
    if inference is not None and manifest.recipe.loss.answer and len(inference.outputs) == 1:
        return (INFER,)
    return exit_keys(manifest.graphs)


def _run_stage(
    session: Any, fixed: Mapping[str, Array], values: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Run a stage; return the logits of its exit, and the values for later stages."""
    inputs = {port.name for port in session.get_inputs()}
    taken = {name: np.ascontiguousarray(values[name]) for name in values if name in inputs}
    names = [port.name for port in session.get_outputs()]
    outputs: Sequence[Array] = session.run(names, {**fixed, **taken})
    returned = dict(zip(names, outputs, strict=True))
    logits = returned.pop(names[0])
    if not np.isfinite(logits).all():
        raise RefusedError(
            RefusalReason.NOT_FINITE,
            "the model's outputs for these samples are not finite",
        )
    return logits, {**values, **returned}
