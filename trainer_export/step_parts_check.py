"""Compares a training step in two parts with PyTorch, and with the step as a whole.

A board keeps what the part below returns, sample by sample, and may then continue with the whole
step in another task. So the two parts together must give the bits of the whole, and a sample's
values must not depend on the other samples of its batch, as they do behind a batch norm.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from torch import nn

from fleet_protocol.errors import ExportError
from fleet_protocol.graph_parts import ABOVE, BELOW
from fleet_protocol.manifest import CheckSpec
from trainer_export.batches import SizedBatches
from trainer_export.check import DeviationError, Session, run_session
from trainer_export.formats.files import GraphFile
from trainer_export.recipe import Recipe
from trainer_export.train_check import check_train

_WHOLE = "onnx/train"
_PARTS = frozenset({BELOW, ABOVE})


class NotKeptError(ExportError):
    """No board may keep what the part below returns."""


def without_parts(graphs: Sequence[GraphFile]) -> tuple[GraphFile, ...]:
    """Return the graphs except the two parts of the step."""
    return tuple(graph for graph in graphs if graph.key not in _PARTS)


def check_parts(
    graphs: Sequence[GraphFile],
    checks: Sequence[CheckSpec],
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
) -> list[CheckSpec]:
    """Compare the two parts of a step, if there are any.

    Args:
        graphs: all graphs of the tier.
        checks: comparisons of the other graphs, with that of the step as a whole.
        module: the original model.
        recipe: loss and optimizer.
        batches: batches of the first run.

    Raises:
        NotKeptError: the values between the parts cannot be kept.
        ExportError: the parts cannot be compared.
    """
    by_key = {graph.key: graph for graph in graphs}
    if BELOW not in by_key:
        return []
    session = _PartsSession(by_key)
    try:
        check = check_train(session, module, recipe, batches, graph=ABOVE)
    except DeviationError:
        # The parts have the bits of the whole, whose deviations were found to be rounding.
        (whole,) = (check for check in checks if check.graph == _WHOLE)
        check = whole.model_copy(update={"graph": ABOVE})
    if session.mixes:
        raise NotKeptError(
            "what the frozen layers return for a sample depends on the other samples of its batch,"
            " as it does behind a batch norm; use a norm of each sample, such as nn.GroupNorm",
        )
    if session.differs:
        raise NotKeptError("the step in two parts has other rounding errors than as a whole")
    return [check]


class _PartsSession:
    """The two parts of a step, run one after the other beside the whole.

    Attributes:
        mixes: whether the values of a sample depended on its batch.
        differs: whether the parts gave other bits than the whole.
    """

    def __init__(self, graphs: Mapping[str, GraphFile]) -> None:
        self._whole = _open_as_written(graphs[_WHOLE].data)
        self._below = _open_as_written(graphs[BELOW].data)
        self._above = _open_as_written(graphs[ABOVE].data)
        self.mixes = False
        self.differs = False

    def get_inputs(self) -> Sequence[object]:
        """Return the inputs of the whole step."""
        return self._whole.get_inputs()

    def get_outputs(self) -> Sequence[object]:
        """Return the outputs of the whole step."""
        return self._whole.get_outputs()

    def run(
        self, names: Sequence[str], feed: Mapping[str, NDArray[np.generic]]
    ) -> Sequence[NDArray[np.generic]]:
        """Run both parts; return the outputs with these names."""
        # Every run of the check goes through both parts, so it needs no separate code.
        kept = run_session(self._below, feed)
        samples = feed["x"]
        # The first sample in every place, among copies of itself.
        alike = np.repeat(samples[:1], len(samples), axis=0)
        for name, value in run_session(self._below, {**feed, "x": alike}).items():
            self.mixes |= not np.array_equal(value, np.repeat(kept[name][:1], len(samples), axis=0))
        outputs = run_session(self._above, {**feed, **kept})
        whole = run_session(self._whole, feed)
        results: list[NDArray[np.generic]] = []
        for name in names:
            self.differs |= not np.array_equal(outputs[name], whole[name], equal_nan=True)
            results.append(outputs[name])
        return results


def _open_as_written(graph: bytes) -> Session:
    """Open a graph as boards open a step: the runtime rewrites nothing."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    # A rewrite across the cut would give the whole step other bits than its two parts.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False  # as in `trainer_export.check.open_session`
    session: Session = onnxruntime.InferenceSession(
        graph, options, providers=["CPUExecutionProvider"]
    )
    return session
