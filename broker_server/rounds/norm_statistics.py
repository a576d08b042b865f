"""Batch norm statistics of a version, from the answers of devices or from the server's own samples.

HeteroFL (Diao et al., ICLR 2021, section 3; specification 1.6 and vector H8) trains static batch
norms, which keep no running averages. So the statistics of a merged version are computed after the
merge: for each norm the mean over batches of the batch mean and of the unbiased batch variance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from broker_server.rounds.artifacts import TierArtifacts
from broker_server.rounds.onnx_runtime import GraphStopper, open_graph, run_graph
from fleet_protocol.data import DataSet
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.manifest import parameter_input, statistic_mean, statistic_variance

Statistics = dict[str, NDArray[np.float32]]
"""``stat.<norm>.mean`` and ``stat.<norm>.var`` to vectors of the norm's channels."""

Answer = tuple[int, Mapping[str, NDArray[Any]]]
"""The number of batches of one device, and its statistics over them."""

_LEAST_SAMPLES = 2  # of a batch: the unbiased variance of one sample is not defined


def has_statistics(tier: TierArtifacts) -> bool:
    """Return whether the model of a tier has static batch norms."""
    return bool(tier.manifest.statistics)


def combine_statistics(
    answers: Sequence[Answer],
    norms: Sequence[str],
    rule: Literal["pooled", "per_client"],
) -> Statistics:
    """Combine the statistics of devices into those of the fleet.

    With n_k batches on device k and N their sum, the mean is ``sum(n_k mean_k) / N``. The variance
    ``per_client`` is ``sum(n_k var_k) / N``: batches of one device do not show the differences
    between devices (vector H8). ``pooled`` adds the variance between the devices' means, ``sum(n_k
    mean_k^2) / N - mean^2``, and so equals the authors' one pooled and shuffled loader.

    Args:
        answers: answers of at least one device.
        norms: names of the static batch norms.
        rule: how the variances are combined.

    Returns:
        float32 vectors; computed in float64.
    """
    batch_count = 0
    for batches, _ in answers:
        batch_count += batches
    total = float(batch_count)
    combined: Statistics = {}
    for norm in norms:
        mean_name = statistic_mean(norm)
        variance_name = statistic_variance(norm)
        means = []
        variances = []
        for batches, answer in answers:
            share = batches / total
            means.append(_Share(share, answer[mean_name]))
            variances.append(_Share(share, answer[variance_name]))
        mean = _weighted_sum(means)
        variance = _weighted_sum(variances)
        if rule == "pooled":
            variance += _variance_between(means, mean)
        combined[mean_name] = mean.astype(np.float32)
        combined[variance_name] = variance.astype(np.float32)
    return combined


@dataclass(frozen=True)
class _Share:
    """A statistic of one device, and its share of all batches."""

    share: float
    statistic: NDArray[Any]  # [channels]

    @property
    def float64(self) -> NDArray[np.float64]:
        return np.asarray(self.statistic, np.float64)


def _weighted_sum(shares: Sequence[_Share]) -> NDArray[np.float64]:
    # Starts from zeros and adds in the order of the answers, which fixes the bits of the sum.
    total = np.zeros_like(shares[0].float64)
    for entry in shares:
        total += entry.share * entry.float64
    return total


def _variance_between(means: Sequence[_Share], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    between = np.zeros_like(mean)
    for entry in means:
        between += entry.share * (entry.float64 - mean) ** 2
    return between


def batch_statistics(  # noqa: PLR0913  (options by keyword)
    tier: TierArtifacts,
    weights: Mapping[str, NDArray[Any]],
    data: DataSet,
    *,
    batch_size: int,
    threads: int,
    halt: GraphStopper | None = None,
) -> Statistics:
    """Run the stats graph of a tier over the server's own samples: the mean over batches.

    Every batch has the same weight (vector H8). A last batch of one sample is skipped.

    Args:
        tier: tier whose graph runs.
        weights: float32, of the tier.
        data: the samples.
        batch_size: samples of one batch, as in training.
        threads: threads of one operator; 0 for every core.
        halt: stops the graph, if given.

    Raises:
        ConfigError: the artifact set has no stats graph.
        DataError: there is no batch of two samples, or the graph does not run on them.
    """
    graph = tier.manifest.graphs.get("onnx/stats")
    if graph is None:
        raise ConfigError(f"{tier.folder} has no stats graph; export the architecture again")
    session = open_graph(tier.path(graph), threads=threads, halt=halt)
    names = [spec.name for spec in graph.outputs]
    tensors = {**tier.base(), **weights}
    inputs = {parameter_input(name): value for name, value in tensors.items()}
    sums: dict[str, NDArray[np.float64]] = {}
    count = 0
    for x, _ in data.batches(batch_size, tier.manifest.input_dtype):
        if len(x) < _LEAST_SAMPLES:
            continue
        count += 1
        outputs = run_graph(session, names, {**inputs, "x": x}, data.source)
        for name, value in zip(names, outputs, strict=True):
            # The first batch makes the sum float64, so all batches are added in float64.
            if name in sums:
                sums[name] = sums[name] + value
            else:
                sums[name] = np.asarray(value, np.float64)
    data.check_kept()
    if not count:
        raise DataError("the test set has no batch of two samples, so batch norm has no statistics")
    return {name: (value / count).astype(np.float32) for name, value in sums.items()}
