"""Graphs that only read parameters: evaluation and statistics of batch norms."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.runtime import open_session
from fleet_protocol.manifest import (
    Manifest,
    parameter_input,
    statistic_mean,
    statistic_variance,
)
from fleet_protocol.metrics import summed_outputs

Array = NDArray[Any]


class ForwardSession:
    """A graph that only reads parameters: evaluation or batch norm statistics.

    Args:
        manifest: manifest of the artifact set.
        graph: its file.
        parameters: by name, including the frozen ones of the manifest's base.
        threads: threads of an operator; 0 uses every core.
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
        # Not as written: in a forward pass the runtime may fuse operators.
        self._session = open_session(graph, manifest.graphs.values(), threads=threads)
        self._inputs = {spec.name for spec in self._session.get_inputs()}
        self.load(parameters)

    def load(self, parameters: Mapping[str, Array]) -> None:
        """Read other parameters, float32 by name, from now on; they are not copied."""
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

        For their names see `fleet_protocol.metrics.summed_outputs`.

        Args:
            x: samples ``[B, ...]``.
            y: targets ``[B, ...]``, as the loss expects them.
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
