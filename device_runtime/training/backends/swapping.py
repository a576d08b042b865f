"""A step graph whose tensors stay in place: it reads one set of buffers and writes the other.

The two sets swap after each step. Both bindings are made once, so a step copies and allocates no
parameter, and binds only inputs whose array differs from that of two steps ago.
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


class TensorDescription(Protocol):
    """Description of a tensor before it is allocated; every entry of a manifest is one."""

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
        moving: tensors that a step changes, by graph input; the outputs are their `next_name`.
        scalars: outputs of one number each, which a step returns.
        frozen: parameters that no step changes, by graph input; also those that the graph lacks.
        fixed: inputs that no step changes, by graph input; those that the graph lacks are left out.
        settings: inputs of one number each, float32, which `SwappingStep.set` writes; those that
            the graph lacks are left out.
        in_place: those tensors that a step changes whose next value may overwrite them.
        borrowed: inputs that are in memory already, by graph input; they are read in place.
    """

    moving: Mapping[str, TensorDescription]
    scalars: tuple[str, ...]
    frozen: Mapping[str, TensorDescription] = field(default_factory=dict)
    fixed: Mapping[str, TensorDescription] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    in_place: frozenset[str] = frozenset()
    borrowed: Mapping[str, Array] = field(default_factory=dict)


class SwappingStep:
    """A step graph with the tensors that stay in memory.

    Args:
        graph: its file.
        specs: the graphs of the manifest; the file must be one of them.
        tensors: those that stay in memory.
        peak_bytes: its peak memory, from the manifest.
        threads: threads of an operator; 0 uses every core.
        provider: provider of onnxruntime.

    Raises:
        RefusedError: a board must not run the graph.
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
        self._frozen = _zeros(tensors.frozen)
        self._fixed = _zeros(self._taken(tensors.fixed))
        self._borrowed = self._taken(tensors.borrowed)
        first = _zeros(tensors.moving)
        second = _zeros(tensors.moving)
        for name in tensors.in_place:
            second[name] = first[name]
        self._buffers: tuple[Arrays, Arrays] = (first, second)
        # An OrtValue made from an array shares its memory; the arrays above keep it alive.
        self._values = (_ort_values(first), _ort_values(second))
        unchanged = {**self._taken(self._frozen), **self._fixed, **self._borrowed}
        self._fixed_values = _ort_values({**unchanged, **self._settings})
        self._scalar_values = _ort_values(self._scalars)
        self._bindings = (self._bind(0), self._bind(1))
        self._bound: tuple[Arrays, Arrays] = ({}, {})  # the arrays that were fed last, by binding
        self._current = 0
        self._shares_memory = provider == CPU

    def _taken(self, tensors: Mapping[str, _T]) -> dict[str, _T]:
        """Return the tensors that are inputs of the graph."""
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
        """The current changing tensors by graph input; read and write them until the next step."""
        return self._buffers[self._current]

    @property
    def frozen(self) -> Arrays:
        """The parameters that no step changes, by graph input; may be written in place."""
        return self._frozen

    @property
    def fixed(self) -> Arrays:
        """The tensors that no step changes, by graph input; may be written in place."""
        return self._fixed

    def addresses(self) -> dict[str, int]:
        """Return where the runtime now reads changing and borrowed tensors, by graph input."""
        addresses = {name: array.ctypes.data for name, array in self.current.items()}
        for name in self._borrowed:
            addresses[name] = self._fixed_values[name].data_ptr()
        return addresses

    def set(self, name: str, number: float) -> None:
        """Set the value of a setting for all following steps."""
        if name in self._settings:
            self._settings[name][()] = number

    def run(self, feeds: Mapping[str, Array]) -> list[float]:
        """Take one step; return the scalars, in order.

        Args:
            feeds: all other inputs; those that the graph lacks are left out, because an exporter
                may drop an input that the step does not use. An array that was fed before may
                contain other numbers now.
        """
        binding = self._bindings[self._current]
        bound = self._bound[self._current]
        if not self._shares_memory:
            bound.clear()
            self._copy_again(binding)
        for name, value in feeds.items():
            # The runtime copies an array that is not contiguous, so it is bound again in every
            # step.
            is_bound = bound.get(name) is value and value.flags.c_contiguous
            if not is_bound and name in self._inputs:
                binding.bind_cpu_input(name, value)
                bound[name] = value
        self._session.run_with_iobinding(binding)
        self._current = 1 - self._current
        return [float(array.item()) for array in self._scalars.values()]

    def _copy_again(self, binding: Any) -> None:
        """Bind the changing tensors of a provider that has its own memory.

        A binding copies into that memory once, when it is made.
        """
        changing = {**self._values[self._current], **self._fixed_values}
        for name in self._inputs & changing.keys() - self._borrowed.keys():
            binding.bind_ortvalue_input(name, changing[name])


def _zeros(tensors: Mapping[str, TensorDescription]) -> Arrays:
    return {name: np.zeros(sized.shape, sized.dtype) for name, sized in tensors.items()}


def _ort_values(arrays: Mapping[str, Array]) -> OrtValues:
    from_numpy = load_runtime().OrtValue.ortvalue_from_numpy
    return {name: from_numpy(array) for name, array in arrays.items()}
