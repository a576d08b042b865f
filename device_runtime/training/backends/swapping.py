"""A step graph whose tensors stay in place: it reads one set of buffers and writes the other, then
they swap.

Both bindings are made once, so a step copies no parameter, allocates none, and binds only what is
another array than two steps ago.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.runtime import CPU, load_runtime, open_session
from fleet_protocol.manifest import GraphSpec, next_name

Array = NDArray[Any]


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
        given: inputs that are in memory already, by graph input; read where they are.
    """

    moving: Mapping[str, Sized]
    scalars: tuple[str, ...]
    fixed: Mapping[str, Sized] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    in_place: frozenset[str] = frozenset()
    given: Mapping[str, Array] = field(default_factory=dict)


class SwappingStep:
    """A step graph with those of its tensors that stay in memory.

    With 0 threads an operator takes every core.

    The manifest tells the peak of its memory.

    Raises:
        RefusedError: the graph is not one that a board runs.
    """

    def __init__(
        self,
        graph: Path,
        specs: Iterable[GraphSpec],
        tensors: StepTensors,
        *,
        peak_bytes: int,
        threads: int = 1,
        provider: str = CPU,
    ) -> None:
        runtime = load_runtime()
        self._session = open_session(
            graph,
            specs,
            threads=threads,
            as_written=True,
            peak_bytes=peak_bytes,
            provider=provider,
        )
        self._inputs = {spec.name for spec in self._session.get_inputs()}
        shapes = {spec.name: spec.shape for spec in self._session.get_outputs()}
        self._scalars = {name: np.zeros(shapes[name], np.float32) for name in tensors.scalars}
        self._settings = {
            name: np.zeros((), np.float32) for name in tensors.settings if name in self._inputs
        }
        first = _zeros(tensors.moving)
        second = _zeros(tensors.moving) | {name: first[name] for name in tensors.in_place}
        self._buffers: tuple[dict[str, Array], dict[str, Array]] = (first, second)
        self._fixed = _zeros(
            {name: sized for name, sized in tensors.fixed.items() if name in self._inputs}
        )
        self._given = {name: array for name, array in tensors.given.items() if name in self._inputs}
        # An OrtValue made from an array shares its memory; the arrays above keep it alive.
        staying = {**self._fixed, **self._given, **self._settings}
        self._values, self._fixed_values, self._scalar_values = (
            [
                {
                    name: runtime.OrtValue.ortvalue_from_numpy(array)
                    for name, array in arrays.items()
                }
                for arrays in sets
            ]
            for sets in (self._buffers, [staying], [self._scalars])
        )
        self._bindings = (self._bind(0), self._bind(1))
        self._bound: tuple[dict[str, Array], dict[str, Array]] = ({}, {})
        self._current = 0
        self._ours = provider == CPU

    def _bind(self, source: int) -> Any:
        binding = self._session.io_binding()
        for name, value in self._scalar_values[0].items():
            binding.bind_ortvalue_output(name, value)
        for name, value in self._fixed_values[0].items():
            binding.bind_ortvalue_input(name, value)
        for name, value in self._values[source].items():
            if name in self._inputs:
                binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(next_name(name), self._values[1 - source][name])
        return binding

    @property
    def current(self) -> dict[str, Array]:
        """The changing tensors now, by graph input.

        To read and write in place, until the next step.
        """
        return self._buffers[self._current]

    @property
    def fixed(self) -> dict[str, Array]:
        """The tensors that no step changes, by graph input; to write in place."""
        return self._fixed

    def addresses(self) -> dict[str, int]:
        """Where the runtime reads the tensors that change now, and those it was given, by graph
        input.
        """
        given = {name: self._fixed_values[0][name].data_ptr() for name in self._given}
        return {name: array.ctypes.data for name, array in self.current.items()} | given

    def set(self, name: str, number: float) -> None:
        """Give one of the settings its value, for all steps until it is given another."""
        if name in self._settings:
            self._settings[name][()] = number

    def run(self, feeds: Mapping[str, Array]) -> list[float]:
        """One step; returns the scalars, in order.

        Args:
            feeds: all other inputs; one that the graph lacks is left out, because an exporter may
                drop an input that the step does not use. An array that was fed before may have
                other numbers in it now.
        """
        binding = self._bindings[self._current]
        bound = self._bound[self._current]
        if not self._ours:  # a binding copies into another memory when it is made, and never again
            bound.clear()
            changing = {**self._values[self._current], **self._fixed_values[0]}
            for name in self._inputs & changing.keys() - self._given.keys():
                binding.bind_ortvalue_input(name, changing[name])
        for name, value in feeds.items():
            known = (
                bound.get(name) is value and value.flags.c_contiguous
            )  # the runtime copies what is not
            if not known and name in self._inputs:
                binding.bind_cpu_input(name, value)
                bound[name] = value
        self._session.run_with_iobinding(binding)
        self._current = 1 - self._current
        return [float(array.item()) for array in self._scalars.values()]


def _zeros(tensors: Mapping[str, Sized]) -> dict[str, Array]:
    return {name: np.zeros(sized.shape, sized.dtype) for name, sized in tensors.items()}
