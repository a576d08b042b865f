"""The list of operators that boards run is what the exporter writes, no more and no less."""

import re
from pathlib import Path

import numpy as np
import onnx.defs
import pytest

import trainer_export
from fleet_protocol.errors import ExportError
from fleet_protocol.graph_parts import exit_keys
from fleet_protocol.graphs.check import check_structure
from fleet_protocol.graphs.exposure import exposed_outputs
from fleet_protocol.graphs.operators import (
    CONTRACTIONS,
    OPERATORS,
    REDUCTIONS,
    SELECTORS,
    SIZES,
)
from tests.marking import mostly_slow
from tests.trainer_export.helpers import TINY, graphs_of
from trainer_export.formats.files import SetFile
from trainer_export.graph import GraphBuilder, Port
from trainer_export.lowering.rules.elementwise import UNARY
from trainer_export.manifests import graph_spec

# Written by the gradient builder of onnxruntime-training.
DERIVED = {"Size", "Sum", "MaxPoolGrad", "AveragePoolGrad"}


def test_the_list_is_every_operator_that_a_lowering_rule_names() -> None:
    """Operators are written by name, so the names in the exporter's sources are all there can
    be.
    """
    standard = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    sources = " ".join(path.read_text() for path in Path(trainer_export.__path__[0]).rglob("*.py"))
    named = (set(re.findall(r'"([A-Z][A-Za-z0-9]+)"', sources)) | {*UNARY.split()}) & standard
    assert OPERATORS[""] - DERIVED == named, (
        "a new lowering needs its operators in fleet_protocol/graphs/check.py"
    )
    everything = frozenset().union(*OPERATORS.values())
    assert CONTRACTIONS | REDUCTIONS | SIZES | SELECTORS.keys() <= everything


@pytest.mark.parametrize("name", mostly_slow(sorted(TINY), lambda name: name in {"mlp", "conv"}))
def test_every_graph_of_the_zoo_passes_and_gives_no_batch_back(name: str) -> None:
    """The exporter's graphs have only what a board reads; what a board runs returns sums over the
    batch.
    """
    for graph in graphs_of(name, 0.5, None):
        found = check_structure(memoryview(graph.data))
        assert [node.op_type for node in found.nodes] == [
            node.op_type for node in graph.model.graph.node
        ]
        if graph.key == "onnx/infer" or graph.key in exit_keys([graph.key]):
            continue  # a board keeps its predictions, and what stages pass on, for itself
        assert not exposed_outputs(found, ["x", "y", "mask"])
        assert graph_spec(graph).mixed == tuple(port.name for port in graph.outputs)


@pytest.mark.parametrize(
    ("table", "factor", "is_exposed"),
    [("param.w", "mask", False), ("param.w", "y", True), ("lr", "mask", True)],
)
def test_rows_of_a_parameter_are_a_product_with_it(
    table: str, factor: str, is_exposed: bool
) -> None:
    """A mask may leave out embeddings; numbers of the batch, and rows of no parameter, stay."""
    graph = GraphBuilder("train")
    rows = graph.input(Port(table, "float32", (4, 4)))
    tokens = graph.input(Port("x", "int64", (4,)))
    y = graph.input(Port("y", "float32", (4, 4)))
    zero = graph.constant(np.zeros((), np.float32))
    mask = graph.node("Cast", graph.node("Greater", y, zero), to=1)
    masked = graph.node("Mul", graph.node("Gather", rows, tokens), mask if factor == "mask" else y)
    graph.output(Port("next.param.w", "float32", (4, 4)), masked)
    found = check_structure(memoryview(graph.model().SerializeToString()))
    assert bool(exposed_outputs(found, ["x", "y"])) == is_exposed


def test_an_export_that_boards_would_refuse_fails_and_says_why() -> None:
    """A step that returns its batch is not published."""
    graph = GraphBuilder("train")
    x = Port("x", "float32", (4,))
    graph.output(Port("next.param.w", "float32", (4,)), graph.node("Neg", graph.input(x)))
    data = graph.model().SerializeToString()
    with pytest.raises(
        ExportError,
        match=r"boards would refuse to run the graph onnx/train: output 'next\.param\.w'",
    ):
        graph_spec(
            SetFile(
                "onnx/train", "train.onnx", data, (x,), (Port("next.param.w", "float32", (4,)),)
            )
        )
