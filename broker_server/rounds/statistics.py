"""Static batch norm statistics of a global version: combined from the devices' answers, or taken from the test set.

HeteroFL (Diao et al., ICLR 2021), section 3; specification 1.6 and vector H8. A device runs the stats graph over its
training data and returns, for each norm, the mean over its n_k batches of the batch mean and of the unbiased batch
variance.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from broker_server.rounds.artifacts import TierArtifacts
from broker_server.rounds.onnx_runtime import open_graph, run_graph
from fleet_protocol.data import DataSet
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.manifest import parameter_input, statistic_mean, statistic_variance

Statistics = dict[str, NDArray[np.float32]]
"""``stat.<norm>.mean`` and ``stat.<norm>.var`` to vectors of the norm's channels."""


def has_statistics(full: TierArtifacts) -> bool:
    """Whether a model has static batch norms at all."""
    return bool(full.manifest.statistics)


def combine(
    answers: Sequence[tuple[int, Mapping[str, NDArray[Any]]]],
    norms: Sequence[str],
    rule: Literal["pooled", "per_client"],
) -> Statistics:
    """Make the devices' statistics into those of the fleet.

    With n_k batches on device k and N their sum, the mean is ``sum(n_k mean_k) / N``. The variance ``per_client`` is
    ``sum(n_k var_k) / N``: batches of one device lack what separates the devices (vector H8). ``pooled`` adds the
    variance between the devices' means, ``sum(n_k mean_k^2) / N - mean^2``, and so stands for the authors' one pooled
    and shuffled loader.

    Returns:
        float32 vectors; computed in float64.
    """
    total = float(sum(batches for batches, _ in answers))
    combined: Statistics = {}
    for norm in norms:
        mean_name, variance_name = statistic_mean(norm), statistic_variance(norm)
        means = [(batches / total, np.asarray(tensors[mean_name], np.float64)) for batches, tensors in answers]
        mean = sum((share * value for share, value in means), np.zeros_like(means[0][1]))
        variance = np.zeros_like(mean)
        for batches, tensors in answers:
            variance += batches / total * np.asarray(tensors[variance_name], np.float64)
        if rule == "pooled":
            variance += sum((share * (value - mean) ** 2 for share, value in means), np.zeros_like(mean))
        combined[mean_name] = mean.astype(np.float32)
        combined[variance_name] = variance.astype(np.float32)
    return combined


def over_batches(
    full: TierArtifacts, weights: Mapping[str, NDArray[Any]], data: DataSet, *, batch_size: int, threads: int
) -> Statistics:
    """Run the stats graph over the server's own samples: the mean over batches, each batch alike (vector H8).

    A last batch of one sample is dropped: its variance is not defined.

    Raises:
        ConfigError: the set has no stats graph.
        DataError: there is no batch of two samples, or the graph does not run on them.
    """
    graph = full.manifest.graphs.get("onnx/stats")
    if graph is None:
        raise ConfigError(f"{full.folder} has no stats graph; export the architecture again")
    session = open_graph(full.folder / graph.path, threads=threads)
    names = [spec.name for spec in graph.outputs]
    inputs = {parameter_input(name): value for name, value in {**full.base(), **weights}.items()}
    sums: dict[str, NDArray[np.float64]] = {}
    count = 0
    for x, _ in data.batches(batch_size, full.manifest.input_dtype):
        if len(x) < 2:
            continue
        count += 1
        for name, value in zip(names, run_graph(session, names, {**inputs, "x": x}, data.source), strict=True):
            sums[name] = sums[name] + value if name in sums else np.asarray(value, np.float64)
    if not count:
        raise DataError("the test set has no batch of two samples, so batch norm has no statistics")
    return {name: (value / count).astype(np.float32) for name, value in sums.items()}
