"""The frozen layers below a training step, run for themselves; their outputs may be kept.

A row is kept only if it was computed in a batch of the usual size, because a runtime may add up the
numbers of a smaller batch in another order. The last batch of a pass, which is shorter, is always
computed, so that a step has the same bits whether rows are kept or not.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from device_runtime.training.backends.runtime import CPU, open_session
from device_runtime.training.kept_outputs import KeptOutputs, KeptRows, SampleUse, sample_digest
from fleet_protocol.graph_parts import BELOW
from fleet_protocol.manifest import Manifest

Array = NDArray[Any]
Arrays = dict[str, Array]
_TIMED_BATCHES = 3


@dataclass
class _Times:
    """Seconds of a batch, the fastest of each kind.

    Attributes:
        computed: time for computing its rows.
        read: time for reading them.
        reads: number of batches that were read.
    """

    computed: float = math.inf
    read: float = math.inf
    reads: int = 0

    @property
    def reading_is_slower(self) -> bool:
        """Whether enough batches have shown that keeping rows does not pay."""
        return self.reads >= _TIMED_BATCHES and self.read > self.computed


@dataclass(frozen=True)
class LowerGraph:
    """The graph of the frozen layers on disk.

    Attributes:
        path: its file.
        outputs: where rows of its outputs are kept; None computes all of them.
        runtime: name and version of the runtime, on which bits depend.
    """

    path: Path
    outputs: KeptOutputs | None
    runtime: str


class LowerPart:
    """The graph of the frozen layers, with the rows that are kept of its outputs.

    Args:
        manifest: manifest of the artifact set.
        graph: the graph.
        parameters: frozen parameters by graph input; read in place and never copied.
        threads: threads of an operator; 0 uses every core.
        provider: provider of onnxruntime.
    """

    def __init__(
        self,
        manifest: Manifest,
        graph: LowerGraph,
        parameters: Mapping[str, Array],
        *,
        threads: int,
        provider: str = CPU,
    ) -> None:
        # Its outputs have a row for each sample, and stay on the board. As written, so that it has
        # the bits of the same layers in the whole step.
        self._session = open_session(
            graph.path,
            manifest.graphs.values(),
            threads=threads,
            leaves=False,
            as_written=True,
            provider=provider,
        )
        inputs = {port.name for port in self._session.get_inputs()}
        self._parameters = {name: parameters[name] for name in parameters if name in inputs}
        spec = manifest.graphs[BELOW]
        self._shapes: dict[str, tuple[int, ...]] = {}
        for port in spec.outputs:
            self._shapes[port.name] = tuple(int(size) for size in port.shape[1:])
        self._outputs = graph.outputs
        self._identity = f"{spec.digest} {graph.runtime} {provider} {threads}"
        self._rows: KeptRows | None = None
        self._batch = 0
        self._buffers: Arrays = {}
        self._times = _Times()

    @contextlib.contextmanager
    def keeping(self, use: SampleUse) -> Iterator[None]:
        """Keep rows during a training that begins with the current frozen values."""
        self._batch = use.batch
        self._times = _Times()
        if self._outputs is not None:
            for name, shape in self._shapes.items():
                self._buffers[name] = np.empty((use.batch, *shape), np.float32)
            self._rows = self._outputs.open(self._name(), self._row_bytes, use)
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self._rows = None
        self._buffers = {}

    def _give_up(self, rows: KeptRows) -> None:
        rows.give_up()
        rows.close()
        self._rows = None

    @property
    def _row_bytes(self) -> int:
        numbers = sum(math.prod(shape) for shape in self._shapes.values())
        return 4 * numbers

    def _name(self) -> str:
        """Return a digest of everything except the samples that determines the rows."""
        hasher = blake3(f"{self._identity} {self._batch}".encode())
        for name, value in sorted(self._parameters.items()):
            hasher.update(f"\0{name}\0".encode())
            hasher.update(np.ascontiguousarray(value).data.cast("B"))
        return hasher.hexdigest(16)

    def values(self, x: Array) -> Arrays:
        """Return the inputs of the step above for some samples.

        Args:
            x: samples ``[B, ...]``.
        """
        if self._rows is None:
            return self._compute(x)
        if len(x) == self._batch:
            return self._read_or_compute(x, self._rows)
        values = self._compute(x)
        self._keep_short_batch(x, self._rows)
        return values

    def _compute(self, x: Array) -> Arrays:
        names = list(self._shapes)
        outputs = self._session.run(names, {**self._parameters, "x": x})
        return dict(zip(names, outputs, strict=True))

    def _read_or_compute(self, x: Array, rows: KeptRows) -> Arrays:
        """Read the rows of a batch; if any is missing, compute the batch and keep its rows."""
        began = time.perf_counter()
        digests = _digests(x)
        if self._read(digests, rows):
            self._times.reads += 1
            # The fastest of each, because other programs only ever add time.
            self._times.read = min(self._times.read, time.perf_counter() - began)
            if self._times.reading_is_slower:
                self._give_up(rows)
            return self._buffers
        began = time.perf_counter()
        values = self._compute(x)
        self._times.computed = min(self._times.computed, time.perf_counter() - began)
        # Tried once on this board and its runtime: the exporter has proved it only for its own.
        if not len(rows) and not self._is_by_sample(x, values):
            self._give_up(rows)
            return values
        self._keep(digests, values, rows)
        return values

    def _read(self, digests: Sequence[bytes], rows: KeptRows) -> bool:
        """Read the rows of a batch into the buffers; return whether all are there."""
        for place, digest in enumerate(digests):
            row = rows.read(digest)
            if row is None:
                return False
            numbers = np.frombuffer(row, np.float32)
            start = 0
            for name, shape in self._shapes.items():
                end = start + math.prod(shape)
                self._buffers[name][place] = numbers[start:end].reshape(shape)
                start = end
        return True

    def _keep(self, digests: Sequence[bytes], values: Arrays, rows: KeptRows) -> None:
        for place, digest in enumerate(digests):
            # A sample that was filled up or seen before has the same bits.
            if digest in rows:
                continue
            parts = [np.ascontiguousarray(values[name][place]).tobytes() for name in self._shapes]
            rows.add(digest, b"".join(parts))

    def _keep_short_batch(self, x: Array, rows: KeptRows) -> None:
        """Keep the rows of a batch that is too short, from a batch filled up with copies."""
        digests = _digests(x)
        # Only once: the next pass finds them in batches of the usual size.
        if len(x) > self._batch or all(digest in rows for digest in digests):
            return
        filled = np.resize(x, (self._batch, *x.shape[1:]))
        self._keep(digests, self._compute(filled), rows)

    def _is_by_sample(self, x: Array, values: Arrays) -> bool:
        """Return whether a sample's values have the same bits in every place and company here."""
        alike = np.repeat(x[:1], len(x), axis=0)
        for name, value in self._compute(alike).items():
            if not np.array_equal(value, np.repeat(values[name][:1], len(x), axis=0)):
                return False
        return True


def _digests(x: Array) -> list[bytes]:
    samples = np.ascontiguousarray(x)
    digests: list[bytes] = []
    for sample in samples:
        digests.append(sample_digest(memoryview(sample).cast("B")))
    return digests
