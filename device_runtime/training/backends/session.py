"""A training step whose tensors stay in place; one class trains with either step."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.forward import ForwardSession
from device_runtime.training.backends.lower_part import LowerGraph, LowerPart
from device_runtime.training.backends.runtime import CPU
from device_runtime.training.backends.swapping import StepTensors, SwappingStep
from device_runtime.training.kept_outputs import SampleUse
from device_runtime.training.knobs import knob_numbers
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.graph_parts import ABOVE, BELOW
from fleet_protocol.manifest import (
    Manifest,
    ParameterSpec,
    anchor_input,
    knob_input,
    noise_input,
    parameter_input,
    state_input,
)
from fleet_protocol.targets import Targets, counted

Array = NDArray[Any]


def step_in_parts(backend: str, manifest: Manifest) -> bool:
    """Return whether a set has the training step of a backend in two parts, too."""
    return backend == "onnx" and {ABOVE, BELOW} <= manifest.graphs.keys()


def step_graph_key(backend: str, manifest: Manifest) -> str | None:
    """Return which graph of a set is the training step for a backend.

    Returns:
        Key in ``manifest.graphs``, or None if the set has no step for this backend.
        onnxruntime-training runs the portable step if the set has no step for it.
    """
    wanted = ("ort-training/step", "onnx/train") if backend == "ort-training" else ("onnx/train",)
    return next((key for key in wanted if key in manifest.graphs), None)


class TrainSession:
    """A training step with its parameters and states.

    Args:
        manifest: manifest of the artifact set.
        graph: file of the step.
        threads: threads of an operator; 0 uses every core.
        base: the frozen tensors of the manifest, by name; read in place and never copied.
        provider: provider of onnxruntime; it may include a thread count, as in ``CPU:4``.
        lower: graph of the layers below, if the step is the part above them.
    """

    def __init__(  # noqa: PLR0913  (options by keyword)
        self,
        manifest: Manifest,
        graph: Path,
        *,
        threads: int = 1,
        base: Mapping[str, Array] | None = None,
        provider: str = CPU,
        lower: LowerGraph | None = None,
    ) -> None:
        self._manifest = manifest
        provider, _, own_threads = provider.partition(":")
        threads = int(own_threads) if own_threads else threads
        self._step = SwappingStep(
            graph,
            manifest.graphs.values(),
            _step_tensors(manifest, base or {}),
            peak_bytes=manifest.peak_memory_bytes,
            threads=threads,
            provider=provider,
        )
        self._lower: LowerPart | None = None
        if lower is not None:
            frozen = dict(self._step.frozen)
            for name, array in (base or {}).items():
                frozen[parameter_input(name)] = array
            self._lower = LowerPart(
                manifest,
                lower,
                frozen,
                threads=threads,
                provider=provider,
            )
        self._piece_size: int | None = None
        self._held: dict[str, Array] = {}
        self.turn_knobs(None)

    def reset(self) -> dict[str, NDArray[np.float32]]:
        """Reset the optimizer to its initial states, and return buffers for new weights.

        Returns:
            Parameter name to the array that the next step reads; the caller writes into it.
        """
        # A simulation trains one device after the other in a session: nothing of the last is held.
        self._held = {}
        # In place: the step's bindings point to these arrays.
        for state in self._manifest.states:
            self._step.current[state_input(state.name)].fill(state.initial)
        return self.parameters()

    def load_states(self, states: Mapping[str, Array]) -> None:
        """Restore an optimizer's states, or without any keep the present ones.

        Args:
            states: all states by name, or none.

        Raises:
            RefusedError: they belong to another recipe.
        """
        if not states:
            return
        for spec in self._manifest.states:
            value = states.get(spec.name)
            if value is None or (value.shape, value.dtype.name) != (spec.shape, spec.dtype):
                raise RefusedError(
                    RefusalReason.UNSUPPORTED,
                    f"the optimizer states kept in this run have no {spec.name} of shape "
                    f"{list(spec.shape)}: the artifacts of {self._manifest.arch} "
                    f"{self._manifest.tier} changed during the run; start a new run",
                )
            np.copyto(self._step.current[state_input(spec.name)], value)

    def hold(self, names: Collection[str]) -> None:
        """Keep some parameters as they are now, whatever the next steps do.

        The states of an optimizer that belong to them still change.

        Args:
            names: names of parameters; none lets all of them move.
        """
        current = self.parameters()
        self._held = {}
        for name in names:
            # No step changes what the tier does not train.
            if name not in self._manifest.frozen:
                self._held[name] = current[name].copy()

    def split_batches(self, size: int | None) -> None:
        """Limit the samples that are computed at once from now on; a batch is still one step.

        Args:
            size: samples of a piece; None for whole batches.

        Raises:
            RefusedError: the set was exported without sums of gradients.
        """
        if size is not None and not self._manifest.recipe.accumulate:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"artifact set {self._manifest.arch} {self._manifest.tier} supports only "
                f"whole batches, but micro_batch = {size}; export it again with accumulate = "
                "true in [model.recipe]",
            )
        self._piece_size = size

    def turn_knobs(self, numbers: Mapping[str, float] | None) -> None:
        """Set the numbers of the loss for all following steps.

        Args:
            numbers: those that the task sets; see `knob_numbers`, also for its errors.
        """
        for name, number in knob_numbers(self._manifest, numbers).items():
            self._step.set(knob_input(name), number)

    def anchor(self, mu: float) -> None:
        """Pull the parameters towards their present values until the next call (FedProx).

        Args:
            mu: strength of the pull; 0 for none.

        Raises:
            RefusedError: a proximal term is required, but the set was exported without one.
        """
        anchors = self._step.fixed
        if mu and not anchors:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"artifact set {self._manifest.arch} {self._manifest.tier} has no proximal term, "
                f"which mu = {mu:g} of FedProx needs; export it again with a proximal recipe",
            )
        # Copied, because the parameters change and the anchor does not.
        for name, value in self.parameters().items():
            if anchor_input(name) in anchors:
                np.copyto(anchors[anchor_input(name)], value)
        self._step.set("mu", mu)

    def move_anchor(self, distances: Mapping[str, Array]) -> None:
        """Move the weights towards which the proximal term pulls, until the next `anchor` (FedDyn).

        Args:
            distances: name of each trained parameter to float32 array of its local shape.
        """
        anchors = self._step.fixed
        for name, distance in distances.items():
            anchors[anchor_input(name)] += distance

    def load(self, weights: Mapping[str, Array], mu: float = 0.0) -> None:
        """Load new parameters; the optimizer starts from its initial states.

        Args:
            weights: parameter name to float32 array of its local shape. With a proximal term in the
                recipe they are also the anchor until the next call.
            mu: strength of the proximal term; 0 for none.

        Raises:
            RefusedError: a proximal term is required, but the set was exported without one.
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
            loss = self._step_in_pieces(feeds, mask, self._piece_size)
        else:
            self._step.set("share", 1.0)
            self._step.set("last", 1.0)
            loss = self._run({**feeds, "mask": mask})
        self._put_back_held()
        return loss

    def _run(self, feeds: dict[str, Array]) -> float:
        """Run the graphs of the step once; return the loss."""
        if self._lower is not None:
            feeds.update(self._lower.values(feeds["x"]))
        return self._step.run(feeds)[0]

    def keeping(
        self, batch: int, samples: int, *, again: bool, is_random: bool
    ) -> AbstractContextManager[None]:
        """Return a context for a training, in which outputs of frozen layers may be kept.

        Args:
            batch: samples of a step.
            samples: number of training samples.
            again: whether a sample is used more than once.
            is_random: whether samples change at random.
        """
        if self._lower is None:
            return nullcontext()
        size = min(self._piece_size or batch, batch, samples)
        return self._lower.keeping(SampleUse(size, samples, again, is_random))

    def _put_back_held(self) -> None:
        # The graph moves every parameter. To copy a few back costs less than a second graph on disk
        # and in memory.
        current = self._step.current
        for name, value in self._held.items():
            np.copyto(current[parameter_input(name)], value)

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
            piece_loss = self._run({**piece_feeds, "mask": mask})
            # A piece without a label that counts adds nothing, whatever its loss.
            loss += piece_loss * share if share else 0.0
        return loss

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """Return the current parameters in manifest order; the next step may overwrite them."""
        current = {**self._step.current, **self._step.frozen}
        return {
            spec.name: current[parameter_input(spec.name)] for spec in self._manifest.parameters
        }

    def states(self) -> dict[str, Array]:
        """Return the optimizer's current states by name; views, as in `parameters`."""
        current = self._step.current
        return {spec.name: current[state_input(spec.name)] for spec in self._manifest.states}

    def addresses(self) -> dict[str, int]:
        """Return the memory addresses of each current parameter and state, and each frozen tensor.

        Parameters and states alternate between two places, unless the manifest allows them to stay.
        """
        return self._step.addresses()


