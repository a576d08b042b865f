"""The programs for ExecuTorch, and what of that runtime they go around."""

import json
import subprocess
import sys
import textwrap
import warnings
from functools import lru_cache

import numpy as np
import pytest
import torch

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import next_name, parse_manifest
from models.tier import Tier
from tests.trainer_export.helpers import (
    TINY,
    ZOO,
    batches_for,
    deviation,
    grouped_convolutions,
    tiny,
)
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.check import calm_torch, open_session
from trainer_export.formats import executorch
from trainer_export.formats.executorch import TRAIN_BATCH
from trainer_export.formats.files import UnavailableError
from trainer_export.formats.onnx import write_train_graph
from trainer_export.model_inputs import Signature
from trainer_export.optimizers.adam import Adam
from trainer_export.recipe import Recipe

installed = pytest.mark.skipif(not executorch.is_installed(), reason="ExecuTorch is not installed")
# To lower a model takes ten seconds and more, and several times that while it is watched how far
# the tests reach.
slow = pytest.mark.slow
# It says when it is imported what of PyTorch it uses that PyTorch will change.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

RUNNER = """
import json, sys
import numpy as np
import torch
from executorch.runtime import Runtime

folder = sys.argv[1]
signature = json.load(open(f"{folder}/signature.json"))
values = dict(np.load(f"{folder}/start.npz"))
method = Runtime.get().load_program(f"{folder}/train.pte").load_method("forward")
for step in range(20):
    values |= {name: array[step] for name, array in np.load(f"{folder}/batches.npz").items()}
    outputs = method.execute([torch.tensor(values[name]) for name in signature["inputs"]])
    found = dict(zip(signature["outputs"], (output.numpy().copy() for output in outputs)))
    values |= {name.removeprefix("next."): value for name, value in found.items() if name != "loss"}
np.savez(f"{folder}/end.npz", **values)
"""
"""What an application does, with nothing of Shoal."""


class Sorted(torch.nn.Module):
    """An operator that graphs have and ExecuTorch's kernels have not."""

    def forward(self, x):
        return x.sort(2).values


@lru_cache
def programs_of(name, recipe=Recipe(), width=1.0):  # noqa: B008 - it is frozen
    module, signature = tiny(name, width)
    return executorch.write_programs(module, signature, recipe), module, signature


def worst(name, recipe=Recipe(), width=1.0):  # noqa: B008
    files, module, signature = programs_of(name, recipe, width)
    with calm_torch():
        return deviation(
            executorch.check_programs(files, module, recipe, batches_for(module, signature))
        )


def test_without_the_runtime_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(executorch, "is_installed", lambda: False)
    with pytest.raises(ExportError, match=r"shoal\[export,executorch\]"):
        executorch.write_programs(*tiny("mlp"), Recipe())


@installed
@slow
def test_a_set_holds_three_programs_that_agree_with_pytorch(tmp_path):
    """Only where they are asked for, with their inputs, figures and versions in the manifest."""
    recipe = Recipe(Adam(), clip_norm=0.5, proximal=True)
    formats = ("onnx", "executorch")
    (report,) = export_architecture(
        ExportRequest(ZOO.get("mlp"), TINY["mlp"], [Tier(0.5, 1)], recipe),
        tmp_path,
        ExportOptions(formats=formats),
    )
    folder = tmp_path / "mlp" / "w0.50-d1"
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    programs = {
        key: graph for key, graph in manifest.graphs.items() if key.startswith("executorch/")
    }
    assert set(programs) == {"executorch/train", "executorch/eval", "executorch/infer"}
    assert {spec.shape[0] for spec in programs["executorch/train"].inputs if spec.name in "xy"} == {
        TRAIN_BATCH
    }
    assert {spec.shape[0] for spec in programs["executorch/infer"].inputs if spec.name == "x"} == {
        1
    }
    assert [
        spec.name for spec in programs["executorch/infer"].inputs if "param" not in spec.name
    ] == ["x"]
    assert (folder / "executorch" / "train.pte").read_bytes()[4:6] == b"ET"
    checks = [check for check in manifest.checks if check.graph in programs]
    assert len(checks) == 3
    assert deviation(checks) <= 1e-5
    assert {check.runtime for check in checks} == {f"executorch {manifest.versions['executorch']}"}
    assert report.skipped == {}


