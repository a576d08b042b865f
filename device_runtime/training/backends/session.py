"""Graphs with their tensors in place: one class trains with either flavour of the step graph, one
evaluates.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.runtime import CPU, open_session
from device_runtime.training.backends.swapping import StepTensors, SwappingStep
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.manifest import (
    Manifest,
    anchor_input,
    noise_input,
    parameter_input,
    state_input,
    statistic_mean,
    statistic_variance,
)
from fleet_protocol.metrics import summed_outputs
from fleet_protocol.targets import Targets, counted

Array = NDArray[Any]


def step_graph_key(backend: str, manifest: Manifest) -> str | None:
    """Which graph of a set is the training step for a backend.

    Returns:
        Key in ``manifest.graphs``, or None if the set has no step for this backend.
        onnxruntime-training takes the portable step where the set has no step of its own.
    """
    wanted = ("ort-training/step", "onnx/train") if backend == "ort-training" else ("onnx/train",)
    return next((key for key in wanted if key in manifest.graphs), None)


class TrainSession:
    """A training step with its parameters and states; with 0 threads an operator takes every core.

    A provider may name threads of its own, as ``CPU:4`` does. The frozen tensors of the manifest,
    by name, are read where they lie and never copied.
    """

    def __init__(
        self,
        manifest: Manifest,
        graph: Path,
        *,
        threads: int = 1,
        base: Mapping[str, Array] | None = None,
        provider: str = CPU,
    ) -> None:
        self._manifest = manifest
        provider, _, own = provider.partition(":")
        threads = int(own) if own else threads
        states = {state_input(spec.name): spec for spec in manifest.states}
        parameters = {parameter_input(spec.name): spec for spec in manifest.parameters}
        staying = [*states] * manifest.states_in_place + [
            *parameters
        ] * manifest.parameters_in_place
        tensors = StepTensors(
            moving={**parameters, **states},
            scalars=("loss",),
            fixed={anchor_input(spec.name): spec for spec in manifest.parameters},
            settings=("lr", "mu", "share", "last"),
            in_place=frozenset(staying),
            given={parameter_input(name): array for name, array in (base or {}).items()},
        )
        specs = manifest.graphs.values()
        peak = manifest.peak_memory_bytes
        self._step = SwappingStep(
            graph, specs, tensors, peak_bytes=peak, threads=threads, provider=provider
        )
        self._piece: int | None = None

    def reset(self) -> dict[str, NDArray[np.float32]]:
        """Start again: the optimizer from its initial states, the parameters from what the caller
        writes into them.

        Returns:
            Parameter name to the array that the next step reads.
        """
        for state in self._manifest.states:
            self._step.current[state_input(state.name)].fill(state.initial)
        return self.parameters()

    def load_states(self, states: Mapping[str, Array]) -> None:
        """Go on with what an optimizer left, all states by name, or with what is there if there are
        none.

        Raises:
            RefusedError: they are those of another recipe.
        """
        for spec in self._manifest.states if states else ():
            value = states.get(spec.name)
            if value is None or (value.shape, value.dtype.name) != (
                spec.shape,
                spec.dtype,
            ):
                raise RefusedError(
                    RefusalReason.UNSUPPORTED,
                    f"what the optimizer kept of the run has no {spec.name} of shape {list(spec.shape)}: the artifacts "
                    f"of {self._manifest.arch} {self._manifest.tier} changed during the run; start a new run",
                )
            np.copyto(self._step.current[state_input(spec.name)], value)

    def take_pieces(self, size: int | None) -> None:
        """Compute no more than so many samples at once from now on, so a batch in pieces.

        Still one step a batch.

        Raises:
            RefusedError: the set was exported without sums of gradients.
        """
        if size is not None and not self._manifest.recipe.accumulate:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"artifact set {self._manifest.arch} {self._manifest.tier} takes whole batches, and micro_batch = "
                f"{size}; export it again with accumulate = true in [model.recipe]",
            )
        self._piece = size

    def anchor(self, mu: float) -> None:
        """Pull the parameters towards what they are now, until the next call (FedProx).

        0 for not at all.

        Raises:
            RefusedError: a proximal term is wanted that the set was not exported with.
        """
        anchors = self._step.fixed
        if mu and not anchors:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"artifact set {self._manifest.arch} {self._manifest.tier} has no proximal term, which mu = {mu:g} of "
                "FedProx needs; export it again with a proximal recipe",
            )
        for name, value in self.parameters().items():
            if anchor_input(name) in anchors:
                np.copyto(anchors[anchor_input(name)], value)
        self._step.set("mu", mu)

    def load(self, weights: Mapping[str, Array], mu: float = 0.0) -> None:
        """Take new parameters; the optimizer starts from its initial states.

        Args:
            weights: parameter name to float32 array of its local shape. With a proximal term in the
                recipe they are also what the parameters are pulled towards until the next call.
            mu: strength of the proximal term; 0 for none.

        Raises:
            RefusedError: a proximal term is wanted that the set was not exported with.
        """
        for name, array in self.reset().items():
            np.copyto(array, weights[name], casting="no")
        self.anchor(mu)

    def step(
        self,
        x: Array,
        y: Targets,
        mask: Array,
        learning_rate: float,
        noise: Mapping[str, Array] | None = None,
    ) -> float:
        """One step of the recipe on one batch; returns its mean loss before the step.

        Args:
            x: samples ``[B, ...]``.
            y: labels ``[B]``, or ``[B, T]`` with a label per token, int64.
            mask: ``[classes]`` float32, 1 for labels that count.
            learning_rate: step size.
            noise: layer to float32 ``[B, ...]`` for every entry of the manifest's ``noise``; see
                `device_runtime.training.schedule.draw_noise`.
        """
        whole = len(y)
        size = self._piece or len(y)
        loss = 0.0
        self._step.set("lr", learning_rate)
        feeds = {
            "x": x,
            "y": y,
            "mask": mask,
            **{noise_input(layer): value for layer, value in (noise or {}).items()},
        }
        if size >= whole:
            self._step.set("share", 1.0)
            self._step.set("last", 1.0)
            return self._step.run(feeds)[0]
        count = max(counted(y), 1)
        for first in range(0, whole, size):
            part = slice(first, first + size)
            share = counted(y[part]) / count
            self._step.set("share", share)
            self._step.set("last", part.stop >= whole)
            pieces = {
                name: value if name == "mask" else value[part] for name, value in feeds.items()
            }
            found = self._step.run(pieces)[0]
            loss += found * share if share else 0.0
        return loss

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """The parameters now, in manifest order; views that the next step may overwrite."""
        current = self._step.current
        return {
            spec.name: current[parameter_input(spec.name)] for spec in self._manifest.parameters
        }

    def states(self) -> dict[str, Array]:
        """The optimizer's states now, by name; views, as of `parameters`."""
        current = self._step.current
        return {spec.name: current[state_input(spec.name)] for spec in self._manifest.states}

    def addresses(self) -> dict[str, int]:
        """Where each current parameter and state lies in memory, and each frozen tensor.

        Parameters and states alternate between two places, unless the manifest allows them to stay.
        """
        return self._step.addresses()


