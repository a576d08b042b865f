"""A training step within a bound of memory recomputes activations, and has the same bits."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.memory_plans import PLAN_FILES, plan_difference, plan_file
from models import Tier
from tests.trainer_export.helpers import ZOO
from tests.trainer_export.test_memory import feeds_of, graph_of
from trainer_export import memory_bound
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.formats.onnx import fit_into_memory
from trainer_export.graph import values_read
from trainer_export.memory_bound import bounded_step, peak_of_step, smallest_step
from trainer_export.recipe import Recipe
from trainer_export.recomputing import schedule_of
from trainer_export.sized_graph import SizedGraph
from trainer_export.tier_report import PlanReport


def step_of(name: str, width: float) -> onnx.ModelProto:
    return fit_into_memory(graph_of(name, width, "train"))


def activations_of(step: onnx.ModelProto) -> int:
    """Peak bytes of the values between inputs and outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(step)
    return schedule_of(SizedGraph(copy)).peak.nbytes


def outputs_of(step: onnx.ModelProto, batch: int) -> list[np.ndarray]:
    """Outputs of a step that runs as boards run it: as written, in the order of the file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    session = onnxruntime.InferenceSession(
        step.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds_of(step, batch)))


@pytest.mark.parametrize(("name", "share"), [("conv", 0.75), ("text_encoder", 0.7)])
def test_a_step_within_its_bound_has_the_same_bits(name, share):
    """The peak is within the bound, the interface is unchanged, and every output has the same bits
    for batches of any size.
    """
    step = step_of(name, 0.25)
    activations = activations_of(step)
    bound = peak_of_step(step) - activations + int(share * activations)
    bounded = bounded_step(step, bound, "w0.25-d1")
    onnx.checker.check_model(bounded)
    assert peak_of_step(bounded) <= bound
    assert len(bounded.graph.node) > len(step.graph.node)
    for attribute in ("input", "output"):
        assert getattr(bounded.graph, attribute) == getattr(step.graph, attribute)
    for batch in (1, 7):
        for found, expected in zip(
            outputs_of(bounded, batch), outputs_of(step, batch), strict=True
        ):
            assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("width", [0.25, 0.5])
def test_recomputing_a_max_pool_leaves_no_part_of_a_split_unread(width):
    """The runtime would keep such a part until the run ends."""
    step = step_of("cnn2", width)
    smallest = smallest_step(step)
    assert peak_of_step(smallest) < peak_of_step(step)
    read = {value.name for value in smallest.graph.output}
    for node in smallest.graph.node:
        read |= values_read(node)
    for node in smallest.graph.node:
        assert node.op_type != "Split" or read.issuperset(node.output)
    for ours, expected in zip(outputs_of(smallest, 3), outputs_of(step, 3), strict=True):
        assert ours.tobytes() == expected.tobytes()


def test_a_step_that_recomputing_would_enlarge_stays(monkeypatch):
    """The refusal of a bound names the least memory of all attempts."""
    step = step_of("mlp", 0.25)
    own = peak_of_step(step)
    whole = step_of("mlp", 0.5)
    monkeypatch.setattr(memory_bound, "_lowered", lambda *_: whole)
    assert smallest_step(step) is step
    with pytest.raises(ExportError, match=f"needs {own / 1e6:.1f} MB even if"):
        bounded_step(step, own / 2, "w0.25-d1")


def test_a_bound_that_no_recomputing_reaches_is_refused():
    """The error names the tier, the least memory that its step needs, and the option."""
    refusal = r"of w0.25-d1 needs [0-9.]+ MB even if .*1.0 MB; raise"
    with pytest.raises(ExportError, match=refusal) as caught:
        bounded_step(step_of("conv", 0.25), 1e6, "w0.25-d1")
    assert not caught.value.is_about_model


def test_an_export_has_a_plan_for_each_bound_that_its_step_exceeds(tmp_path):
    """The set stays as it is without bounds. A plan has the checks of its own step, whose memory is
    within the bound; a bound that an earlier plan is within adds none.
    """
    settings = {"channels": [16, 32], "input_shape": [1, 16, 16]}
    request = ExportRequest(ZOO.get("conv"), settings, [Tier(1.0, 1)], Recipe())
    reports = {}
    for name, memory in {"without": (), "with": (3.4e6, 100e6, 3.5e6)}.items():
        (reports[name],) = export_architecture(
            replace(request, memory=memory), tmp_path / name, ExportOptions(formats=("onnx",))
        )
    folder = tmp_path / "with" / "conv" / reports["with"].tier.id
    same = tmp_path / "without" / "conv" / folder.name
    data = (folder / "manifest.json").read_bytes()
    assert data == (same / "manifest.json").read_bytes()
    (path,) = folder.glob(PLAN_FILES)
    whole = parse_manifest(data)
    plan = parse_manifest(path.read_bytes())
    assert path.name == plan_file("3.5MB")
    assert plan.peak_memory_bytes <= 3.4e6 < whole.peak_memory_bytes
    assert plan_difference(whole, plan) == ""
    assert [check.graph for check in plan.checks] == [check.graph for check in whole.checks]
    changed = [key for key in whole.graphs if plan.graphs[key] != whole.graphs[key]]
    assert changed == ["onnx/train"]
    step = onnx.load(str(folder / plan.graphs["onnx/train"].path))
    assert peak_of_step(step) == plan.peak_memory_bytes
    assert 0 < plan.recomputed_share < 1
    assert reports["without"].plans == ()
    assert reports["with"].plans == (PlanReport(plan.peak_memory_bytes, plan.recomputed_share),)
