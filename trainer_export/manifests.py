"""The manifest of a sub-model's files: what a device must know of them."""

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from fleet_protocol.errors import ExportError, RefusedError
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
    next_name,
)
from models.layout import Layout
from models.tier import Tier
from trainer_export.exported import Export
from trainer_export.footprint import Footprint
from trainer_export.formats.files import SetFile
from trainer_export.graph import values_read
from trainer_export.model_inputs import Signature
from trainer_export.sized_graph import VIEWS

_STEP_GRAPHS = ("onnx/train", "ort-training/step")
# What devices of other runtimes take, and what servers and users run.
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
_ENTRYWISE = frozenset({"Add", "Mul", "Sub"})  # read an entry before they write it


def in_place(model: onnx.ModelProto, prefix: str) -> bool:
    """Whether every ``param.`` or ``state.`` input of a step graph may share memory with its next
    (``next.<name>``).

    Also true where there are none. It is safe where everything that reads the old one comes before
    what writes the new one by the flow of data, so that no order of execution can turn them round.
    """
    graph = model.graph
    reads = [values_read(node) for node in graph.node]
    readers: dict[str, list[int]] = {}
    for index, names in enumerate(reads):
        for name in names:
            readers.setdefault(name, []).append(index)
    producers = {output: index for index, node in enumerate(graph.node) for output in node.output}
    ancestors = _ancestors(reads, producers)
    for old in (value.name for value in graph.input if value.name.startswith(prefix)):
        if next_name(old) not in producers:
            continue  # frozen
        writer = producers[next_name(old)]
        same = [old]
        for name in same:  # which grows by what may share its memory
            for index in readers.get(name, ()):
                node = graph.node[index]
                if node.op_type in VIEWS:
                    same.extend(node.output)
                if not (
                    ancestors[writer] >> index & 1
                    or (index == writer and node.op_type in _ENTRYWISE)
                ):
                    return False
    return True


def _ancestors(reads: Sequence[set[str]], producers: Mapping[str, int]) -> list[int]:
    """For each node, the nodes that must run before it, each a bit of a number."""
    found: list[int] = []
    for names in reads:
        before = 0
        for index in {producers[name] for name in names if name in producers}:
            before |= found[index] | 1 << index
        found.append(before)
    return found


@dataclass(frozen=True)
class Facts:
    """What was found out about a sub-model by running it."""

    signature: Signature
    # shapes of what its layers draw for a sample in training, by path of the layer
    noise: Mapping[str, tuple[int, ...]]
    checks: tuple[CheckSpec, ...]
    footprint: Footprint
    skipped: Mapping[str, str] = field(
        default_factory=dict
    )  # formats it cannot have, with the reason


def manifest_of(export: Export, tier: Tier, files: Sequence[SetFile], facts: Facts) -> Manifest:
    """The manifest of a sub-model's files."""
    layout = export.layout
    recipe = export.recipe
    output = facts.signature.output
    parameters = _parameter_specs(layout, tier)
    steps = [onnx.load_model_from_string(file.data) for file in files if file.key in _STEP_GRAPHS]
    return Manifest(
        arch=export.arch.name,
        settings=json.loads(replace(layout, settings=export.settings(tier)).to_json())["settings"],
        tier=tier.id,
        width=tier.width,
        depth=tier.depth,
        classes=layout.classes_of(tier),
        input_shape=layout.input_shape,
        input_dtype=layout.input_dtype,
        label_shape=recipe.loss.target(output).shape,
        recipe=recipe.spec(output, facts.signature.outputs(1)),
        parameters=parameters,
        states=recipe.state_specs({spec.name: spec.shape for spec in parameters}),
        states_in_place=all(in_place(step, "state.") for step in steps),
        parameters_in_place=all(in_place(step, "param.") for step in steps),
        statistics=tuple(
            StatisticSpec(
                name=item.name,
                channels=layout.local_shape(item.dims, tier.width)[0],
                axis=str(item.dims[0]),
            )
            for item in layout.statistics
            if item.block in layout.blocks(tier)
        ),
        graphs={file.key: graph_spec(file) for file in files if file.is_graph},
        files={file.key: FileSpec(**content_of(file)) for file in files if not file.is_graph},
        base=tuple(
            TensorSpec(name=n, dtype="float32", shape=shape)
            for n, shape in layout.base_of(tier).items()
        ),
        noise=tuple(NoiseSpec(name=path, shape=shape) for path, shape in facts.noise.items()),
        flops_per_sample=facts.footprint.flops_per_sample,
        flops_per_step_sample=facts.footprint.flops_per_step_sample,
        peak_memory_bytes=facts.footprint.peak_memory_bytes,
        checks=facts.checks,
        skipped=facts.skipped,
        versions=versions(),
    )


def _parameter_specs(layout: Layout, tier: Tier) -> tuple[ParameterSpec, ...]:
    specs = []
    offset = 0
    shapes = layout.shapes(tier)
    for item in layout.kept(tier):
        axes = tuple(map(str, item.dims))
        spec = ParameterSpec(
            name=item.name,
            shape=shapes[item.name],
            axes=axes,
            block=item.block,
            offset=offset,
        )
        specs.append(spec)
        offset += spec.nbytes
    return tuple(specs)


def content_of(file: SetFile) -> dict[str, Any]:
    """Where a file lies, and its content's name and size."""
    return {"path": file.path, "digest": digest_of(file.data), "size": len(file.data)}


def graph_spec(file: SetFile) -> GraphSpec:
    """A graph as a manifest states it, with what a board will look at before it runs it.

    Raises:
        ExportError: it is one for boards, and they would not run it.
    """
    inputs, outputs = (
        tuple(TensorSpec(name=p.name, dtype=p.dtype, shape=p.shape) for p in ports)  # type: ignore[arg-type]
        for ports in (file.inputs, file.outputs)
    )
    spec = GraphSpec(**content_of(file), inputs=inputs, outputs=outputs)
    if file.key not in _NOT_FOR_BOARDS:
        try:
            check_graph(file.data, [spec])
        except RefusedError as error:
            raise ExportError(f"boards would refuse the graph {file.key}: {error}") from error
        spec = spec.model_copy(update={"mixed": tuple(port.name for port in outputs)})
    return spec


def versions() -> dict[str, str]:
    """The packages that had a part in an export."""
    found = {"python": sys.version.split()[0]}
    for name in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
