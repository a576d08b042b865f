"""Exports a pair of models for mutual learning: the mutual step, and what evaluates each of the two.

    <out>/<name>/<meme tier>+<personal tier>/manifest.json             a `MutualManifest`
    <out>/<name>/<meme tier>+<personal tier>/mutual.onnx               the step
    <out>/<name>/<meme tier>+<personal tier>/personal-init.safetensors what the personal model starts from
    <out>/<name>/<meme tier>+<personal tier>/adaptor-init.safetensors  what the meme's own part starts from, if any
    <out>/<name>/<meme tier>+<personal tier>/{meme,personal}/*.onnx    eval, infer, stats

``<name>`` is ``<meme arch>+<personal arch>`` if nothing else is said. The meme's ordinary set (layout, first weights)
is exported by `trainer_export.artifact_set`; the two agree where arch, settings and tier do. A meme with an adaptor
needs to agree in its other parameters alone (METHODS 5.4). A set takes its place by a rename after its last check, with
all pairs of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.manifest import FileSpec, Manifest, NoiseSpec
from fleet_protocol.mutual_manifest import AdaptorSpec, MutualManifest, Side
from fleet_protocol.weights import encode_weights
from models.parts import parameters_in
from models.registry import Architecture, build, infer_layout
from models.tier import Tier
from trainer_export.artifact_set import (
    Counter,
    Export,
    Facts,
    Progress,
    content_of,
    graph_spec,
    manifest_of,
    versions,
)
from trainer_export.check import SizedBatches, calm_torch, vocabulary_of
from trainer_export.check_mutual import check_mutual
from trainer_export.footprint import Footprint, count_flops, peak_memory
from trainer_export.formats.files import SetFile
from trainer_export.formats.onnx import check_graphs, write_forward_graphs, written
from trainer_export.model_ports import Signature, model_noise
from trainer_export.publishing import replacing, write_file
from trainer_export.recipe import Recipe
from trainer_export.trace_mutual import trace_mutual

__all__ = ["MutualModel", "MutualPair", "MutualReport", "export_mutual"]

_STAGES = 4  # of one pair: the step traced and checked, the forward graphs of each model


@dataclass(frozen=True)
class MutualModel:
    """One of the two models of a pair.

    Attributes:
        arch: the architecture.
        tier: the shape.
        settings: settings that differ from the architecture's defaults.
    """

    arch: Architecture
    tier: Tier
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MutualPair:
    """A meme and a personal model.

    Attributes:
        meme: the copy of the global model, or of its shared part with an adaptor.
        personal: the model that stays on the device.
        adaptor: parts of the meme that stay on the device and start there (`models.parts`); usually ``head``.
    """

    meme: MutualModel
    personal: MutualModel
    adaptor: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Name of the pair's folder."""
        return f"{self.meme.tier.id}+{self.personal.tier.id}"


@dataclass(frozen=True)
class MutualReport:
    """The result of one pair.

    Attributes:
        folder: where the set lies.
        manifest: what it holds.
        worst_deviation: largest deviation from PyTorch of any of its graphs, relative to the tensor's largest value.
    """

    folder: Path
    manifest: MutualManifest
    worst_deviation: float


