"""A training step in two parts: the frozen layers, whose outputs a board may keep, and the step.

The export compares both with PyTorch, and with the step as a whole.
"""

import tracemalloc

import numpy as np
import pytest

from broker_server.rounds.artifacts import load_artifacts
from device_runtime.training.backends import Sessions
from device_runtime.training.backends.lower_part import LowerGraph
from device_runtime.training.epochs import self_test
from fleet_protocol.errors import RefusedError
from fleet_protocol.graph_parts import ABOVE, BELOW
from fleet_protocol.graphs.check import check_graph
from models import Registry, infer_layout
from models.tier import HEAD_SHARE
from tests.trainer_export.helpers import TINY
from trainer_export import step_parts_check
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.check import DeviationError, WorstDeviation
from trainer_export.recipe import Recipe

CACHE = 10**6


def export(name, folder, **settings):
    """The artifacts of a small model of the zoo whose tiers train half, and the head."""
    arch = Registry.zoo().get(name)
    full = arch.settings({**TINY[name], **settings})
    layout = infer_layout(arch, full)
    tiers = [layout.tier(1.0, None, share) for share in (0.5, HEAD_SHARE)]
    request = ExportRequest(arch, full, tiers, Recipe(proximal=True, accumulate=True))
    export_architecture(request, folder, ExportOptions(formats=("onnx",)))
    return load_artifacts(folder, name, chunk_bytes=1024)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    """Two layers before the head."""
    return export("mlp", tmp_path_factory.mktemp("mlp"))


def session(artifacts, item, *, in_parts):
    """A session with the initial weights, of the whole step or of its parts."""
    lower = None
    graph = item.folder / "train.onnx"
    if in_parts:
        lower = LowerGraph(item.folder / "below.onnx", None, "")
        graph = item.folder / "above.onnx"
    opened = Sessions().train(item.manifest, graph, item.base(), lower)
    opened.load(artifacts.initial_weights(), 0.1)
    return opened


def trained(artifacts, item, *, in_parts, piece=None):
    """The parameters after some steps, of which the last has fewer samples."""
    opened = session(artifacts, item, in_parts=in_parts)
    opened.split_batches(piece)
    draw = np.random.default_rng(1)
    mask = np.ones(item.manifest.classes, np.float32)
    for count in (6, 6, 3, 1):
        x = draw.normal(size=(count, *item.manifest.input_shape)).astype(np.float32)
        opened.step(x, np.arange(count) % item.manifest.classes, mask, 0.05)
    return {name: value.copy() for name, value in opened.parameters().items()}


@pytest.mark.parametrize("piece", [None, 4])
def test_two_parts_have_the_bits_of_the_whole(mlp, piece):
    """In batches and in pieces of them; frozen parameters are where the session says."""
    for item in mlp.tiers.values():
        whole = trained(mlp, item, in_parts=False, piece=piece)
        parts = trained(mlp, item, in_parts=True, piece=piece)
        assert list(parts) == list(whole)
        for name, value in whole.items():
            np.testing.assert_array_equal(parts[name], value)


def test_the_step_above_takes_neither_samples_nor_what_is_frozen(mlp):
    """The part below takes them, and nothing of what is trained."""
    for item in mlp.tiers.values():
        manifest = item.manifest
        frozen = {f"param.{name}" for name in manifest.frozen}
        below = manifest.graphs[BELOW]
        above = {port.name for port in manifest.graphs[ABOVE].inputs}
        assert {port.name for port in below.inputs} == {"x", *frozen}
        assert not above & {"x", *frozen}
        assert {port.name for port in below.outputs} <= above
        assert manifest.graphs[ABOVE].outputs == manifest.graphs["onnx/train"].outputs


def test_what_depends_on_the_batch_is_not_kept(tmp_path):
    """A batch norm mixes samples: the set has no such parts, and says why."""
    artifacts = export("conv", tmp_path)
    for item in artifacts.tiers.values():
        assert not {ABOVE, BELOW} & item.manifest.graphs.keys()
        assert "depends on the other samples" in item.manifest.skipped[BELOW]


def test_parts_whose_whole_was_judged_in_float64_are_kept(tmp_path, monkeypatch):
    """Rounding then moves units at their edge in the parts, too, which have the whole's bits."""

    def deviating(*arguments, **options):
        compare(*arguments, **options)
        raise DeviationError("some units moved", WorstDeviation(), ABOVE, 1)

    compare = step_parts_check.check_train
    monkeypatch.setattr(step_parts_check, "check_train", deviating)
    for item in export("mlp", tmp_path / "mlp").tiers.values():
        checks = {check.graph: check for check in item.manifest.checks}
        assert checks[ABOVE] == checks["onnx/train"].model_copy(update={"graph": ABOVE})
    for item in export("conv", tmp_path / "conv").tiers.values():
        assert "depends on the other samples" in item.manifest.skipped[BELOW]


def test_kept_values_count_as_samples(mlp):
    """A graph that would send them is refused, as if it sent the samples."""
    item = next(iter(mlp.tiers.values()))
    graph = (item.folder / "below.onnx").read_bytes()
    specs = item.manifest.graphs.values()
    check_graph(graph, specs, leaves_board=False)
    with pytest.raises(RefusedError, match="grows with the batch"):
        check_graph(graph, specs)
    above = (item.folder / "above.onnx").read_bytes()
    check_graph(above, specs)


def test_a_step_that_returns_kept_values_is_refused():
    """Their sum over the batch would be harmless; the values of a sample are not."""
    from fleet_protocol.graphs.exposure import exposed_outputs, is_sample_input  # noqa: PLC0415
    from fleet_protocol.graphs.model import Graph, Node, Port  # noqa: PLC0415

    port = Port("kept.0", "float32", ("batch", 2))
    node = Node("", "Identity", ("kept.0",), ("next.param.w",))
    output = Port("next.param.w", "float32", (1, 2))
    graph = Graph(9, {}, (node,), frozenset(), {}, (port,), (output,))
    batch = [port.name for port in graph.inputs if is_sample_input(port.name)]
    assert exposed_outputs(graph, batch) == ("next.param.w",)


def test_a_self_test_holds_no_second_copy_of_the_model(tmp_path):
    """The board may have just enough memory for the model and a step."""
    artifacts = export("mlp", tmp_path, hidden=(1024, 512))
    item = next(iter(artifacts.tiers.values()))
    opened = session(artifacts, item, in_parts=False)
    weights = sum(value.nbytes for value in opened.parameters().values())
    tracemalloc.start()
    try:
        self_test(opened, item.manifest)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < weights / 2