class ForwardSession:
    """A graph that reads parameters and changes nothing: evaluation or batch norm statistics.

    It is given parameters by name, the frozen ones of the manifest's base among them.
    """

    def __init__(
        self,
        manifest: Manifest,
        graph: Path,
        parameters: Mapping[str, Array],
        *,
        threads: int = 1,
    ) -> None:
        self._manifest = manifest
        self._session = open_session(graph, manifest.graphs.values(), threads=threads)
        self._inputs = {spec.name for spec in self._session.get_inputs()}
        self.load(parameters)

    def load(self, parameters: Mapping[str, Array]) -> None:
        """Read other parameters, float32 by name, from now on; in place, not copied."""
        needed = [spec.name for spec in self._manifest.parameters] + [
            spec.name for spec in self._manifest.base
        ]
        self._fixed = {parameter_input(name): parameters[name] for name in needed}

    def _run(self, outputs: list[str], feeds: Mapping[str, Array]) -> list[Array]:
        known = {
            name: value for name, value in {**self._fixed, **feeds}.items() if name in self._inputs
        }
        result: list[Array] = self._session.run(outputs, known)
        return result

    def evaluate(
        self,
        x: Array,
        y: Array,
        mask: Array,
        statistics: Mapping[str, Array] | None = None,
    ) -> dict[str, NDArray[np.float64]]:
        """Sums of loss and metrics over one batch, as `fleet_protocol.metrics.summed_outputs` names
        them.

        Args:
            x: samples ``[B, ...]``.
            y: targets ``[B, ...]``, as the loss takes them.
            mask: ``[classes]`` float32.
            statistics: ``stat.<norm>.mean`` and ``.var`` of every static batch norm.
        """
        names = list(summed_outputs(self._manifest.recipe))
        found = self._run(names, {"x": x, "y": y, "mask": mask, **(statistics or {})})
        return {name: value.astype(np.float64) for name, value in zip(names, found, strict=True)}

    def statistics(self, x: Array) -> dict[str, NDArray[np.float32]]:
        """Mean and unbiased variance of every static batch norm on one batch ``[B, ...]``.

        Returns:
            ``stat.<norm>.mean`` and ``stat.<norm>.var`` to vectors of the norm's channels.
        """
        names = [
            name
            for spec in self._manifest.statistics
            for name in (statistic_mean(spec.name), statistic_variance(spec.name))
        ]
        return dict(zip(names, self._run(names, {"x": x}), strict=True))


class Sessions:
    """Opens the graphs of a task, steps on a provider; with 0 threads an operator takes every core.

    A board opens each anew, for memory; a simulation, which trains one tier for many devices, may
    keep them.
    """

    def __init__(self, threads: int = 1, provider: str = CPU) -> None:
        self.threads = threads
        self.provider = provider

    def train(self, manifest: Manifest, graph: Path, base: Mapping[str, Array]) -> TrainSession:
        """A session of a step graph; the caller loads weights."""
        return TrainSession(
            manifest, graph, threads=self.threads, base=base, provider=self.provider
        )

    def forward(
        self, manifest: Manifest, graph: Path, parameters: Mapping[str, Array]
    ) -> ForwardSession:
        """A session of a graph that changes nothing."""
        return ForwardSession(manifest, graph, parameters, threads=self.threads)
