"""Exports an architecture for many tiers into a folder of content-addressed files, all of them checked or none.

    <out>/objects/<sha256[:2]>/<sha256>    every file by content
    <out>/<arch>/layout.json               axes of the global model
    <out>/<arch>/init.safetensors          initial global weights, in layout order
    <out>/<arch>/<tier>/base.safetensors   frozen tensors, where there are any: one file under many names
    <out>/<arch>/<tier>/manifest.json      what a device must know
    <out>/<arch>/<tier>/head.safetensors   initial weights of a head of the tier's own, where it has one
    <out>/<arch>/<tier>/*.onnx             the portable graphs, hard links into objects
    <out>/<arch>/<tier>/ort-training/*     the same for onnxruntime-training

A set is built in a folder beside the old one and takes its place by a rename after its last check, so a failed or
interrupted export leaves what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.manifest import BASE
from fleet_protocol.weights import encode_weights
from models.architecture import Architecture
from models.layout import Layout
from models.registry import infer_layout
from models.tier import Tier
from models.zoo.inference import initial_weights
from trainer_export.batches import SizedBatches, vocabulary_of
from trainer_export.check import calm_torch
from trainer_export.exported import Export
from trainer_export.footprint import Footprint, count_flops, peak_memory
from trainer_export.formats import onnx as portable
from trainer_export.formats import ort_training
from trainer_export.formats.files import SetFile
from trainer_export.formats.ort_training import UnavailableError
from trainer_export.loss import Answer
from trainer_export.manifests import Facts, manifest_of
from trainer_export.model_inputs import model_noise, prepared, require_one_output
from trainer_export.progress import Counter, Progress
from trainer_export.publishing import replacing, write_file
from trainer_export.recipe import Recipe

__all__ = ["FORMATS", "Format", "TierReport", "export_architecture", "installed_formats"]

Format = Literal["onnx", "ort-training"]
FORMATS: tuple[Format, ...] = ("onnx", "ort-training")


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
    formats: Sequence[Format] | None = None,
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
            report and manifest say so under ``skipped``. By default all of `installed_formats`.
        seed: of the initial weights and of the random batches of the checks.
        progress: called before each stage, and once at the end.
        heads: number of labels of tiers that have a head of their own.

    Returns:
        One report per tier, in order.

    Raises:
        ConfigError: no tier, a format that there is not or that is not installed, or a head for a tier that is not
            exported.
        PlanError: the model cannot have one of the tiers or heads.
        ExportError: an operator cannot be exported, or a graph does not agree with PyTorch; nothing is published.
        StorageError: a file cannot be written; what was published before is still there.
    """
    wanted = list(dict.fromkeys(tiers))
    chosen = installed_formats() if formats is None else tuple(formats)
    unknown = [item for item in chosen if item not in FORMATS]
    if not wanted or unknown:
        wrong = f"unknown format {unknown[0]!r}; there are {', '.join(FORMATS)}" if unknown else "no tier to export"
        raise ConfigError(f"{arch.name}: {wrong}")
    if not set(chosen) <= {"onnx", *installed_formats()}:
        raise ConfigError(f"{arch.name}: {ort_training.NOT_INSTALLED}")
    with calm_torch():
        layout = infer_layout(arch, settings)
    _refuse_uncut(layout, wanted)
    if heads:
        stray = next((tier for tier in heads if tier not in wanted), None)
        if stray is not None:
            raise ConfigError(f"{arch.name}: tier {stray.id} shall have a head of its own but is not exported")
        layout = replace(layout, heads={tier.id: classes for tier, classes in heads.items()})
    export = Export(arch, layout, recipe, seed, Counter(progress, len(wanted) * (1 + 2 * len(chosen))))
    try:
        with calm_torch(), replacing(out / arch.name) as folder:
            write_file(folder / "layout.json", out, layout.to_json().encode())
            weights = initial_weights(arch, settings, seed)
            frozen = {item.name: weights.pop(item.name) for item in layout.base}
            write_file(folder / "init.safetensors", out, encode_weights(weights))
            base = SetFile(BASE, "base.safetensors", encode_weights(frozen)) if frozen else None
            reports = [_export_tier(export, tier, chosen, base, folder / tier.id) for tier in wanted]
    except OSError as error:
        raise StorageError(
            f"{arch.name} cannot be written to {out}: {error}; what was published before is unchanged"
        ) from error
    export.counter.finish()
    return tuple(reports)


def _refuse_uncut(layout: Layout, tiers: Sequence[Tier]) -> None:
    """Refuse tiers that the model cannot have, and narrow ones where none is narrower than the whole."""
    whole = {tier: layout.shapes(layout.tier(1.0, tier.depth)) for tier in tiers}
    narrow = [tier for tier in tiers if tier.width < 1]
    if narrow and all(layout.shapes(tier) == whole[tier] for tier in narrow):
        raise ConfigError(
            f"{layout.arch}: nothing is cut in {', '.join(tier.id for tier in narrow)}, whose parameters are those of"
            " the whole model; ask for the sizes that shall shrink, cut.width(name, size), or export width 1 alone"
        )


def installed_formats() -> tuple[Format, ...]:
    """The formats that can be written here: ``onnx``, and ``ort-training`` beside onnxruntime-training."""
    return FORMATS if ort_training.is_installed() else ("onnx",)


def _try_out(module: nn.Module, recipe: Recipe, batches: SizedBatches) -> None:
    require_one_output(batches.signature, recipe.loss)
    with torch.no_grad():
        for x, y in batches.take(len(batches.sizes)):
            output = prepared(module, "statistics")(x)
            with torch.enable_grad():
                recipe.try_out(output, Answer(y, batches.mask()))


def _export_tier(
    export: Export, tier: Tier, formats: tuple[Format, ...], base: SetFile | None, folder: Path
) -> TierReport:
    head, out = export.head(tier), folder.parent.parent
    module, recipe = export.module(tier), export.recipe
    names = tuple(item.name for item in export.layout.base_of(tier))
    signature = replace(export.signature, classes=export.layout.classes_of(tier), base=names).with_places_of(module)
    flops = count_flops(module, signature)
    batches = SizedBatches(signature, vocabulary_of(module), seed=export.seed, loss=recipe.loss).sized_for(flops[1])
    _try_out(module, recipe, batches)
    export.counter.start(tier.id, "tracing")
    graphs = portable.write_graphs(module, signature, recipe)
    export.counter.start(tier.id, "checking against PyTorch")
    checks = list(portable.check_graphs(graphs, module, recipe, batches))
    files: list[SetFile] = [*graphs, *([] if base is None else [base])]
    skipped: dict[str, str] = {}
    if "ort-training" in formats:
        export.counter.start(tier.id, "writing onnxruntime-training artifacts")
        try:
            training = ort_training.write_artifacts(module, signature, recipe)
        except UnavailableError as error:
            training, skipped["ort-training"] = (), str(error)
        export.counter.start(tier.id, "checking onnxruntime-training artifacts")
        if training:
            checks += ort_training.check_artifacts(training, module, recipe, batches)
        files += training
    export.counter.start(tier.id, "writing")
    footprint = Footprint(export.layout.parameter_count(tier), *flops, peak_memory(graphs[0].model))
    for file in files:
        write_file(folder / file.path, out, file.data)
    if head:
        write_file(folder / "head.safetensors", out, encode_weights(head))
    facts = Facts(signature, model_noise(module, signature), tuple(checks), footprint, skipped)
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
