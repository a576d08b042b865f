"""Export a package's model by its SPEC, and compare a slice with the package's own smaller model.

As a program it prints one JSON line for one model: `python -m tests.packages.oracle 'GPT-2'`.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from safetensors.numpy import load
from torch import nn
from torch.nn import functional

from fleet_protocol.recipe import RecipeTable
from models import infer_layout, make_plan, slice_weights
from models.cut import Cut
from models.zoo.conversion_plan import convert_where_needed
from models.zoo.loading import load_weights
from models.zoo.package_call import PackageCall, adapt_call
from tests.packages.gallery import GALLERY, Packaged
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.packages.builder import architecture_of
from trainer_export.packages.discovery import discover_axes
from trainer_export.packages.loading import package_model
from trainer_export.packages.sizes import with_sizes
from trainer_export.recipe import Recipe

WIDTHS = (1.0, 0.5, 0.25)
# Large, so that the difference of weights has the digits of the gradient.
_RATE = 1e3
# A share of the largest gradient. Smaller ones, as of a bias before a batch norm, are rounding.
_FAINT = 1e-2
# Plain SGD, so that a step is the gradient.
_RECIPE = RecipeTable(momentum=0.0, clip_norm=0.0, weight_decay=0.0)


def measure(packaged: Packaged, folder: Path) -> dict[str, Any]:
    """Discover, export three widths, and compare the middle one with the package's own model."""
    begun = time.process_time()
    model = package_model(packaged.in_folder(folder / "config"), packaged.arguments)
    discovery = discover_axes(model)
    plain = architecture_of(model, discovery.forms)
    arch, _ = convert_where_needed(plain, plain.settings({}))
    layout = discovery.layout or infer_layout(arch)
    found = time.process_time() - begun
    has_labels = any(form.kind == "classes" for form in discovery.forms)
    table = _RECIPE if has_labels else _RECIPE.model_copy(update={"loss": _squares()})
    tiers = [layout.tier(width) for width in WIDTHS]
    recipe = Recipe.from_table(table, {})
    request = ExportRequest(arch, {}, tiers, recipe, layout=layout)
    reports = export_architecture(request, folder / "set", ExportOptions(formats=["onnx"]))
    spent = time.process_time() - begun
    tier = tiers[1]
    files = folder / "set" / model.name / tier.id
    weights = load((files.parent / "init.safetensors").read_bytes())
    plan = make_plan(layout, tier)
    tensors = dict(slice_weights(layout, plan, weights))
    for name, tensor in tensors.items():
        if not tensor.any():  # as the head of some classes, which would hide all before it
            tensors[name] = np.full(tensor.shape, 0.01, np.float32) * _wave(tensor.shape)
    for statistic in layout.statistics:
        mean, variance = statistic.tensors
        shape = tensors[f"{statistic.name}.weight"].shape
        # Of both signs, so that rectifiers leave half of the units.
        tensors[mean] = 0.1 * _wave(shape)
        tensors[variance] = np.full(shape, 1.5, np.float32)
    sizes: dict[str, int] = {}
    for form in discovery.forms:
        sizes |= form.sizes(Cut(tier.width))
    module = model.make(**with_sizes(model.arguments, sizes))
    own = adapt_call(module, _own_call(model.call), model.output)
    for name, frozen in own.named_parameters():
        if not frozen.requires_grad:  # not trained, so each tier has them from the class
            tensors[name] = frozen.detach().numpy()
    load_weights(own, tensors)
    manifest = json.loads((files / "manifest.json").read_bytes())
    calls = []
    for finding in discovery.findings:
        if finding.form is not None:
            calls.append(finding.form.call)
    return {
        "model": packaged.title,
        "spec": packaged.spec,
        "axes": calls,
        "parameters": [report.parameters for report in reports],
        "discovery seconds": round(found, 1),
        "export seconds": round(spent, 1),
        "peak megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "deviation of outputs": _compare_outputs(own, files, tensors, manifest),
        "deviation of a step": _compare_step(own, files, tensors, manifest),
    }


def _own_call(call: PackageCall) -> PackageCall:
    """Return a call with the package's own mask, from which Shoal may have chosen another."""
    return call if call.mask == "none" else replace(call, mask="padding")


def _wave(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return numbers between -1 and 1, no two of which are alike."""
    places = np.arange(np.prod(shape), dtype=np.float32)
    return np.sin(places + 1).reshape(shape)


def _squares() -> Any:
    return type(_RECIPE.loss)(name="mean-squared-error")


def _samples(manifest: Mapping[str, Any], own: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (3, *manifest["input_shape"])
    if manifest["input_dtype"] == "int64":
        rows = min(m.num_embeddings for m in own.modules() if isinstance(m, nn.Embedding))
        return torch.randint(0, max(rows, 3), shape, generator=generator)
    return torch.randn(shape, generator=generator)


def _run(path: Path, tensors: Mapping[str, Any], **further: Any) -> dict[str, Any]:
    """Run a graph; parameters and statistics have the names of the tensors."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed: dict[str, Any] = {}
    for port in session.get_inputs():
        name = port.name.removeprefix("param.")
        feed[port.name] = tensors[name] if name in tensors else further[port.name]
    names = [port.name for port in session.get_outputs()]
    return dict(zip(names, session.run(None, feed), strict=True))


def _compare_outputs(
    own: nn.Module, files: Path, tensors: Mapping[str, Any], manifest: Mapping[str, Any]
) -> float:
    """Return the largest deviation of the graph that predicts from the package's own model."""
    x = _samples(manifest, own)
    with torch.no_grad():
        expected = own.eval()(x).numpy()
    logits = _run(files / "infer.onnx", tensors, x=x.numpy())["logits"]
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def _compare_step(
    own: nn.Module, files: Path, tensors: Mapping[str, Any], manifest: Mapping[str, Any]
) -> float | None:
    """Return the largest deviation of a step of SGD from autograd; None if the model drops."""
    if manifest["noise"] or manifest["recipe"]["loss"]["name"] == "mean-squared-error":
        return None
    x = _samples(manifest, own)
    logits = own.train()(x)
    classes = manifest["classes"]
    pixels = logits.dim() > 3  # the classes of pixels come first
    rows = logits.movedim(1, -1) if pixels else logits
    places = rows.shape[:-1]
    y = torch.randint(0, classes, places, generator=torch.Generator().manual_seed(6))
    functional.cross_entropy(rows.reshape(-1, classes), y.reshape(-1)).backward()
    mask = np.ones(classes, np.float32)
    rate = np.array(_RATE, np.float32)
    stepped = _run(files / "train.onnx", tensors, x=x.numpy(), y=y.numpy(), mask=mask, lr=rate)
    gradients: dict[str, NDArray[np.float32]] = {}
    for name, parameter in own.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.numpy()
    largest = max(float(np.abs(gradient).max()) for gradient in gradients.values())
    worst = 0.0
    for name, gradient in gradients.items():
        after = stepped.get(f"next.param.{name}")
        if after is None:
            continue
        change = (after - tensors[name]) / -_RATE
        scale = max(float(np.abs(gradient).max()), _FAINT * largest)
        worst = max(worst, float(np.abs(change - gradient).max()) / scale)
    return worst


def main() -> None:
    """Measure the model that the command line names."""
    (packaged,) = (entry for entry in GALLERY if entry.title == sys.argv[1])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(packaged, Path(folder))))


if __name__ == "__main__":
    main()
