"""The architecture of a benchmark: one tier, the whole model, without graphs."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.manifest import Manifest, ParameterSpec
from fleet_protocol.recipe_spec import OptimizerSpec, RecipeSpec
from fleet_protocol.weights import encode_weights
from models.axes import Axis, AxisKind
from models.block_names import HEAD, block_name
from models.dims import Dim
from models.layout import Layout
from models.parameters import Parameter

ARCH = "bench"
_INPUTS = 64
_CLASSES = 10


def write_architecture(root: Path, payload_bytes: int) -> None:
    """Write an artifact folder whose parameters have about this many bytes."""
    layout = _layout(payload_bytes)
    tier = layout.tier(1.0)
    folder = root / ARCH / tier.id
    folder.mkdir(parents=True, exist_ok=True)
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
        parameters=_parameter_specs(layout),
        states=(),
        statistics=(),
        graphs={},
        # Nominal costs: no device runs this step.
        flops_per_sample=1,
        flops_per_step_sample=1,
        peak_memory_bytes=1,
    )
    # Random values, because zeros would compress.
    draw = np.random.default_rng(0)
    weights: dict[str, NDArray[np.float32]] = {}
    for parameter in layout.parameters:
        weights[parameter.name] = draw.standard_normal(parameter.shape, np.float32)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    (root / ARCH / "layout.json").write_text(layout.to_json())
    (root / ARCH / "init.safetensors").write_bytes(encode_weights(weights))


def _parameter_specs(layout: Layout) -> tuple[ParameterSpec, ...]:
    specs: list[ParameterSpec] = []
    offset = 0
    for parameter in layout.parameters:
        spec = ParameterSpec(
            name=parameter.name,
            shape=parameter.shape,
            axes=tuple(dim.axis for dim in parameter.dims),
            block=parameter.block,
            offset=offset,
        )
        specs.append(spec)
        offset += spec.nbytes
    return tuple(specs)


def _layout(payload_bytes: int) -> Layout:
    """Return two layers with a hidden axis of the size that gives this many bytes."""
    # Float32 numbers, and both layers have the hidden axis.
    hidden = max(1, payload_bytes // (4 * (_INPUTS + _CLASSES)))
    body = Parameter(
        "body.weight",
        (hidden, _INPUTS),
        (Dim("hidden"), Dim("inputs")),
        block_name(1),
    )
    head = Parameter(
        "head.weight",
        (_CLASSES, hidden),
        (Dim("classes"), Dim("hidden")),
        HEAD,
    )
    return Layout(
        arch=ARCH,
        settings={},
        axes={
            "inputs": Axis("inputs", _INPUTS, AxisKind.FIXED),
            "hidden": Axis("hidden", hidden),
            "classes": Axis("classes", _CLASSES, AxisKind.FIXED),
        },
        parameters=(body, head),
        statistics=(),
        depth=1,
        depths=(1,),
        label_axes=("classes",),
        input_shape=(_INPUTS,),
        input_dtype="float32",
        classes=_CLASSES,
    )
