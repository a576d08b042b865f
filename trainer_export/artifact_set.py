"""Exports an architecture for many tiers into a folder of content-addressed files, all of them checked or none.

    <out>/objects/<sha256[:2]>/<sha256>    every file by content
    <out>/<arch>/layout.json               axes of the global model
    <out>/<arch>/init.safetensors          initial global weights, in layout order
    <out>/<arch>/<tier>/manifest.json      what a device must know
    <out>/<arch>/<tier>/head.safetensors   initial weights of a head of the tier's own, where it has one
    <out>/<arch>/<tier>/*.onnx             the portable graphs, hard links into objects
    <out>/<arch>/<tier>/ort-training/*     the same for onnxruntime-training

A set is built in a folder beside the old one and takes its place by a rename after its last check, so a failed or
interrupted export leaves what was there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.manifest import (
    CheckSpec,
    FileSpec,
    GraphSpec,
    Manifest,
    NoiseSpec,
    ParameterSpec,
    StateSpec,
    StatisticSpec,
    TensorSpec,
    digest_of,
)
from fleet_protocol.weights import encode_weights
from models.layout import Dim, Layout
from models.registry import Architecture, build, infer_layout
from models.tier import Tier
from models.zoo.inference import initial_weights
from trainer_export.aliasing import states_in_place
from trainer_export.check import SizedBatches, calm_torch, vocabulary_of
from trainer_export.footprint import Footprint, count_flops, peak_memory
from trainer_export.formats import onnx as portable
from trainer_export.formats import ort_training
from trainer_export.formats.files import SetFile
from trainer_export.formats.ort_training import MissingGradientError
from trainer_export.model_ports import Signature, model_noise
from trainer_export.publishing import replacing, write_file
from trainer_export.recipe import Recipe

__all__ = [
    "FORMATS",
    "Counter",
    "Export",
    "Facts",
    "Format",
    "Progress",
    "TierReport",
    "content_of",
    "export_architecture",
    "graph_spec",
    "manifest_of",
    "versions",
]

Format = Literal["onnx", "ort-training"]
FORMATS: tuple[Format, ...] = ("onnx", "ort-training")

_STEP_GRAPHS = ("onnx/train", "ort-training/step")
_VERSIONED = ("torch", "onnx", "onnxruntime", "onnxruntime-training-cpu", "numpy")


@dataclass(frozen=True)
class Progress:
    """How far an export is.

    Attributes:
        tier: id of the tier being worked on.
        stage: what is being done, for people.
        done: finished stages over all tiers.
        total: all stages over all tiers.
    """

    tier: str
    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class TierReport:
    """The result of one tier.

    Attributes:
        tier: the shape.
        parameters: number of scalars.
        flops_per_sample: floating point operations of one forward pass of one sample.
        graph_bytes: bytes of all its graphs.
        peak_memory_bytes: estimate for training at batch 32, beyond the runtime itself.
        worst_deviation: largest deviation from PyTorch of any of its graphs, relative to the tensor's largest value.
        skipped: formats that were asked for and that the model cannot have, each with the reason.
    """

    tier: Tier
    parameters: int
    flops_per_sample: int
    graph_bytes: int
    peak_memory_bytes: int
    worst_deviation: float
    skipped: Mapping[str, str] = field(default_factory=dict)


def export_architecture(
    arch: Architecture,
    settings: Mapping[str, Any] | None,
    tiers: Sequence[Tier],
    recipe: Recipe,
    out: Path,
    formats: Sequence[Format] = FORMATS,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    heads: Mapping[Tier, int] | None = None,
) -> tuple[TierReport, ...]:
    """Export, check and publish the artifact sets of some tiers of one architecture.

    Args:
        arch: the architecture.
        settings: settings that differ from its defaults.
        tiers: the shapes to export; the first of equal ones counts.
        recipe: what a training step does.
        out: folder of all artifact sets; made if it is not there.
        formats: ``onnx`` is always written; ``ort-training`` beside it, where the runtime has the gradients: if not,
            report and manifest say so under ``skipped``.
        seed: of the initial weights and of the random batches of the checks.
        progress: called before each stage, and once at the end.
        heads: number of labels of tiers that have a head of their own.

    Returns:
        One report per tier, in order.

    Raises:
        ConfigError: no tier, a format that does not exist, or a head for a tier that is not exported.
        PlanError: the model cannot have one of the tiers or heads.
        ExportError: an operator cannot be exported, or a graph does not agree with PyTorch; nothing is published.
        StorageError: a file cannot be written; what was published before is still there.
    """
    wanted = list(dict.fromkeys(tiers))
    unknown = [item for item in formats if item not in FORMATS]
    if not wanted or unknown:
        wrong = f"unknown format {unknown[0]!r}; there are {', '.join(FORMATS)}" if unknown else "no tier to export"
        raise ConfigError(f"{arch.name}: {wrong}")
    layout = infer_layout(arch, settings)
    for tier in wanted:
        layout.tier(tier.width, tier.depth)
    if heads:
        stray = next((tier for tier in heads if tier not in wanted), None)
        if stray is not None:
            raise ConfigError(f"{arch.name}: tier {stray.id} shall have a head of its own but is not exported")
        layout = replace(layout, heads={tier.id: classes for tier, classes in heads.items()})
    export = Export(arch, layout, recipe, tuple(formats), seed, Counter(progress, len(wanted) * (1 + 2 * len(formats))))
    try:
        with calm_torch(), replacing(out / arch.name) as folder:
            write_file(folder / "layout.json", out, layout.to_json().encode())
            write_file(folder / "init.safetensors", out, encode_weights(initial_weights(arch, settings, seed)))
            reports = [_export_tier(export, tier, folder / tier.id, out) for tier in wanted]
    except OSError as error:
        raise StorageError(
            f"{arch.name} cannot be written to {out}: {error}; what was published before is unchanged"
        ) from error
    export.counter.finish()
    return tuple(reports)


class Counter:
    """Counts stages for a progress bar."""

    def __init__(self, report: Callable[[Progress], None] | None, total: int) -> None:
        self._report, self._total, self._done, self._tier = report, total, 0, ""

    def start(self, tier: str, stage: str) -> None:
        """Say that a stage starts."""
        self._tier = tier
        if self._report is not None:
            self._report(Progress(tier, stage, self._done, self._total))
        self._done += 1

    def finish(self) -> None:
        """Say that all is done."""
        if self._report is not None:
            self._report(Progress(self._tier, "done", self._total, self._total))


@dataclass(frozen=True)
class Export:
    """What an export is about.

    Attributes:
        arch: the architecture.
        layout: of its global model.
        recipe: what a training step does.
        formats: what is written.
        seed: of the weights and batches of the checks.
        counter: counts stages.
    """

    arch: Architecture
    layout: Layout
    recipe: Recipe
    formats: tuple[Format, ...] = ("onnx",)
    seed: int = 0
    counter: Counter = field(default_factory=lambda: Counter(None, 0))

    @property
    def signature(self) -> Signature:
        """What the model takes and returns, but for the shape of its labels."""
        return Signature(self.layout.input_shape, self.layout.input_dtype, self.layout.classes)

    def settings(self, tier: Tier) -> Mapping[str, Any]:
        """The settings that a tier is built with: the model's, with the labels of a head of its own."""
        own = tier.id in self.layout.heads
        return {**self.layout.settings, "classes": self.layout.classes_of(tier)} if own else self.layout.settings

    def head(self, tier: Tier) -> dict[str, NDArray[np.float32]]:
        """The initial weights of a tier's own head; empty if it has none.

        Raises:
            ConfigError: the model's setting ``classes`` is not the number of its labels.
        """
        own, shapes = self.layout.own_head(tier), self.layout.shapes(tier)
        drawn = initial_weights(self.arch, self.settings(tier), self.seed) if own else {}
        head = {item.name: drawn[item.name] for item in own}
        for name, value in head.items():
            if value.shape != shapes[name]:
                raise ConfigError(
                    f"{self.arch.name}: with classes = {self.layout.classes_of(tier)} the parameter {name} is"
                    f" {value.shape}, not {shapes[name]}; a head of a tier's own needs `classes` to be its labels"
                )
        return head

    def module(self, tier: Tier) -> nn.Module:
        """The sub-model with weights that hide nothing: a norm with scale 1 and shift 0 would hide a lost parameter."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module: nn.Module = build(self.arch, tier, settings=self.settings(tier))
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.dim() < 2:
                        parameter.add_(0.1 * torch.randn_like(parameter))
        return module


def _export_tier(export: Export, tier: Tier, folder: Path, out: Path) -> TierReport:
    head = export.head(tier)
    module, recipe = export.module(tier), export.recipe
    signature = replace(export.signature, classes=export.layout.classes_of(tier)).with_labels_of(module)
    batches = SizedBatches(signature, vocabulary_of(module), seed=export.seed)
    export.counter.start(tier.id, "tracing")
    graphs = portable.write_graphs(module, signature, recipe)
    export.counter.start(tier.id, "checking against PyTorch")
    checks = list(portable.check_graphs(graphs, module, recipe, batches))
    files: list[SetFile] = list(graphs)
    skipped: dict[str, str] = {}
    if "ort-training" in export.formats:
        export.counter.start(tier.id, "writing onnxruntime-training artifacts")
        try:
            training = ort_training.write_artifacts(module, signature, recipe)
        except MissingGradientError as error:
            training, skipped["ort-training"] = (), str(error)
        export.counter.start(tier.id, "checking onnxruntime-training artifacts")
        if training:
            checks += ort_training.check_artifacts(training, module, recipe, batches)
        files += training
    export.counter.start(tier.id, "writing")
    footprint = Footprint(
        export.layout.parameter_count(tier), *count_flops(module, signature), peak_memory(graphs[0].model)
    )
    for file in files:
        write_file(folder / file.path, out, file.data)
    if head:
        write_file(folder / "head.safetensors", out, encode_weights(head))
    noise = tuple(NoiseSpec(name=path, shape=shape) for path, shape in model_noise(module, signature).items())
    facts = Facts(signature.label_shape, noise, tuple(checks), footprint, skipped)
    manifest = manifest_of(export, tier, files, facts)
    write_file(folder / "manifest.json", out, manifest.to_bytes())
    return TierReport(
        tier,
        footprint.parameters,
        footprint.flops_per_sample,
        sum(len(file.data) for file in files if file.is_graph),
        footprint.peak_memory_bytes,
        max(check.worst_relative for check in checks),
        skipped,
    )


# -- manifest ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What was found out about a sub-model by running it.

    Attributes:
        label_shape: of one sample.
        noise: layers that draw in training.
        checks: comparisons with PyTorch.
        footprint: costs.
        skipped: formats it cannot have, with the reason.
    """

    label_shape: tuple[int, ...]
    noise: tuple[NoiseSpec, ...]
    checks: tuple[CheckSpec, ...]
    footprint: Footprint
    skipped: Mapping[str, str] = field(default_factory=dict)


