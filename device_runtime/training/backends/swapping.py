"""A step graph whose tensors stay in place: it reads one set of buffers and writes the other.

Then they swap. Both bindings are made once, so a step copies no parameter, allocates none, and
binds only what is another array than two steps ago.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.runtime import CPU, load_runtime, open_session
from fleet_protocol.manifest import GraphSpec, next_name

Array = NDArray[Any]
Arrays = dict[str, Array]
OrtValues = dict[str, Any]
_T = TypeVar("_T")


class Sized(Protocol):
    """What is known of a tensor before it is there; every entry of a manifest is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes; empty for a single number."""

    @property
    def dtype(self) -> str:
        """Numpy name of the element type."""


@dataclass(frozen=True)
class StepTensors:
    """The tensors of a step graph that stay in memory.

    Attributes:
        moving: those that a step changes, by graph input; the outputs are `next_name` of these.
        scalars: outputs of one number each, which a step returns.
        fixed: inputs that no step changes, by graph input; those the graph lacks are left out.
        settings: inputs of one number each, float32, which `SwappingStep.set` writes; those the
            graph lacks as well.
        in_place: of the tensors that a step changes, those whose next value may be written over
            them.
        borrowed: inputs that are in memory already, by graph input; read where they are.
    """

    moving: Mapping[str, Sized]
    scalars: tuple[str, ...]
    fixed: Mapping[str, Sized] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    in_place: frozenset[str] = frozenset()
    borrowed: Mapping[str, Array] = field(default_factory=dict)


class SwappingStep:
    """A step graph with those of its tensors that stay in memory.

    Args:
        graph: its file.
        specs: the graphs of the manifest, which it must be one of.
        tensors: those that stay.
        peak_bytes: of its memory, as the manifest says.
        threads: of an operator; with 0 it takes every core.
        provider: of onnxruntime.

    Raises:
        RefusedError: the graph is not one that a board runs.
    """

    def __init__(  # noqa: PLR0913  (options by keyword)
        self,
        graph: Path,
        specs: Iterable[GraphSpec],
        tensors: StepTensors,
        *,
        peak_bytes: int,
        threads: int = 1,
        provider: str = CPU,
    ) -> None:
        load_runtime()  # before the graph is mapped and checked
        self._session = open_session(
            graph,
            specs,
            threads=threads,
            as_written=True,
            peak_bytes=peak_bytes,
            provider=provider,
        )
        self._inputs = {port.name for port in self._session.get_inputs()}
        shapes = {port.name: port.shape for port in self._session.get_outputs()}
        self._scalars = {name: np.zeros(shapes[name], np.float32) for name in tensors.scalars}
        settings = [name for name in tensors.settings if name in self._inputs]
        self._settings = {name: np.zeros((), np.float32) for name in settings}
        self._fixed = _zeros(self._taken(tensors.fixed))
        self._borrowed = self._taken(tensors.borrowed)
        first = _zeros(tensors.moving)
        second = _zeros(tensors.moving)
        for name in tensors.in_place:
            second[name] = first[name]
        self._buffers: tuple[Arrays, Arrays] = (first, second)
        # An OrtValue made from an array shares its memory; the arrays above keep it alive.
        self._values = (_ort_values(first), _ort_values(second))
        self._fixed_values = _ort_values({**self._fixed, **self._borrowed, **self._settings})
        self._scalar_values = _ort_values(self._scalars)
        self._bindings = (self._bind(0), self._bind(1))
        self._bound: tuple[Arrays, Arrays] = ({}, {})  # what was fed last, by binding
        self._current = 0
        self._shares_memory = provider == CPU

    def _taken(self, tensors: Mapping[str, _T]) -> dict[str, _T]:
        """Return those of some tensors that the graph has an input for."""
        return {name: tensor for name, tensor in tensors.items() if name in self._inputs}

    def _bind(self, source: int) -> Any:
        """Bind a step that reads one set of buffers and writes the other."""
        binding = self._session.io_binding()
        for name, value in self._scalar_values.items():
            binding.bind_ortvalue_output(name, value)
        for name, value in self._fixed_values.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in self._values[source].items():
            if name in self._inputs:
                binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(next_name(name), self._values[1 - source][name])
        return binding

    @property
    def current(self) -> Arrays:
        """The changing tensors now, by graph input; to read and write until the next step."""
        return self._buffers[self._current]

    @property
    def fixed(self) -> Arrays:
        """The tensors that no step changes, by graph input; to write in place."""
        return self._fixed

    def addresses(self) -> dict[str, int]:
        """Return where the runtime reads changing and borrowed tensors now, by graph input."""
        addresses = {name: array.ctypes.data for name, array in self.current.items()}
        for name in self._borrowed:
            addresses[name] = self._fixed_values[name].data_ptr()
        return addresses

    def set(self, name: str, number: float) -> None:
        """Give one of the settings its value, for all steps until it is given another."""
        if name in self._settings:
            self._settings[name][()] = number

    def run(self, feeds: Mapping[str, Array]) -> list[float]:
        """Take one step; return the scalars, in order.

        Args:
            feeds: all other inputs; one that the graph lacks is left out, because an exporter may
                drop an input that the step does not use. An array that was fed before may have
                other numbers in it now.
        """
        binding = self._bindings[self._current]
        bound = self._bound[self._current]
        if not self._shares_memory:
            bound.clear()
            self._copy_again(binding)
        for name, value in feeds.items():
            # What is not contiguous the runtime copies, so it is bound anew in every step.
            is_bound = bound.get(name) is value and value.flags.c_contiguous
            if not is_bound and name in self._inputs:
                binding.bind_cpu_input(name, value)
                bound[name] = value
        self._session.run_with_iobinding(binding)
        self._current = 1 - self._current
        return [float(array.item()) for array in self._scalars.values()]

    def _copy_again(self, binding: Any) -> None:
        """Bind the changing tensors of a provider with a memory of its own.

        A binding copies into that when it is made, and never again.
        """
        changing = {**self._values[self._current], **self._fixed_values}
        for name in self._inputs & changing.keys() - self._borrowed.keys():
            binding.bind_ortvalue_input(name, changing[name])


def _zeros(tensors: Mapping[str, Sized]) -> Arrays:
    return {name: np.zeros(sized.shape, sized.dtype) for name, sized in tensors.items()}


def _ort_values(arrays: Mapping[str, Array]) -> OrtValues:
    from_numpy = load_runtime().OrtValue.ortvalue_from_numpy
    return {name: from_numpy(array) for name, array in arrays.items()}
