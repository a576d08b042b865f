"""Evaluates a global version: the eval graph of a tier over the server's test set.

No label mask is used: every label counts.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from broker_server.rounds.artifacts import TierArtifacts
from broker_server.rounds.onnx_runtime import GraphStopper, open_graph, run_graph
from fleet_protocol.data import DataConfig, DataSet, load_data
from fleet_protocol.data.contract import reconcile
from fleet_protocol.data.places import naming_table
from fleet_protocol.data.stamps import list_paths
from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.manifest import Manifest, parameter_input
from fleet_protocol.messages import Evaluation
from fleet_protocol.metrics import evaluation_of, summed_outputs
from fleet_protocol.targets import counted
from models.slicing import Tensors

_LOG = logging.getLogger(__name__)


def load_test_set(
    config: DataConfig,
    manifest: Manifest,
    terms: ContractTerms | None = None,
    *,
    table: str = "[evaluation.data] of fleet.toml",
) -> DataSet:
    """Read a test set for the tier that it evaluates.

    Samples have the model's shape unless the configuration names one.

    Args:
        config: location of the test set.
        manifest: manifest of the tier.
        terms: terms of the fleet; labels and columns are put into their order by name.
        table: table of the configuration, for messages.

    Raises:
        DataError: a file or array is missing, damaged or empty, or does not fit the model or the
            terms.
        ConfigError: a package for this kind of data is not installed.
    """
    shape = manifest.input_shape
    # The columns of a flat table are counted after the selection.
    is_flat_table = config.reads_flat_table(shape)
    shaped = config
    if not config.shape and not is_flat_table:
        shaped = config.model_copy(update={"shape": shape})
    with naming_table(table):
        data = reconcile(load_data(shaped), terms, own_labels=True).fit_to(manifest)
    if not counted(data.y):
        raise DataError(f"{data.source}: every label is negative, so all samples are ignored")
    return data


class Evaluator:
    """The eval graph of a tier with a test set; it is opened once and used for every version.

    All versions are evaluated on the samples that were read first. If the samples stay in their
    file, and a program writes into that file, every later evaluation raises a DataChangedError.
    """

    def __init__(
        self,
        judged: TierArtifacts,
        data: DataSet,
        *,
        batch_size: int,
        threads: int,
        halt: GraphStopper | None = None,
    ) -> None:
        """Open the graph.

        Args:
            judged: the tier.
            data: its test set.
            batch_size: samples per run of the graph.
            threads: threads of one operator; 0 for every core.
            halt: stops the graph, if given.

        Raises:
            ConfigError: the graph is missing, or cannot be opened.
        """
        graph = judged.manifest.graphs.get("onnx/eval")
        if graph is None:
            raise ConfigError(f"{judged.folder} has no eval graph; export the architecture again")
        self.judged = judged
        self.halt = halt or GraphStopper()  # stops running graphs
        self.data = data
        self._batch_size = batch_size
        self._dtype = judged.manifest.input_dtype
        self._session = open_graph(judged.path(graph), threads=threads, halt=self.halt)
        self._base = judged.base()
        self._warned = False

    def _fixed(self, weights: Tensors, statistics: Tensors) -> dict[str, NDArray[Any]]:
        """Return the inputs of the graph that are the same for all samples.

        With the mask every label counts; a loss without a label mask has no such input.
        """
        tensors = {**self._base, **weights}
        inputs = {parameter_input(name): value for name, value in tensors.items()}
        inputs.update(statistics)
        if self.judged.manifest.recipe.loss.masked:
            inputs["mask"] = np.ones(self.judged.manifest.classes, np.float32)
        return inputs

    def _run(
        self,
        outputs: Sequence[str],
        fixed: Mapping[str, NDArray[Any]],
        x: NDArray[Any],
        y: NDArray[Any],
    ) -> list[Any]:
        return run_graph(self._session, outputs, {**fixed, "x": x, "y": y}, self.data.source)

    def evaluate(self, weights: Tensors, statistics: Tensors) -> Evaluation:
        """Compute loss, accuracy and metrics of a version.

        Args:
            weights: float32, of the judged tier.
            statistics: statistics of its static batch norms, as the graph names them.

        Returns:
            Means over all samples; with a label per token over all labels that count.

        Raises:
            DataError: the loss or a metric is not finite, or beyond 1e30, which makes the
                statistics or the weights useless.
            DataChangedError: the test set has changed.
        """
        fixed = self._fixed(weights, statistics)
        # In the order of the graph's outputs.
        names = list(summed_outputs(self.judged.manifest.recipe))
        sums = dict[str, NDArray[np.float64]]()
        for x, y in self.data.batches(self._batch_size, self._dtype):
            outputs = self._run(names, fixed, x, y)
            for name, value in zip(names, outputs, strict=True):
                # Summed in float64, because sums over many batches lose digits in float32.
                sums[name] = sums.get(name, np.zeros(())) + value.astype(np.float64)
        self.data.check_kept()
        self._warn_of_changes()
        try:
            # Pydantic refuses numbers that are not finite.
            return evaluation_of(sums, counted(self.data.y), self.judged.manifest.recipe)
        except ValidationError as error:
            raise DataError(
                f"the loss or a metric of the new version of {self.judged.tier.id} on "
                f"{len(self.data)} test samples is not finite, or beyond 1e30"
            ) from error

    def losses(self, weights: Tensors, statistics: Tensors, samples: int) -> NDArray[np.float64]:
        """Compute the mean loss of each group of consecutive samples, over labels that count.

        Args:
            weights: the weights, as in `evaluate`.
            statistics: the statistics, as in `evaluate`.
            samples: samples of one group; the last may be smaller.

        Returns:
            float64 ``[groups]``.
        """
        fixed = self._fixed(weights, statistics)
        losses: list[float] = []
        for x, y in self.data.batches(samples, self._dtype):
            (loss_sum,) = self._run(["loss_sum"], fixed, x, y)
            # A group without a label that counts has a sum of 0, and so a loss of 0.
            losses.append(float(loss_sum) / max(1, counted(y)))
        self.data.check_kept()
        return np.array(losses, np.float64)

    def hits(
        self,
        weights: Tensors,
        statistics: Tensors,
        chosen: NDArray[np.int64],
        mask: NDArray[np.float32],
    ) -> tuple[int, int]:
        """Count the labels that the model predicts correctly with a label mask (specification 1.5).

        Args:
            weights: the weights, as in `evaluate`.
            statistics: the statistics, as in `evaluate`.
            chosen: indices of the samples.
            mask: ``[classes]``, 1 where a label counts; the logits of others are zeroed.

        Returns:
            How many labels are right, and how many exist.
        """
        fixed = self._fixed(weights, statistics)
        if "mask" in fixed:
            fixed["mask"] = mask
        correct = 0
        count = 0
        for start in range(0, len(chosen), self._batch_size):
            x, y = self.data.batch(chosen[start : start + self._batch_size], self._dtype)
            (correct_sum,) = self._run(["correct"], fixed, x, y)
            correct += int(correct_sum)
            count += counted(y)
        self.data.check_kept()
        return correct, count

    def _warn_of_changes(self) -> None:
        """Log once that the files of the test set have changed since the samples were read."""
        changes = () if self._warned else self.data.changes()
        if changes:
            self._warned = True
            _LOG.warning(
                "%s changed after this run had read it: the run evaluates versions on the earlier"
                " samples; restart the server to use the new ones",
                list_paths(changes),
            )