def manifest_of(export: Export, tier: Tier, files: Sequence[SetFile], facts: Facts) -> Manifest:
    """The manifest of a sub-model's files.

    Args:
        export: what is exported.
        tier: the sub-model's shape.
        files: of the set.
        facts: what is known of the sub-model.
    """
    layout = export.layout
    parameters = _parameter_specs(layout, tier)
    return Manifest(
        arch=export.arch.name,
        settings=json.loads(replace(layout, settings=export.settings(tier)).to_json())["settings"],
        tier=tier.id,
        width=tier.width,
        depth=tier.depth,
        classes=layout.classes_of(tier),
        input_shape=layout.input_shape,
        input_dtype=layout.input_dtype,
        label_shape=facts.label_shape,
        recipe=export.recipe.spec(),
        parameters=parameters,
        states=tuple(StateSpec(name=p.name, shape=p.shape) for p in parameters if export.recipe.has_state),
        states_in_place=all(
            states_in_place(onnx.load_model_from_string(file.data)) for file in files if file.key in _STEP_GRAPHS
        ),
        statistics=tuple(
            StatisticSpec(
                name=item.name, channels=layout.local_shape(item.dims, tier.width)[0], axis=_axis_text(item.dims[0])
            )
            for item in layout.statistics
            if item.block in layout.blocks(tier)
        ),
        graphs={file.key: graph_spec(file) for file in files if file.is_graph},
        files={file.key: FileSpec(**content_of(file)) for file in files if not file.is_graph},
        noise=facts.noise,
        flops_per_sample=facts.footprint.flops_per_sample,
        flops_per_step_sample=facts.footprint.flops_per_step_sample,
        peak_memory_bytes=facts.footprint.peak_memory_bytes,
        checks=facts.checks,
        skipped=facts.skipped,
        versions=versions(),
    )


