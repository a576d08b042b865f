"""Measures on the board's own held-out samples what leaving at exits costs and saves."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.agent.cache import read_index
from device_runtime.predictions.exits import Stages
from device_runtime.predictions.stored_models import BATCH_SIZE, read_board_model
from device_runtime.settings import DeviceConfig
from device_runtime.training.backends import choose_backend
from device_runtime.training.schedule import batches, holdout_split
from fleet_protocol.data import load_data
from fleet_protocol.data.column_order import order_columns
from fleet_protocol.data.terms import NO_CONTRACT, read_contract
from fleet_protocol.errors import ConfigError, DataError

BOUNDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Bounds that are measured by default."""

_NEVER = 2.0  # no confidence reaches it

Batch = tuple[NDArray[Any], NDArray[Any]]
"""Samples and their labels."""


@dataclass(frozen=True)
class ExitFigures:
    """Figures of one bound.

    Attributes:
        confidence: the bound; None if all samples leave at the last exit.
        accuracy: share of right answers.
        milliseconds: time of a sample.
        shares: share of the samples that leave at each exit.
        accuracies: share of right answers among those, by exit; None where none left.
    """

    confidence: float | None
    accuracy: float
    milliseconds: float
    shares: tuple[float, ...]
    accuracies: tuple[float | None, ...]

    @property
    def text(self) -> str:
        """The figures in a line."""
        bound = "whole model" if self.confidence is None else f"confidence {self.confidence:g}"
        parts = [f"{bound}: accuracy {self.accuracy:.3f}, {self.milliseconds:.3f} ms a sample"]
        for number, share in enumerate(self.shares, 1):
            accuracy = self.accuracies[number - 1]
            right = "" if accuracy is None else f" with accuracy {accuracy:.3f}"
            parts.append(f"exit {number} {share:.0%}{right}")
        return ", ".join(parts)


def measure_exits(config: DeviceConfig, bounds: tuple[float, ...] = BOUNDS) -> list[ExitFigures]:
    """Measure the board's model at some bounds, and without any.

    Raises:
        ConfigError: there is no model, or it has fewer than two exits.
        DataError: the board holds no samples out, or they do not fit the model.
        BlobError: a file of the model is damaged.
    """
    choose_backend(config.backend)
    model = read_board_model(config, read_index(config.state_dir))
    stages = Stages(config, model)
    if len(stages) < 2:
        raise ConfigError(
            f"{model.manifest.arch} {model.manifest.tier} has one exit, so every sample leaves"
            " there; there are bounds to compare only in deeper tiers"
        )
    contract = read_contract(config.state_dir) or NO_CONTRACT
    data = order_columns(load_data(config.data), contract).fit_to(model.manifest)
    _training, held_out = holdout_split(len(data), config.holdout)
    if not len(held_out):
        raise DataError(
            "this board holds no samples out; set holdout in device.toml, for example to 0.1"
        )
    pieces: list[Batch] = []
    for indices in batches(held_out, BATCH_SIZE):
        x, y = data.batch(indices, model.manifest.input_dtype)
        pieces.append((x, np.asarray(y)))
    # Once without a clock: the first run allocates.
    stages.run(pieces[0][0], _NEVER)
    figures: list[ExitFigures] = []
    for bound in bounds:
        figures.append(_figures(stages, pieces, bound))
    figures.append(_figures(stages, pieces, None))
    return figures


def _figures(stages: Stages, pieces: list[Batch], bound: float | None) -> ExitFigures:
    exits: list[NDArray[Any]] = []
    rights: list[NDArray[Any]] = []
    seconds = 0.0
    for x, y in pieces:
        left = stages.run(x, _NEVER if bound is None else bound)
        seconds += left.seconds
        exits.append(left.exits)
        rights.append(left.answers.argmax(1) == y)
    exit_of = np.concatenate(exits)
    is_right = np.concatenate(rights)
    shares: list[float] = []
    accuracies: list[float | None] = []
    for number in range(1, len(stages) + 1):
        is_here = exit_of == number
        shares.append(float(is_here.mean()))
        accuracies.append(float(is_right[is_here].mean()) if is_here.any() else None)
    return ExitFigures(
        bound,
        float(is_right.mean()),
        1e3 * seconds / len(exit_of),
        tuple(shares),
        tuple(accuracies),
    )
