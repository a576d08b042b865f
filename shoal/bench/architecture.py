"""An architecture without graphs, of a chosen size: a server can plan, slice and merge it, and nobody can train it."""

from pathlib import Path

import numpy as np

from fleet_protocol.manifest import Manifest, ParameterSpec
from fleet_protocol.recipe_spec import OptimizerSpec, RecipeSpec
from fleet_protocol.weights import encode_weights
from models.axes import Axis, AxisKind
from models.dims import Dim
from models.layout import HEAD, Layout, Parameter, block_name

ARCH = "bench"
_INPUTS, _CLASSES = 64, 10


def _layout(payload_bytes: int) -> Layout:
    hidden = max(1, payload_bytes // (4 * (_INPUTS + _CLASSES)))
    return Layout(
        arch=ARCH,
        settings={},
        axes={
            "inputs": Axis("inputs", _INPUTS, AxisKind.FIXED),
            "hidden": Axis("hidden", hidden),
            "classes": Axis("classes", _CLASSES, AxisKind.FIXED),
        },
        parameters=(
            Parameter("body.weight", (hidden, _INPUTS), (Dim("hidden"), Dim("inputs")), block_name(1)),
            Parameter("head.weight", (_CLASSES, hidden), (Dim("classes"), Dim("hidden")), HEAD),
        ),
        statistics=(),
        depth=1,
        depths=(1,),
        label_axes=("classes",),
        input_shape=(_INPUTS,),
        input_dtype="float32",
        classes=_CLASSES,
    )


def write_architecture(root: Path, payload_bytes: int) -> None:
    """Write an artifact folder of one tier, the whole model, whose parameters have nearly so many bytes."""
    layout = _layout(payload_bytes)
    tier = layout.tier(1.0)
    folder = root / ARCH / tier.id
    folder.mkdir(parents=True, exist_ok=True)
    specs, offset = [], 0
    for item in layout.parameters:
        axes = tuple(dim.axis for dim in item.dims)
        specs.append(ParameterSpec(name=item.name, shape=item.shape, axes=axes, block=item.block, offset=offset))
        offset += specs[-1].nbytes
    manifest = Manifest(
        arch=ARCH,
        settings={},
        tier=tier.id,
        width=tier.width,
        depth=tier.depth,
        classes=layout.classes,
        input_shape=layout.input_shape,
        input_dtype="float32",
        recipe=RecipeSpec(optimizer=OptimizerSpec(name="sgd")),
        parameters=tuple(specs),
        states=(),
        statistics=(),
        graphs={},
        flops_per_sample=1,
        flops_per_step_sample=1,
        peak_memory_bytes=1,
    )
    rng = np.random.default_rng(0)
    weights = {item.name: rng.standard_normal(item.shape, np.float32) for item in layout.parameters}
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    (root / ARCH / "layout.json").write_text(layout.to_json())
    (root / ARCH / "init.safetensors").write_bytes(encode_weights(weights))