class Sessions:
    """Opens the graphs of a task, the steps on a provider.

    A board opens each graph again to save memory; a simulation, which trains one tier for many
    devices, may keep them open. With 0 threads an operator uses every core.
    """

    def __init__(self, threads: int = 1, provider: str = CPU) -> None:
        self.threads = threads
        self.provider = provider

    def train(
        self,
        manifest: Manifest,
        graph: Path,
        base: Mapping[str, Array],
        lower: LowerGraph | None = None,
    ) -> TrainSession:
        """Open a step graph; the caller loads weights."""
        return TrainSession(
            manifest,
            graph,
            threads=self.threads,
            base=base,
            provider=self.provider,
            lower=lower,
        )

    def forward(
        self,
        manifest: Manifest,
        graph: Path,
        parameters: Mapping[str, Array],
    ) -> ForwardSession:
        """Open a graph that only reads parameters."""
        return ForwardSession(manifest, graph, parameters, threads=self.threads)


def _step_tensors(manifest: Manifest, base: Mapping[str, Array]) -> StepTensors:
    """Return the tensors of a training step that stay in memory."""
    parameters = {parameter_input(spec.name): spec for spec in manifest.trained}
    frozen: dict[str, ParameterSpec] = {}
    for spec in manifest.parameters:
        if spec.name in manifest.frozen:
            frozen[parameter_input(spec.name)] = spec
    states = {state_input(spec.name): spec for spec in manifest.states}
    in_place: set[str] = set()
    if manifest.states_in_place:
        in_place.update(states)
    if manifest.parameters_in_place:
        in_place.update(parameters)
    return StepTensors(
        moving={**parameters, **states},
        scalars=("loss",),
        frozen=frozen,
        fixed={anchor_input(spec.name): spec for spec in manifest.trained},
        settings=("lr", "mu", "share", "last", *map(knob_input, manifest.recipe.loss.knobs)),
        in_place=frozenset(in_place),
        borrowed={parameter_input(name): array for name, array in base.items()},
    )
