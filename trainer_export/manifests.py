"""Builds the manifest of a sub-model's files."""

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet_protocol.errors import ExportError, RefusedError
from fleet_protocol.graph_parts import stays_on_board
from fleet_protocol.graphs.check import check_graph
from fleet_protocol.manifest import (
    CheckSpec,
    FileSpec,
    GraphSpec,
    Manifest,
    NoiseSpec,
    ParameterSpec,
    StatisticSpec,
    TensorSpec,
    digest_of,
)
from models.layout import Layout
from models.shares import frozen_parameters
from models.tier import Tier
from trainer_export.exported import Export
from trainer_export.footprint import Footprint
from trainer_export.formats.files import SetFile
from trainer_export.graph import Port
from trainer_export.in_place import PARAMETERS, STATES, overwritten
from trainer_export.model_inputs import Signature

# Files for devices with other runtimes, and files that servers and users run.
_NOT_FOR_BOARDS = (
    "onnx/infer",
    *(f"ort-training/{name}_model" for name in ("training", "eval", "optimizer")),
    *(f"executorch/{name}" for name in ("train", "eval", "infer")),
)
_VERSIONED = (
    "torch",
    "onnx",
    "onnxruntime",
    "onnxruntime-training-cpu",
    "executorch",
    "numpy",
)


@dataclass(frozen=True)
class SubModelFacts:
    """Facts about a sub-model from running it.

    Attributes:
        noise: shapes of the random numbers of its layers for a sample in training, by path of the
            layer.
        skipped: unavailable formats, with the reason.
    """

    signature: Signature
    noise: Mapping[str, tuple[int, ...]]
    checks: tuple[CheckSpec, ...]
    footprint: Footprint
    skipped: Mapping[str, str] = field(default_factory=dict)


def manifest_of(
    export: Export,
    tier: Tier,
    files: Sequence[SetFile],
    facts: SubModelFacts,
) -> Manifest:
    """Return the manifest of a sub-model's files."""
    layout = export.layout
    recipe = export.recipe
    output = facts.signature.output
    parameters = _parameter_specs(layout, tier)
    not_trained = frozen_parameters(layout, tier)
    shapes = {}
    for spec in parameters:
        if spec.name not in not_trained:
            shapes[spec.name] = spec.shape
    in_place = overwritten(files)
    base = []
    for name, shape in layout.base_of(tier).items():
        base.append(TensorSpec(name=name, dtype="float32", shape=shape))
    noise = []
    for path, shape in facts.noise.items():
        noise.append(NoiseSpec(name=path, shape=shape))
    own_layout = replace(layout, settings=export.settings(tier))
    settings = json.loads(own_layout.to_json())["settings"]
    graphs: dict[str, GraphSpec] = {}
    other_files: dict[str, FileSpec] = {}
    for file in files:
        if file.is_graph:
            graphs[file.key] = graph_spec(file)
        else:
            other_files[file.key] = FileSpec(**content_of(file))
    return Manifest(
        arch=export.arch.name,
        settings=settings,
        tier=tier.id,
        width=tier.width,
        depth=tier.depth,
        classes=layout.classes_of(tier),
        input_shape=layout.input_shape,
        input_dtype=layout.input_dtype,
        label_shape=recipe.loss.target(output).shape,
        recipe=recipe.spec(output, facts.signature.outputs(1)),
        parameters=parameters,
        states=recipe.state_specs(shapes),
        states_in_place=STATES in in_place,
        parameters_in_place=PARAMETERS in in_place,
        statistics=_statistic_specs(layout, tier),
        graphs=graphs,
        files=other_files,
        frozen=not_trained,
        base=tuple(base),
        noise=tuple(noise),
        flops_per_sample=facts.footprint.flops_per_sample,
        flops_per_step_sample=facts.footprint.flops_per_step_sample,
        peak_memory_bytes=facts.footprint.peak_memory_bytes,
        recomputed_share=facts.footprint.recomputed_share,
        checks=facts.checks,
        skipped=facts.skipped,
        versions=versions(),
    )


def _statistic_specs(layout: Layout, tier: Tier) -> tuple[StatisticSpec, ...]:
    """Return the statistics of the blocks that a tier has."""
    specs = []
    for norm in layout.statistics:
        if norm.block in layout.blocks(tier):
            channels = layout.local_shape(norm.dims, tier.width)[0]
            axis = str(norm.dims[0])
            specs.append(StatisticSpec(name=norm.name, channels=channels, axis=axis))
    return tuple(specs)


def _parameter_specs(layout: Layout, tier: Tier) -> tuple[ParameterSpec, ...]:
    """Return a tier's parameters, with their places in a file of weights."""
    specs = []
    offset = 0
    shapes = layout.shapes(tier)
    for parameter in layout.kept(tier):
        spec = ParameterSpec(
            name=parameter.name,
            shape=shapes[parameter.name],
            axes=tuple(map(str, parameter.dims)),
            block=parameter.block,
            offset=offset,
        )
        specs.append(spec)
        # Tensors lie one after another without gaps, as in a file of safetensors.
        offset += spec.nbytes
    return tuple(specs)


def content_of(file: SetFile) -> dict[str, Any]:
    """Return the path of a file, and the digest and size of its content."""
    return {
        "path": file.path,
        "digest": digest_of(file.data),
        "size": len(file.data),
    }


def graph_spec(file: SetFile) -> GraphSpec:
    """Return a graph in the form of a manifest, after a board's checks of it.

    Raises:
        ExportError: boards need the graph, but would refuse to run it.
    """
    spec = GraphSpec(
        **content_of(file),
        inputs=_tensor_specs(file.inputs),
        outputs=_tensor_specs(file.outputs),
    )
    if file.key not in _NOT_FOR_BOARDS:
        try:
            check_graph(file.data, [spec], leaves_board=not stays_on_board(file.key))
        except RefusedError as error:
            raise ExportError(
                f"boards would refuse to run the graph {file.key}: {error}"
            ) from error
        # The check has found this for each output.
        spec = spec.model_copy(update={"mixed": tuple(port.name for port in spec.outputs)})
    return spec


def _tensor_specs(ports: Sequence[Port]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=port.name, dtype=port.dtype, shape=port.shape)  # type: ignore[arg-type]
        for port in ports
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect an export."""
    installed = {"python": sys.version.split()[0]}
    for name in _VERSIONED:
        # Runtimes of other formats are optional.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed
