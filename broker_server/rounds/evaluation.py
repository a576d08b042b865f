"""Judging a global version: the eval graph of a tier over the server's test set, without label
mask.
"""

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from broker_server.rounds.artifacts import TierArtifacts
from broker_server.rounds.onnx_runtime import Halt, open_graph, run_graph
from fleet_protocol.data import CsvData, DataConfig, DataSet, load_data
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
    """Read a test set for the tier that it judges.

    Samples have the model's shape where the configuration names none.

    Args:
        config: location of the test set.
        manifest: of the tier.
        terms: what the fleet has settled; labels and columns are brought into its order by their
            names.
        table: where the configuration stands, for messages.

    Raises:
        DataError: a file or array is missing, damaged or empty, or does not fit the model or the
            terms.
        ConfigError: a package for this kind of data is not installed.
    """
    shape = manifest.input_shape
    flat_table = (
        isinstance(config, CsvData) and len(shape) == 1
    )  # its columns are counted after they are picked
    shaped = config if config.shape or flat_table else config.model_copy(update={"shape": shape})
    with naming_table(table):
        data = reconcile(load_data(shaped), terms, own_labels=True).fit_to(manifest)
    if not counted(data.y):
        raise DataError(f"{data.source}: every label is negative, so none counts")
    return data


class Evaluator:
    """The eval graph of a tier with a test set; it is opened once and used for every version.

    All versions are judged by the samples that were read first. If the samples stay in their file,
    and a program writes into that file, every later judgement raises a DataChangedError. Raises a
    ConfigError if the graph cannot be opened.
    """

    def __init__(
        self,
        judged: TierArtifacts,
        data: DataSet,
        *,
        batch_size: int,
        threads: int,
        halt: Halt | None = None,
    ) -> None:
        graph = judged.manifest.graphs.get("onnx/eval")
        if graph is None:
            raise ConfigError(f"{judged.folder} has no eval graph; export the architecture again")
        self.judged = judged
        self.halt = halt or Halt()  # stops running graphs
        self.data = data
        self._batch_size = batch_size
        self._dtype = judged.manifest.input_dtype
        self._session = open_graph(judged.path(graph), threads=threads, halt=self.halt)
        self._base = judged.base()
        self._warned = False

    def _fixed(self, weights: Tensors, statistics: Tensors) -> dict[str, NDArray[Any]]:
        """What the graph takes but samples.

        Every label counts, and a loss without a label mask has no such input.
        """
        masked = self.judged.manifest.recipe.loss.masked
        mask = {"mask": np.ones(self.judged.manifest.classes, np.float32)} if masked else {}
        taken = {parameter_input(name): value for name, value in {**self._base, **weights}.items()}
        return {**taken, **statistics, **mask}

    def evaluate(self, weights: Tensors, statistics: Tensors) -> Evaluation:
        """Loss and accuracy of a version: float32 weights of the judged tier, and what its static
        batch norms have.

        Returns:
            Means over all samples; with a label per token over all labels that count.

        Raises:
            DataError: the loss or a metric is not finite, or beyond 1e30; the statistics or the
                weights are useless.
            DataChangedError: the test set has changed.
        """
        fixed = self._fixed(weights, statistics)
        names = list(summed_outputs(self.judged.manifest.recipe))
        sums = dict[str, NDArray[np.float64]]()
        for x, y in self.data.batches(self._batch_size, self._dtype):
            found = run_graph(self._session, names, {**fixed, "x": x, "y": y}, self.data.source)
            for name, value in zip(names, found, strict=True):
                sums[name] = sums.get(name, np.zeros(())) + value.astype(np.float64)
        self.data.check_kept()
        self._warn_of_changes()
        try:
            return evaluation_of(sums, counted(self.data.y), self.judged.manifest.recipe)
        except ValidationError as error:
            what = f"the loss of {self.judged.tier.id} of the new version on {len(self.data)} test samples, or a metric"
            raise DataError(f"{what}, is not finite, or beyond 1e30") from error

    def losses(self, weights: Tensors, statistics: Tensors, samples: int) -> NDArray[np.float64]:
        """Mean loss of each run of so many consecutive samples, the last maybe shorter, over labels
        that count.

        It is float64 ``[runs]``.
        """
        fixed = self._fixed(weights, statistics)
        found = (
            (
                run_graph(
                    self._session,
                    ["loss_sum"],
                    {**fixed, "x": x, "y": y},
                    self.data.source,
                )[0],
                counted(y),
            )
            for x, y in self.data.batches(samples, self._dtype)
        )
        losses = np.fromiter((float(loss) / max(1, count) for loss, count in found), np.float64)
        self.data.check_kept()
        return losses

    def hits(
        self,
        weights: Tensors,
        statistics: Tensors,
        chosen: NDArray[np.int64],
        mask: NDArray[np.float32],
    ) -> tuple[int, int]:
        """How many labels of some samples, by index, are right with a label mask, and how many
        there are.

        Specification 1.5: zeroed logits; the mask is ``[classes]``, 1 where a label counts.
        Statistics are as for `evaluate`.
        """
        fixed = self._fixed(weights, statistics)
        fixed |= {"mask": mask} if "mask" in fixed else {}
        correct = count = 0
        for start in range(0, len(chosen), self._batch_size):
            x, y = self.data.batch(chosen[start : start + self._batch_size], self._dtype)
            correct += int(
                run_graph(
                    self._session,
                    ["correct"],
                    {**fixed, "x": x, "y": y},
                    self.data.source,
                )[0]
            )
            count += counted(y)
        self.data.check_kept()
        return correct, count

    def _warn_of_changes(self) -> None:
        """Log once that the files of the test set have changed since the samples were read."""
        changes = () if self._warned else self.data.changes()
        if changes:
            self._warned = True
            _LOG.warning(
                "%s changed after this run had read it: the run judges versions by the samples as they were; start the"
                " server again to judge by the new ones",
                list_paths(changes),
            )