@installed
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (torch.nn.ConvTranspose2d(1, 2, 3), "transposed"),
        pytest.param(Sorted(), "no kernel for op aten::sort", marks=pytest.mark.slow),
    ],
    ids=["lowering", "kernel"],
)
def test_a_model_that_it_cannot_hold_is_refused(layer, reason):
    """As a format that this model cannot have, by its reason; an export goes on without it."""
    model = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.LazyLinear(3))
    signature = Signature((1, 4, 4), "float32", 3).with_places_of(model)
    with pytest.raises(UnavailableError, match=reason):
        executorch.write_programs(model, signature, Recipe())


# `cnn1`, `cnn2`, `preresnet18`, `exit_resnet` have the layers of `lenet5` and `conv`, the others the encoder of
# `minilm_adapters`.
ALIKE = {
    *("cnn1", "cnn2", "preresnet18", "exit_resnet"),
    *("exit_text_encoder", "minilm_encoder", "text_encoder", "token_classifier"),
}


@installed
@slow
@pytest.mark.parametrize("name", [name for name in ZOO.names if name not in ALIKE])
def test_every_kind_of_architecture_agrees_with_pytorch(name):
    """None is refused; lowering one takes most of a minute."""
    assert worst(name) <= 1e-5


@installed
@slow
def test_grouped_convolutions_agree_with_pytorch():
    model = grouped_convolutions()
    signature = Signature((2, 8, 8), "float32", 3).with_places_of(model)
    files = executorch.write_programs(model, signature, Recipe())
    with calm_torch():
        checks = executorch.check_programs(files, model, Recipe(), batches_for(model, signature))
    assert deviation(checks) <= 1e-5


@installed
@slow
def test_a_batch_in_pieces_agrees_with_pytorch():
    assert worst("mlp", Recipe(Adam(), accumulate=True), 0.5) <= 1e-5


@installed
@slow
def test_an_application_trains_from_the_program_alone(tmp_path):
    """Twenty steps by a process that knows only the .pte end at the weights of twenty portable
    steps.
    """
    files, module, signature = programs_of("lenet5", Recipe(), 1.0)
    train = files[0]
    batches = batches_for(module, signature, (TRAIN_BATCH,))
    pairs = [(x.numpy(), y.numpy()) for x, y in batches.draw(20)]
    values = {f"param.{name}": value.detach().numpy() for name, value in module.named_parameters()}
    values |= {
        p.name: np.zeros(p.shape, np.float32) for p in train.inputs if p.name.startswith("state.")
    }
    values |= {"mask": np.ones(4, np.float32), "lr": np.array(0.01, np.float32)}
    (tmp_path / "train.pte").write_bytes(train.data)
    ports = {"inputs": train.inputs, "outputs": train.outputs}
    (tmp_path / "signature.json").write_text(
        json.dumps({k: [p.name for p in v] for k, v in ports.items()})
    )
    np.savez(tmp_path / "start.npz", **values)
    np.savez(tmp_path / "batches.npz", x=[x for x, _ in pairs], y=[y for _, y in pairs])
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUNNER), tmp_path], check=True, timeout=600
    )
    session = open_session(write_train_graph(module, signature, Recipe()).data)
    names = [port.name for port in train.outputs]
    for x, y in pairs:
        found = dict(zip(names, session.run(names, {**values, "x": x, "y": y}), strict=True))
        values |= {name: found[next_name(name)] for name in values if next_name(name) in found}
    with np.load(tmp_path / "end.npz") as end:
        for name, value in values.items():
            if name.startswith("param."):
                np.testing.assert_allclose(end[name], value, rtol=0, atol=1e-4, err_msg=name)


@installed
@pytest.mark.slow
def test_the_runtimes_own_gradient_of_max_pooling_is_wrong():
    """If this fails the runtime was mended: its own kernel may take the place of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from executorch.exir import EdgeCompileConfig, to_edge  # noqa: PLC0415
        from executorch.runtime import Runtime  # noqa: PLC0415

        class Pooled(torch.nn.Module):
            def forward(self, grad, x, index):
                back = torch.ops.aten.max_pool2d_with_indices_backward.default
                first = x * 3 + 1e6  # leaves large numbers in the memory that is taken next
                return back(grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, index), first.sum()

        x = torch.randn(2, 3, 8, 8)
        largest, index = torch.ops.aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
        given = (torch.randn_like(largest), x, index)
        config = EdgeCompileConfig(_check_ir_validity=False)
        made = to_edge(torch.export.export(Pooled(), given), compile_config=config).to_executorch()
    method = Runtime.get().load_program(made.buffer).load_method("forward")
    for _ in range(2):
        found = method.execute(given)[0].clone()
    assert (found - Pooled()(*given)[0]).abs().max() > 1e-3
