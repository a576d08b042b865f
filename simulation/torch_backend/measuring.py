"""Sums batch norm statistics over batches of samples."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet_protocol.manifest import Manifest, statistic_mean, statistic_variance
from models.zoo.layers import StaticBatchNorm


class StatisticSums:
    """Sums of the batch norm statistics of a module in mode statistics.

    Attributes:
        count: number of batches so far.
    """

    def __init__(self, module: nn.Module, manifest: Manifest) -> None:
        self._module = module
        self._norms: dict[str, StaticBatchNorm] = {}
        for spec in manifest.statistics:
            norm = module.get_submodule(spec.name)
            assert isinstance(norm, StaticBatchNorm)
            self._norms[spec.name] = norm
        self._sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, batches: Tensor) -> None:
        """Add the statistics of some batches, float32 ``[batches, samples, ...]``."""
        for x in batches:
            self._module(x)
            self.count += 1
            for name, norm in self._norms.items():
                assert norm.last_mean is not None
                assert norm.last_var is not None
                self._add_to(statistic_mean(name), norm.last_mean)
                self._add_to(statistic_variance(name), norm.last_var)

    def arrays(self) -> Mapping[str, NDArray[np.float64]]:
        """Return the sums by name of the statistic."""
        arrays = {}
        for name, value in self._sums.items():
            arrays[name] = value.cpu().numpy()
        return arrays

    def _add_to(self, name: str, value: Tensor) -> None:
        """Add a statistic of one batch.

        The sums are in double precision, so that many batches lose no digits.
        """
        if name in self._sums:
            self._sums[name] = self._sums[name] + value
        else:
            self._sums[name] = value.double()
