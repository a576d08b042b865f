"""Graphs with their tensors in place: one class trains with either step, one only reads."""

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
    """Return which graph of a set is the training step for a backend.

    Returns:
        Key in ``manifest.graphs``, or None if the set has no step for this backend.
        onnxruntime-training takes the portable step where the set has no step of its own.
    """
    wanted = ("ort-training/step", "onnx/train") if backend == "ort-training" else ("onnx/train",)
    return next((key for key in wanted if key in manifest.graphs), None)


class TrainSession:
    """A training step with its parameters and states.

    Args:
        manifest: of the artifact set.
        graph: file of the step.
        threads: of an operator; with 0 it takes every core.
        base: the frozen tensors of the manifest, by name; read where they lie and never copied.
        provider: of onnxruntime; it may name threads of its own, as ``CPU:4`` does.
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
        provider, _, own_threads = provider.partition(":")
        self._step = SwappingStep(
            graph,
            manifest.graphs.values(),
            _step_tensors(manifest, base or {}),
            peak_bytes=manifest.peak_memory_bytes,
            threads=int(own_threads) if own_threads else threads,
            provider=provider,
        )
        self._piece_size: int | None = None

    def reset(self) -> dict[str, NDArray[np.float32]]:
        """Start again: the optimizer from its initial states, the parameters from new weights.

        Returns:
            Parameter name to the array that the next step reads, for the caller to write into.
        """
        # In place: the bindings of the step know these arrays.
        for state in self._manifest.states:
            self._step.current[state_input(state.name)].fill(state.initial)
        return self.parameters()

    def load_states(self, states: Mapping[str, Array]) -> None:
        """Go on with what an optimizer left, or without any with what is there.

        Args:
            states: all states by name, or none.

        Raises:
            RefusedError: they are those of another recipe.
        """
        if not states:
            return
        for spec in self._manifest.states:
            value = states.get(spec.name)
            if value is None or (value.shape, value.dtype.name) != (spec.shape, spec.dtype):
                raise RefusedError(
                    RefusalReason.UNSUPPORTED,
                    f"what the optimizer kept of the run has no {spec.name} of shape "
                    f"{list(spec.shape)}: the artifacts of {self._manifest.arch} "
                    f"{self._manifest.tier} changed during the run; start a new run",
                )
            np.copyto(self._step.current[state_input(spec.name)], value)

    def split_batches(self, size: int | None) -> None:
        """Compute no more than so many samples at once from now on, still one step a batch.

        Args:
            size: samples of a piece; None for whole batches.

        Raises:
            RefusedError: the set was exported without sums of gradients.
        """
        if size is not None and not self._manifest.recipe.accumulate:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"artifact set {self._manifest.arch} {self._manifest.tier} takes whole batches, "
                f"and micro_batch = {size}; "
                "export it again with accumulate = true in [model.recipe]",
            )
        self._piece_size = size

    def anchor(self, mu: float) -> None:
        """Pull the parameters towards what they are now, until the next call (FedProx).

        Args:
            mu: strength of the pull; 0 for none.

        Raises:
            RefusedError: a proximal term is wanted that the set was not exported with.
        """
        anchors = self._step.fixed
        if mu and not anchors:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"artifact set {self._manifest.arch} {self._manifest.tier} has no proximal term, "
                f"which mu = {mu:g} of FedProx needs; export it again with a proximal recipe",
            )
        # Copied, as the parameters move and the anchor stays.
        for name, value in self.parameters().items():
            if anchor_input(name) in anchors:
                np.copyto(anchors[anchor_input(name)], value)
        self._step.set("mu", mu)

    def load(self, weights: Mapping[str, Array], mu: float = 0.0) -> None:
        """Load new parameters; the optimizer starts from its initial states.

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
        """Take one step of the recipe on one batch; return its mean loss before the step.

        Args:
            x: samples ``[B, ...]``.
            y: labels ``[B]``, or ``[B, T]`` with a label per token, int64.
            mask: ``[classes]`` float32, 1 for labels that count.
            learning_rate: step size.
            noise: layer to float32 ``[B, ...]`` for every entry of the manifest's ``noise``; see
                `device_runtime.training.schedule.draw_noise`.
        """
        self._step.set("lr", learning_rate)
        feeds: dict[str, Array] = {"x": x, "y": y}
        for layer, numbers in (noise or {}).items():
            feeds[noise_input(layer)] = numbers
        if self._piece_size and self._piece_size < len(y):
            return self._step_in_pieces(feeds, mask, self._piece_size)
        self._step.set("share", 1.0)
        self._step.set("last", 1.0)
        return self._step.run({**feeds, "mask": mask})[0]

    def _step_in_pieces(
        self,
        feeds: Mapping[str, Array],
        mask: Array,
        size: int,
    ) -> float:
        """Sum the gradients of a batch piece by piece; the last piece takes the step."""
        y = feeds["y"]
        count = max(counted(y), 1)
        loss = 0.0
        for first in range(0, len(y), size):
            piece = slice(first, first + size)
            share = counted(y[piece]) / count
            self._step.set("share", share)
            self._step.set("last", piece.stop >= len(y))
            piece_feeds = {name: value[piece] for name, value in feeds.items()}
            piece_loss = self._step.run({**piece_feeds, "mask": mask})[0]
            # A piece without a label that counts adds nothing, whatever its loss is.
            loss += piece_loss * share if share else 0.0
        return loss

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """Return the parameters now, in manifest order; views that the next step may overwrite."""
        current = self._step.current
        return {
            spec.name: current[parameter_input(spec.name)] for spec in self._manifest.parameters
        }

    def states(self) -> dict[str, Array]:
        """Return the optimizer's states now, by name; views, as of `parameters`."""
        current = self._step.current
        return {spec.name: current[state_input(spec.name)] for spec in self._manifest.states}

    def addresses(self) -> dict[str, int]:
        """Return where each current parameter and state lies in memory, and each frozen tensor.

        Parameters and states alternate between two places, unless the manifest allows them to stay.
        """
        return self._step.addresses()