def _parameter_specs(layout: Layout, tier: Tier) -> tuple[ParameterSpec, ...]:
    specs, offset = [], 0
    shapes = layout.shapes(tier)
    for item in layout.kept(tier):
        axes = tuple(_axis_text(dim) for dim in item.dims)
        spec = ParameterSpec(name=item.name, shape=shapes[item.name], axes=axes, block=item.block, offset=offset)
        specs.append(spec)
        offset += spec.nbytes
    return tuple(specs)


def _axis_text(dim: Dim) -> str:
    return dim.axis if dim.inner == 1 else f"{dim.axis}*{dim.inner}"


def content_of(file: SetFile) -> dict[str, Any]:
    """Where a file lies, and its content's name and size."""
    return {"path": file.path, "digest": digest_of(file.data), "size": len(file.data)}


def graph_spec(file: SetFile) -> GraphSpec:
    """A graph as a manifest states it."""
    inputs, outputs = (
        tuple(TensorSpec(name=p.name, dtype=p.dtype, shape=p.shape) for p in ports)  # type: ignore[arg-type]
        for ports in (file.inputs, file.outputs)
    )
    return GraphSpec(**content_of(file), inputs=inputs, outputs=outputs)


def versions() -> dict[str, str]:
    """The packages that had a part in an export."""
    found = {"python": sys.version.split()[0]}
    for name in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