def export_mutual(
    pairs: Sequence[MutualPair],
    recipe: Recipe,
    out: Path,
    *,
    name: str = "",
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[MutualReport, ...]:
    """Export, check and publish the mutual sets of some pairs.

    Args:
        pairs: meme and personal model; all of them are published together under one name.
        recipe: the optimizer of both models.
        out: folder of all artifact sets; made if it is not there.
        name: of the folder under it; from the architectures if empty, which must then be the same in all pairs.
        seed: of the personal models' and adaptors' first weights and of the random batches of the checks.
        progress: called before each stage, and once at the end.

    Returns:
        One report per pair, in order.

    Raises:
        ConfigError: no pair, pairs that need a name or share a folder, a proximal recipe, models of which one takes
            other samples or labels than the other, or an adaptor that leaves nothing to share.
        PlanError: a model cannot have its tier, or the meme lacks a part of its adaptor.
        ExportError: an operator cannot be exported, or a graph does not agree with PyTorch; nothing is published.
        StorageError: a file cannot be written; what was published before is still there.
    """
    names = list(dict.fromkeys(name or f"{p.meme.arch.name}+{p.personal.arch.name}" for p in pairs))
    folders = [pair.folder for pair in pairs]
    if len(names) != 1 or len(set(folders)) != len(folders):
        what = "no pair to export" if not pairs else f"pairs {', '.join(names)} in folders {', '.join(folders)}"
        raise ConfigError(f"mutual learning: {what}; give pairs of different tiers, one `name` for each export")
    counter = Counter(progress, len(pairs) * _STAGES)
    try:
        with calm_torch(), replacing(out / names[0]) as fresh:
            made = [_export_pair(pair, recipe, fresh / pair.folder, out, seed, counter) for pair in pairs]
    except OSError as error:
        raise StorageError(
            f"{names[0]} cannot be written to {out}: {error}; what was published before is unchanged"
        ) from error
    counter.finish()
    return tuple(
        MutualReport(
            out / names[0] / pair.folder,
            manifest,
            max(c.worst_relative for c in (*manifest.checks, *manifest.personal.checks, *manifest.meme.checks)),
        )
        for pair, manifest in zip(pairs, made, strict=True)
    )


def _export_pair(
    pair: MutualPair, recipe: Recipe, folder: Path, out: Path, seed: int, counter: Counter
) -> MutualManifest:
    exports = {side: _export(model, recipe, seed) for side, model in _sides(pair)}
    adaptor = _adaptor(pair, exports["meme"])
    modules = {side: exports[side].module(model.tier) for side, model in _sides(pair)}
    signatures = {side: exports[side].signature.with_labels_of(modules[side]) for side in modules}
    signature = signatures["meme"]
    if signatures["personal"] != signature:
        raise ConfigError(
            f"mutual learning: the meme {pair.meme.arch.name} takes {_words(signature)}, the personal model "
            f"{pair.personal.arch.name} {_words(signatures['personal'])}; both must be made for the same samples and "
            "labels"
        )
    vocabulary = min(vocabulary_of(module) for module in modules.values())
    batches = SizedBatches(signature, vocabulary, seed=seed)
    counter.start(pair.folder, "tracing the mutual step")
    step = written(trace_mutual(modules["personal"], modules["meme"], signature, recipe))
    counter.start(pair.folder, "checking it against PyTorch")
    checks = (check_mutual(step.data, modules["personal"], modules["meme"], recipe, batches),)
    write_file(folder / step.path, out, step.data)
    manifests: dict[Side, Manifest] = {}
    for side, model in _sides(pair):
        counter.start(pair.folder, f"tracing and checking the {side} model's forward graphs")
        manifests[side], files = _forward_set(exports[side], model.tier, modules[side], signature, batches, side)
        for file in files:
            write_file(folder / file.path, out, file.data)
    first = SetFile("personal/init", "personal-init.safetensors", encode_weights(_first_weights(pair.personal, seed)))
    write_file(folder / first.path, out, first.data)
    own = None
    if adaptor:
        weights = _first_weights(pair.meme, seed)
        own = SetFile("meme/adaptor", "adaptor-init.safetensors", encode_weights({n: weights[n] for n in adaptor}))
        write_file(folder / own.path, out, own.data)
    manifest = MutualManifest(
        personal=manifests["personal"],
        meme=manifests["meme"],
        graph=graph_spec(step),
        personal_init=FileSpec(**content_of(first)),
        adaptor=None if own is None else AdaptorSpec(**content_of(own), parameters=adaptor),
        peak_memory_bytes=peak_memory(step.model),
        checks=checks,
        versions=versions(),
    )
    write_file(folder / "manifest.json", out, manifest.to_bytes())
    return manifest


def _adaptor(pair: MutualPair, meme: Export) -> tuple[str, ...]:
    """Names of the parameters of the meme that stay on the device."""
    chosen = parameters_in(meme.layout, pair.adaptor)
    kept = [item.name for item in meme.layout.kept(pair.meme.tier)]
    if chosen and set(kept) <= set(chosen):
        raise ConfigError(
            f"mutual learning: the adaptor {', '.join(pair.adaptor)} is all of {pair.meme.arch.name}, so nothing would"
            " be shared with the fleet; name fewer parts"
        )
    return tuple(name for name in kept if name in chosen)


def _sides(pair: MutualPair) -> tuple[tuple[Side, MutualModel], ...]:
    return ("personal", pair.personal), ("meme", pair.meme)


def _export(model: MutualModel, recipe: Recipe, seed: int) -> Export:
    layout = infer_layout(model.arch, model.settings)
    layout.tier(model.tier.width, model.tier.depth)
    return Export(model.arch, layout, recipe, seed=seed)


def _forward_set(
    export: Export, tier: Tier, module: nn.Module, signature: Signature, batches: SizedBatches, side: Side
) -> tuple[Manifest, list[SetFile]]:
    """What evaluates one of the models, below a folder with the name of its side."""
    graphs = write_forward_graphs(module, signature)
    checks = check_graphs(graphs, module, export.recipe, batches)
    files: list[SetFile] = [replace(graph, path=f"{side}/{graph.path}") for graph in graphs]
    noise = tuple(NoiseSpec(name=path, shape=shape) for path, shape in model_noise(module, signature).items())
    footprint = Footprint(
        export.layout.parameter_count(tier), *count_flops(module, signature), peak_memory(graphs[0].model)
    )
    return manifest_of(export, tier, files, Facts(signature.label_shape, noise, checks, footprint)), files


def _first_weights(model: MutualModel, seed: int) -> dict[str, NDArray[Any]]:
    """Fresh weights of a model's own shape; no two seeds share any.

    They are not those that `artifact_set` draws from the same seed: a personal model of the fleet's own architecture
    would start as the meme's twin, and two models that agree have nothing to teach each other.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.SeedSequence([seed], spawn_key=(1,)).generate_state(1)[0]))
        module: nn.Module = build(model.arch, model.tier, settings=model.settings)
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def _words(signature: Signature) -> str:
    labels = f" {list(signature.label_shape)}" if signature.label_shape else ""
    return f"{signature.input_dtype} {list(signature.input_shape)} for {signature.classes} labels{labels}"
