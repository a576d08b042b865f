"""A step graph that trains two models on the same batch (specification 5.3).

All their tensors stay in place.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.swapping import StepTensors, SwappingStep, TensorDescription
from fleet_protocol.manifest import noise_input, parameter_input, state_input
from fleet_protocol.pair_manifest import SIDES, PairManifest, Side, loss_name, side_name

Array = NDArray[Any]
Tensors = dict[str, NDArray[Any]]


class PairSession:
    """Both models of a pair with their optimizer states.

    Args:
        manifest: manifest of the pair.
        graph: file of the step.
        threads: threads of an operator; 0 uses every core.
    """

    def __init__(
        self,
        manifest: PairManifest,
        graph: Path,
        *,
        threads: int = 1,
    ) -> None:
        self._manifest = manifest
        moving: dict[str, TensorDescription] = {}
        for side in SIDES:
            for parameter in manifest.side(side).parameters:
                moving[_parameter(side, parameter.name)] = parameter
            for state in manifest.side(side).states:
                moving[_state(side, state.name)] = state
        self._step = SwappingStep(
            graph,
            (manifest.graph,),
            StepTensors(moving=moving, scalars=tuple(loss_name(side) for side in SIDES)),
            peak_bytes=manifest.peak_memory_bytes,
            threads=threads,
        )

    def load(
        self,
        side: Side,
        weights: Mapping[str, Array],
        states: Mapping[str, Array] | None = None,
    ) -> None:
        """Load new parameters for one of the models.

        Args:
            side: the model to load into.
            weights: parameter name to float32 array of its local shape.
            states: states of the optimizer by name, which the device keeps for its own model from
                round to round; None for the initial ones, which the model from the fleet gets in
                every round.
        """
        # Written into the arrays that the bindings use; another type is a bug, so nothing is
        # converted.
        current = self._step.current
        manifest = self._manifest.side(side)
        for parameter in manifest.parameters:
            array = current[_parameter(side, parameter.name)]
            np.copyto(array, weights[parameter.name], casting="no")
        for state in manifest.states:
            array = current[_state(side, state.name)]
            if states is None:
                array.fill(state.initial)
            else:
                np.copyto(array, states[state.name], casting="no")

    def step(
        self,
        x: Array,
        y: Array,
        scalars: Mapping[str, float],
        noise: Mapping[str, Array] | None = None,
    ) -> tuple[float, ...]:
        """Train both models on one batch; each sees the other's weights from before the step.

        Args:
            x: samples ``[B, ...]``.
            y: labels ``[B]``, or ``[B, T]`` with a label per token, int64.
            scalars: inputs of one number each: ``lr``, the learning rate of both, and the graph's
                other settings.
            noise: ``<side>.<layer>`` to float32 ``[B, ...]`` for every entry of the pair's
                ``noise``; see `device_runtime.training.schedule.draw_noise`.

        Returns:
            Losses of the two models before the step, in the order of `SIDES`, as means over the
                batch.
        """
        feeds: dict[str, Array] = {}
        for name, number in scalars.items():
            feeds[name] = np.array(number, np.float32)
        feeds["x"] = x
        feeds["y"] = y
        for layer, numbers in (noise or {}).items():
            feeds[noise_input(layer)] = numbers
        return tuple(self._step.run(feeds))

    def parameters(self, side: Side) -> Tensors:
        """Return the current parameters of a model, in manifest order.

        They are views, which the next step but one overwrites.
        """
        current = self._step.current
        specs = self._manifest.side(side).parameters
        return {spec.name: current[_parameter(side, spec.name)] for spec in specs}

    def states(self, side: Side) -> Tensors:
        """Return the current optimizer states of a model by name; views, as in `parameters`."""
        current = self._step.current
        specs = self._manifest.side(side).states
        return {spec.name: current[_state(side, spec.name)] for spec in specs}


def _parameter(side: Side, name: str) -> str:
    return side_name(side, parameter_input(name))


def _state(side: Side, name: str) -> str:
    return side_name(side, state_input(name))
