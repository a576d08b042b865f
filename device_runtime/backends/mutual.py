"""The mutual step of FML on a device: a personal model and a meme in one graph, with all their tensors in place.

Tao Shen et al.: "Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765; METHODS 5.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.backends.swapping import SwappingStep
from fleet_protocol.manifest import noise_input, parameter_input, state_input
from fleet_protocol.mutual_manifest import SIDES, MutualManifest, Side, loss_name, side_name

__all__ = ["MutualSession"]

Array = NDArray[Any]
Tensors = dict[str, NDArray[np.float32]]


class MutualSession:
    """Both models of a mutual set with their optimizer states.

    Args:
        manifest: of the mutual set.
        graph: file of the mutual step.
        threads: threads of one operator; 0 takes every core.
    """

    def __init__(self, manifest: MutualManifest, graph: Path, *, threads: int = 1) -> None:
        self._manifest = manifest
        shapes = {
            side_name(side, name): shape
            for side in SIDES
            for name, shape in (
                *((parameter_input(p.name), p.shape) for p in manifest.side(side).parameters),
                *((state_input(s.name), s.shape) for s in manifest.side(side).states),
            )
        }
        self._step = SwappingStep(graph, shapes, [loss_name(side) for side in SIDES], threads=threads)

    def load(self, side: Side, weights: Mapping[str, Array], states: Mapping[str, Array] | None = None) -> None:
        """Take new parameters for one of the models.

        Args:
            side: which model.
            weights: parameter name to float32 array of its local shape.
            states: momentum by parameter name, which the personal model keeps from round to round; the optimizer
                starts from zero where it is None, as the meme's does in every round.
        """
        current, manifest = self._step.current, self._manifest.side(side)
        for spec in manifest.parameters:
            np.copyto(current[side_name(side, parameter_input(spec.name))], weights[spec.name], casting="no")
        for state in manifest.states:
            kept = current[side_name(side, state_input(state.name))]
            if states is None:
                kept.fill(0)
            else:
                np.copyto(kept, states[state.name], casting="no")

    def step(
        self,
        x: Array,
        y: Array,
        alpha: float,
        beta: float,
        learning_rate: float,
        noise: Mapping[str, Array] | None = None,
    ) -> tuple[float, float]:
        """Train both models on one batch; neither sees the other's new weights.

        Args:
            x: samples ``[B, ...]``.
            y: labels ``[B]``, or ``[B, T]`` with a label per token, int64.
            alpha: how much the personal model trusts the labels, in [0, 1].
            beta: how much the meme does.
            learning_rate: step size of both.
            noise: ``<side>.<layer>`` to float32 ``[B, ...]`` for every entry of the mutual manifest's ``noise``; see
                `device_runtime.training.draw_noise`.

        Returns:
            Losses of the personal model and of the meme before the step, means over the batch.
        """
        scalars = {"alpha": alpha, "beta": beta, "lr": learning_rate}
        feeds: dict[str, Array] = {name: np.array(value, np.float32) for name, value in scalars.items()}
        feeds |= {"x": x, "y": y}
        feeds |= {noise_input(layer): numbers for layer, numbers in (noise or {}).items()}
        personal, meme = self._step.run(feeds)
        return personal, meme

    def parameters(self, side: Side) -> Tensors:
        """The parameters of a model now, in manifest order; views that the next step but one overwrites."""
        current = self._step.current
        return {p.name: current[side_name(side, parameter_input(p.name))] for p in self._manifest.side(side).parameters}

    def states(self, side: Side) -> Tensors:
        """The momentum of a model now, by parameter name; views, as of `parameters`."""
        current = self._step.current
        return {s.name: current[side_name(side, state_input(s.name))] for s in self._manifest.side(side).states}