class ForwardSession:
    """A graph that reads parameters and changes nothing: evaluation or batch norm statistics.

    Args:
        manifest: of the artifact set.
        graph: its file.
        parameters: by name, the frozen ones of the manifest's base among them.
        threads: of an operator; with 0 it takes every core.
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
        # Not as written: of a forward pass the runtime may fuse operators.
        self._session = open_session(graph, manifest.graphs.values(), threads=threads)
        self._inputs = {spec.name for spec in self._session.get_inputs()}
        self.load(parameters)

    def load(self, parameters: Mapping[str, Array]) -> None:
        """Read other parameters, float32 by name, from now on; in place, not copied."""
        names = [spec.name for spec in self._manifest.parameters]
        names += [spec.name for spec in self._manifest.base]
        self._fixed = {parameter_input(name): parameters[name] for name in names}

    def _run(self, outputs: list[str], feeds: Mapping[str, Array]) -> list[Array]:
        inputs = {**self._fixed, **feeds}
        # An exporter may drop an input that the graph does not use.
        taken = {name: value for name, value in inputs.items() if name in self._inputs}
        result: list[Array] = self._session.run(outputs, taken)
        return result

    def evaluate(
        self,
        x: Array,
        y: Array,
        mask: Array,
        statistics: Mapping[str, Array] | None = None,
    ) -> dict[str, NDArray[np.float64]]:
        """Return sums of loss and metrics over one batch.

        They have the names of `fleet_protocol.metrics.summed_outputs`.

        Args:
            x: samples ``[B, ...]``.
            y: targets ``[B, ...]``, as the loss takes them.
            mask: ``[classes]`` float32.
            statistics: ``stat.<norm>.mean`` and ``.var`` of every static batch norm.
        """
        names = list(summed_outputs(self._manifest.recipe))
        sums = self._run(names, {"x": x, "y": y, "mask": mask, **(statistics or {})})
        return {name: value.astype(np.float64) for name, value in zip(names, sums, strict=True)}

    def statistics(self, x: Array) -> dict[str, NDArray[np.float32]]:
        """Return mean and unbiased variance of every static batch norm on one batch ``[B, ...]``.

        Returns:
            ``stat.<norm>.mean`` and ``stat.<norm>.var`` to vectors of the norm's channels.
        """
        names: list[str] = []
        for spec in self._manifest.statistics:
            names += [statistic_mean(spec.name), statistic_variance(spec.name)]
        return dict(zip(names, self._run(names, {"x": x}), strict=True))


class Sessions:
    """Opens the graphs of a task, steps on a provider.

    A board opens each anew, for memory; a simulation, which trains one tier for many devices, may
    keep them. With 0 threads an operator takes every core.
    """

    def __init__(self, threads: int = 1, provider: str = CPU) -> None:
        self.threads = threads
        self.provider = provider

    def train(
        self,
        manifest: Manifest,
        graph: Path,
        base: Mapping[str, Array],
    ) -> TrainSession:
        """Open a step graph; the caller loads weights."""
        return TrainSession(
            manifest,
            graph,
            threads=self.threads,
            base=base,
            provider=self.provider,
        )

    def forward(
        self,
        manifest: Manifest,
        graph: Path,
        parameters: Mapping[str, Array],
    ) -> ForwardSession:
        """Open a graph that changes nothing."""
        return ForwardSession(manifest, graph, parameters, threads=self.threads)


def _step_tensors(manifest: Manifest, base: Mapping[str, Array]) -> StepTensors:
    """Return the tensors of a training step that stay in memory."""
    parameters = {parameter_input(spec.name): spec for spec in manifest.parameters}
    states = {state_input(spec.name): spec for spec in manifest.states}
    in_place: set[str] = set()
    if manifest.states_in_place:
        in_place.update(states)
    if manifest.parameters_in_place:
        in_place.update(parameters)
    return StepTensors(
        moving={**parameters, **states},
        scalars=("loss",),
        fixed={anchor_input(spec.name): spec for spec in manifest.parameters},
        settings=("lr", "mu", "share", "last"),
        in_place=frozenset(in_place),
        borrowed={parameter_input(name): array for name, array in base.items()},
    )
