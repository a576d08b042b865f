"""A step graph that trains two models on the same batch, with all their tensors in place
(specification 5.3).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.swapping import Sized, StepTensors, SwappingStep
from fleet_protocol.manifest import noise_input, parameter_input, state_input
from fleet_protocol.pair_manifest import SIDES, PairManifest, Side, loss_name, side_name

Array = NDArray[Any]
Tensors = dict[str, NDArray[Any]]


class PairSession:
    """Both models of a pair with their optimizer states.

    With 0 threads an operator takes every core.
    """

    def __init__(self, manifest: PairManifest, graph: Path, *, threads: int = 1) -> None:
        self._manifest = manifest
        moving: dict[str, Sized] = {}
        for side in SIDES:
            model = manifest.side(side)
            moving |= {
                side_name(side, parameter_input(spec.name)): spec for spec in model.parameters
            }
            moving |= {side_name(side, state_input(spec.name)): spec for spec in model.states}
        tensors = StepTensors(moving=moving, scalars=tuple(loss_name(side) for side in SIDES))
        peak = manifest.peak_memory_bytes
        self._step = SwappingStep(
            graph, (manifest.graph,), tensors, peak_bytes=peak, threads=threads
        )

    def load(
        self,
        side: Side,
        weights: Mapping[str, Array],
        states: Mapping[str, Array] | None = None,
    ) -> None:
        """Take new parameters for one of the models.

        Args:
            side: which model.
            weights: parameter name to float32 array of its local shape.
            states: of the optimizer by name, which the device's own model keeps from round to
                round; None for the initial ones, as the model that is sent has them in every round.
        """
        current = self._step.current
        manifest = self._manifest.side(side)
        for spec in manifest.parameters:
            np.copyto(
                current[side_name(side, parameter_input(spec.name))],
                weights[spec.name],
                casting="no",
            )
        for state in manifest.states:
            kept = current[side_name(side, state_input(state.name))]
            if states is None:
                kept.fill(state.initial)
            else:
                np.copyto(kept, states[state.name], casting="no")

    def step(
        self,
        x: Array,
        y: Array,
        scalars: Mapping[str, float],
        noise: Mapping[str, Array] | None = None,
    ) -> tuple[float, ...]:
        """Train both models on one batch; neither sees the other's new weights.

        Args:
            x: samples ``[B, ...]``.
            y: labels ``[B]``, or ``[B, T]`` with a label per token, int64.
            scalars: inputs of one number each: ``lr``, the step size of both, and what else the
                graph takes.
            noise: ``<side>.<layer>`` to float32 ``[B, ...]`` for every entry of the pair's
                ``noise``; see `device_runtime.training.schedule.draw_noise`.

        Returns:
            Losses of the two models before the step, in the order of `SIDES`, means over the batch.
        """
        feeds: dict[str, Array] = {
            name: np.array(value, np.float32) for name, value in scalars.items()
        }
        feeds |= {"x": x, "y": y}
        feeds |= {noise_input(layer): numbers for layer, numbers in (noise or {}).items()}
        return tuple(self._step.run(feeds))

    def parameters(self, side: Side) -> Tensors:
        """The parameters of a model now, in manifest order.

        Views that the next step but one overwrites.
        """
        current = self._step.current
        return {
            p.name: current[side_name(side, parameter_input(p.name))]
            for p in self._manifest.side(side).parameters
        }

    def states(self, side: Side) -> Tensors:
        """The optimizer states of a model now, by name; views, as of `parameters`."""
        current = self._step.current
        return {
            s.name: current[side_name(side, state_input(s.name))]
            for s in self._manifest.side(side).states
        }
