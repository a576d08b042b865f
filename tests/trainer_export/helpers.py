"""Small models and the comparison every graph test makes; PyTorch's autograd is the oracle
throughout.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from fleet_protocol.graphs.check import check_structure
from fleet_protocol.manifest import CheckSpec
from models import Registry, build
from models.zoo.randomized_model import vocabulary_of
from trainer_export.batches import SizedBatches
from trainer_export.check import calm_torch
from trainer_export.formats.files import GraphFile
from trainer_export.formats.onnx import check_graphs, write_graphs, write_train_graph
from trainer_export.loss import loss_named
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe
from trainer_export.train_check import check_train

ZOO = Registry.zoo()

_TEXT = {"input_shape": (6,), "embed": 8, "heads": 2, "ffn": 12, "blocks": 2}
TINY: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"input_shape": (1, 4, 4), "classes": 3, "hidden": (8, 6)},
    "lenet5": {"input_shape": (1, 16, 16), "classes": 4, "channels": (4, 6), "hidden": (12, 8)},
    "exit_resnet": {
        "input_shape": (3, 8, 8),
        "classes": 4,
        "channels": (4, 6, 8),
        "blocks": (1, 1, 1),
    },
    "conv": {"input_shape": (1, 14, 14), "classes": 5, "channels": (8, 12, 16)},
    "text_encoder": _TEXT | {"classes": 3, "vocab": 20},
    "exit_text_encoder": _TEXT | {"classes": 3, "vocab": 20},
    "cnn1": {"input_shape": (3, 16, 16), "classes": 4, "channels": (4, 6), "hidden": (10,)},
    "cnn2": {"input_shape": (3, 16, 16), "classes": 4, "channels": (4, 6, 8)},
    "har_cnn": {"input_shape": (3, 32), "classes": 4, "channels": (4, 8, 8)},
    "preresnet18": {"input_shape": (3, 16, 16), "classes": 4, "channels": (4, 6, 8, 8)},
    "minilm_adapters": _TEXT | {"classes": 3, "vocab": 30, "pretrained": False, "rank": 4},
    "minilm_encoder": _TEXT | {"classes": 3, "vocab": 30, "pretrained": False},
    "token_classifier": _TEXT | {"classes": 3, "vocab": 30, "pretrained": False},
    # The runtime's LayerNormalization subtracts squares, which costs digits where four nearly equal
    # numbers are normed.
    "smollm": {
        "input_shape": (6,),
        "classes": 20,
        "embed": 16,
        "ffn": 12,
        "heads": 4,
        "shared_heads": 2,
        "head_dim": 4,
        "blocks": 2,
    },
    "next_word": _TEXT | {"classes": 20, "head_dim": 4, "embed": 32},
    "transformer_mlm": _TEXT | {"classes": 20},
}


LOSS_OF = {"exit_resnet": "all-exits-teach", "exit_text_encoder": "all-exits-teach"}
"""The loss of models that have no use for the default one."""


def recipe_for(name: str, recipe: Recipe | None = None) -> Recipe:
    """A recipe with the loss that a zoo model needs, by default the default recipe."""
    recipe = recipe or Recipe()
    return replace(recipe, loss=loss_named(LOSS_OF[name])) if name in LOSS_OF else recipe


def tiny(name: str, width: float = 1.0, depth: int | None = None) -> tuple[nn.Module, Signature]:
    """A small zoo model whose vectors (norms, biases) are not at their trivial start values."""
    arch = ZOO.get(name)
    settings = arch.settings(TINY[name])
    torch.manual_seed(1)
    module = build(arch, width, depth, settings)
    signature = Signature(tuple(settings["input_shape"]), arch.input_dtype, settings["classes"])
    return shaken(module), signature.with_places_of(module)


def shaken(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def grouped_convolutions() -> nn.Module:
    """Return convolutions of several groups: narrow, of size 1, depthwise, and dilated."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, 2, 1, groups=2),
        nn.ReLU(),
        nn.Conv2d(4, 8, 1, groups=4, bias=False),
        nn.Conv2d(8, 8, (3, 5), padding=(1, 2), groups=8),
        nn.Hardswish(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def batches_for(
    module: nn.Module,
    signature: Signature,
    sizes: tuple[int, ...] = (5, 1, 8),
    recipe: Recipe | None = None,
) -> SizedBatches:
    return SizedBatches(signature, vocabulary_of(module), sizes, loss=(recipe or Recipe()).loss)


def train_report(
    module: nn.Module,
    signature: Signature,
    recipe: Recipe | None = None,
    sizes: tuple[int, ...] = (5, 1, 8),
) -> CheckSpec:
    """Export the train graph alone and compare it with PyTorch over six steps."""
    recipe = recipe or Recipe()
    graph = write_train_graph(module, signature, recipe)
    check_structure(memoryview(graph.data))  # as a board does
    with calm_torch():
        return check_train(
            graph.data, module, recipe, batches_for(module, signature, sizes, recipe)
        )


@lru_cache
def graphs_of(name: str, width: float = 1.0, depth: int | None = None) -> tuple[GraphFile, ...]:
    """The graphs of a `tiny` model under the default recipe, written once for all tests: to be
    read, not changed.
    """
    return write_graphs(*tiny(name, width, depth), recipe_for(name))


def all_reports(
    module: nn.Module,
    signature: Signature,
    recipe: Recipe | None = None,
    graphs: tuple[GraphFile, ...] | None = None,
) -> dict[str, CheckSpec]:
    """Compare every graph with PyTorch; they are written first unless they are given."""
    recipe = recipe or Recipe()
    graphs = graphs or write_graphs(module, signature, recipe)
    with calm_torch():
        reports = check_graphs(
            graphs, module, recipe, batches_for(module, signature, recipe=recipe)
        )
    return {report.graph: report for report in reports}


def deviation(reports: Iterable[CheckSpec]) -> float:
    """The worst of some reports: absolute, or relative where the numbers are large (a sum of
    losses).
    """
    return max(min(report.worst_absolute, report.worst_relative) for report in reports)


def assert_portable(model: onnx.ModelProto) -> None:
    """Standard operators only, no external files, versions old runtimes read."""
    onnx.checker.check_model(model)
    assert [(item.domain, item.version) for item in model.opset_import] == [("", 18)]
    assert model.ir_version == 9
    assert {node.domain for node in model.graph.node} == {""}
    assert not any(onnx.external_data_helper.uses_external_data(t) for t in model.graph.initializer)


def image_batch(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
