"""Exports pairs of models that are trained in one graph: their step, and their evaluation.

    <out>/<name>/<sent tier>+<own tier>/manifest.json             a `PairManifest`
    <out>/<name>/<sent tier>+<own tier>/<routine>.onnx            the step
    <out>/<name>/<sent tier>+<own tier>/own-init.safetensors initial weights of the personal model
    <out>/<name>/<sent tier>+<own tier>/adaptor-init.safetensors the same of an adaptor, if any
    <out>/<name>/<sent tier>+<own tier>/{sent,own}/*.onnx eval, infer, stats

``<name>`` is ``<sent arch>+<own arch>`` by default. `trainer_export.artifact_set` exports the sent
model's ordinary set (layout, initial weights); the two are compatible if arch, settings and tier
agree. With an adaptor, only the other parameters need to agree (specification 5.4). After the last
check, one rename publishes all pairs of a name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.manifest import FileSpec, Manifest
from fleet_protocol.pair_manifest import AdaptorSpec, PairManifest, Side
from fleet_protocol.weights import encode_weights
from models.architecture import Architecture, build
from models.parts import parameters_in
from models.registry import infer_layout
from models.tier import Tier
from models.zoo.randomized_model import vocabulary_of
from trainer_export.batches import SizedBatches
from trainer_export.check import calm_torch
from trainer_export.exported import Export
from trainer_export.footprint import Footprint, count_flops, peak_memory
from trainer_export.formats.files import SetFile
from trainer_export.formats.onnx import check_graphs, write_forward_graphs, write_trace
from trainer_export.manifests import (
    SubModelFacts,
    content_of,
    graph_spec,
    manifest_of,
    versions,
)
from trainer_export.model_inputs import Signature, model_noise
from trainer_export.pair_check import check_pair
from trainer_export.pair_step import PairRoutine, pair_routine, trace_pair
from trainer_export.progress import Counter, Progress
from trainer_export.publishing import replacing, write_file
from trainer_export.recipe import Recipe
from trainer_export.torch_version import require_known_torch

_STAGES = 4  # of one pair: tracing and checking the step, and the forward graphs of both models


@dataclass(frozen=True)
class PairModel:
    """One of the two models of a pair, with its settings that differ from the defaults."""

    arch: Architecture
    tier: Tier
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Two models that are trained on the same batch.

    Attributes:
        sent: the copy of the global model or, with an adaptor, of its shared part.
        own: the model that stays on the device.
        adaptor: parts of the sent model that are initialised and stay on the device
            (`models.parts`); usually ``head``.
        routine: the training routine; None if there is only one for pairs.
    """

    sent: PairModel
    own: PairModel
    adaptor: tuple[str, ...] = ()
    routine: str | None = None

    @property
    def folder(self) -> str:
        """Return the name of the pair's folder."""
        return f"{self.sent.tier.id}+{self.own.tier.id}"

    @property
    def models(self) -> tuple[tuple[Side, PairModel], ...]:
        """Return both models by side, in the order of `SIDES`."""
        return ("own", self.own), ("sent", self.sent)


@dataclass(frozen=True)
class PairReport:
    """The result of one pair.

    Attributes:
        worst_deviation: largest deviation from PyTorch of any of its graphs, relative to the
            tensor's largest value.
    """

    folder: Path
    manifest: PairManifest
    worst_deviation: float

    @classmethod
    def from_manifest(
        cls,
        folder: Path,
        manifest: PairManifest,
    ) -> "PairReport":
        """Return the report of a pair from its manifest."""
        checks = (*manifest.checks, *manifest.own.checks, *manifest.sent.checks)
        return cls(folder, manifest, max(check.worst_relative for check in checks))


def export_pairs(  # noqa: PLR0913  (options by keyword)
    pairs: Sequence[Pair],
    recipe: Recipe,
    out: Path,
    *,
    name: str = "",
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[PairReport, ...]:
    """Export, check and publish some pairs.

    Args:
        pairs: the pairs; all are published together under one name.
        recipe: the optimizer of both models.
        out: folder of all artifact sets; created if it is missing.
        name: name of the subfolder; if empty, it is built from the architectures, which must then
            be the same in all pairs.
        seed: seed of the initial weights of personal models and adaptors, and of the random batches
            of the checks.
        progress: called before each stage and once at the end.

    Returns:
        One report per pair, in order.

    Raises:
        ConfigError: no pair, pairs that need a name or share a folder, an unknown routine, a recipe
            with a proximal term or its own loss, models with different samples or labels, or an
            adaptor that leaves nothing to share.
        PlanError: a model does not support its tier, or the sent model lacks a part of its adaptor.
        ExportError: an operator cannot be exported, or a graph differs from PyTorch; nothing is
            published.
        StorageError: a file cannot be written; the previously published set is unchanged.
    """
    require_known_torch()
    title = _name_of(pairs, name)
    counter = Counter(progress, len(pairs) * _STAGES)
    manifests = []
    try:
        # All pairs or none: boards of one fleet must find sets that were exported together.
        with calm_torch(), replacing(out / title) as fresh:
            for pair in pairs:
                prepared = _prepare(pair, recipe, seed, counter)
                manifests.append(_export_pair(prepared, fresh / pair.folder))
    except OSError as error:
        raise StorageError(
            f"cannot write {title} to {out}: {error}; the previously published set is unchanged"
        ) from error
    counter.finish()
    reports = []
    for pair, manifest in zip(pairs, manifests, strict=True):
        reports.append(PairReport.from_manifest(out / title / pair.folder, manifest))
    return tuple(reports)


def _name_of(pairs: Sequence[Pair], name: str) -> str:
    """Return the common name of all pairs; each pair has its own subfolder there."""
    if not pairs:
        raise ConfigError(
            "no pair is requested; give pairs of different tiers, and one `name` for each export"
        )
    # One folder for all, which one rename publishes.
    names: list[str] = []
    for pair in pairs:
        folder = name or f"{pair.sent.arch.name}+{pair.own.arch.name}"
        if folder not in names:
            names.append(folder)
    folders = [pair.folder for pair in pairs]
    if len(names) != 1 or len(set(folders)) != len(folders):
        raise ConfigError(
            f"pairs {', '.join(names)} in folders {', '.join(folders)}; give pairs of different"
            " tiers, and one `name` for each export"
        )
    return names[0]


@dataclass(frozen=True)
class _Prepared:
    """A validated pair."""

    pair: Pair
    routine: PairRoutine
    exports: Mapping[Side, Export]
    modules: Mapping[Side, nn.Module]
    batches: SizedBatches

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        """The modules in the order of `SIDES`."""
        return self.modules["own"], self.modules["sent"]


def _prepare(
    pair: Pair,
    recipe: Recipe,
    seed: int,
    counter: Counter,
) -> _Prepared:
    """Build both models of a pair, and refuse models with different samples or labels."""
    exports = {}
    for side, model in pair.models:
        exports[side] = _export(model, recipe, seed, counter)
    modules = {}
    for side, model in pair.models:
        modules[side] = exports[side].module(model.tier)
    signatures = {}
    for side, model in pair.models:
        signatures[side] = exports[side].signature_of(model.tier, modules[side])
    signature = signatures["sent"]
    # Both models of a board read one batch, so one set of inputs must do for both.
    if signatures["own"] != signature:
        raise ConfigError(
            f"the sent model {pair.sent.arch.name} takes {_words(signature)}, but the personal"
            f" model {pair.own.arch.name} takes {_words(signatures['own'])}; both need the same"
            " samples and labels"
        )
    # Both models must know the tokens of the checks.
    vocabulary = min(vocabulary_of(module) for module in modules.values())
    batches = SizedBatches(signature, vocabulary, seed=seed)
    return _Prepared(pair, pair_routine(pair.routine), exports, modules, batches)


def _export_pair(prepared: _Prepared, folder: Path) -> PairManifest:
    """Trace, check and write a pair."""
    pair = prepared.pair
    # Recipe, seed and counter are the same in both exports; the own one stands for them.
    own = prepared.exports["own"]
    batches = prepared.batches
    report = own.counter.start
    adaptor = _adaptor(pair, prepared.exports["sent"])
    report(pair.folder, "tracing the joint step")
    step = write_trace(trace_pair(prepared.routine, prepared.both, batches.signature, own.recipe))
    # A step that disagrees is found before anything else of the pair is traced.
    report(pair.folder, "checking it against PyTorch")
    check = check_pair(step.data, prepared.routine, prepared.both, own.recipe, batches)
    files: list[SetFile] = [step]
    manifests: dict[Side, Manifest] = {}
    for side, _ in pair.models:
        report(pair.folder, f"tracing and checking the forward graphs of the {side} model")
        manifests[side], forward_files = _forward_set(prepared, side)
        files += forward_files
    own_start = _own_start(pair.own, own.seed)
    adaptor_start = _adaptor_start(pair.sent, own.seed, adaptor)
    files.append(own_start)
    adaptor_spec = None
    if adaptor_start is not None:
        files.append(adaptor_start)
        adaptor_spec = AdaptorSpec(**content_of(adaptor_start), parameters=adaptor)
    for file in files:
        write_file(folder / file.path, file.data)
    # Last, after every file that it names: whoever finds a manifest finds a whole pair.
    manifest = PairManifest(
        routine=prepared.routine.name,
        own=manifests["own"],
        sent=manifests["sent"],
        graph=graph_spec(step),
        own_init=FileSpec(**content_of(own_start)),
        adaptor=adaptor_spec,
        peak_memory_bytes=peak_memory(step.model),
        checks=(check,),
        versions=versions(),
    )
    write_file(folder / "manifest.json", manifest.to_bytes())
    return manifest


def _own_start(model: PairModel, seed: int) -> SetFile:
    """Return the file of the initial weights of a personal model."""
    return SetFile("own/init", "own-init.safetensors", encode_weights(_first_weights(model, seed)))


def _adaptor_start(
    model: PairModel,
    seed: int,
    adaptor: Sequence[str],
) -> SetFile | None:
    """Return the file of the initial weights of an adaptor, if there is one."""
    if not adaptor:
        return None
    weights = _first_weights(model, seed)
    data = encode_weights({name: weights[name] for name in adaptor})
    return SetFile("sent/adaptor", "adaptor-init.safetensors", data)


def _adaptor(pair: Pair, sent: Export) -> tuple[str, ...]:
    """Return names of the parameters of the sent model that stay on the device."""
    # Found in the whole model, since the names of parts are those of the global layout, and then
    # cut down to the tier.
    chosen = parameters_in(sent.layout, pair.adaptor)
    kept = []
    for parameter in sent.layout.kept(pair.sent.tier):
        kept.append(parameter.name)
    if chosen and set(kept) <= set(chosen):
        raise ConfigError(
            f"the adaptor {', '.join(pair.adaptor)} covers all of {pair.sent.arch.name}, so"
            " nothing would be shared with the fleet; name fewer parts"
        )
    return tuple(name for name in kept if name in chosen)


def _export(
    model: PairModel,
    recipe: Recipe,
    seed: int,
    counter: Counter,
) -> Export:
    layout = infer_layout(model.arch, model.settings)
    # Raises for a tier that the model does not support.
    layout.tier(model.tier.width, model.tier.depth)
    return Export(model.arch, layout, recipe, seed, counter)


def _forward_set(prepared: _Prepared, side: Side) -> tuple[Manifest, list[SetFile]]:
    """Return the evaluation graphs of one model, in a folder with the name of its side."""
    export = prepared.exports[side]
    module = prepared.modules[side]
    tier = dict(prepared.pair.models)[side].tier
    signature = prepared.batches.signature
    graphs = write_forward_graphs(module, signature, export.recipe)
    checks = check_graphs(graphs, module, export.recipe, prepared.batches)
    files: list[SetFile] = []
    for graph in graphs:
        # Both models have graphs of the same names.
        files.append(replace(graph, path=f"{side}/{graph.path}"))
    footprint = Footprint(
        export.layout.parameter_count(tier),
        *count_flops(module, signature),
        peak_memory(graphs[0].model),
    )
    facts = SubModelFacts(signature, model_noise(module, signature), checks, footprint)
    return manifest_of(export, tier, files, facts), files


def _first_weights(model: PairModel, seed: int) -> dict[str, NDArray[Any]]:
    """Return new random weights in a model's shapes; different seeds share no weights.

    They differ from the weights that `artifact_set` draws from the same seed. Otherwise a personal
    model of the fleet's architecture would start equal to the sent model, and two equal models
    cannot learn from each other.
    """
    with torch.random.fork_rng(devices=[]):
        sequence = np.random.SeedSequence([seed], spawn_key=(1,))
        torch.manual_seed(int(sequence.generate_state(1)[0]))
        module: nn.Module = build(model.arch, model.tier, settings=model.settings)
    weights = {}
    for name, value in module.named_parameters():
        weights[name] = value.detach().numpy()
    return weights


def _words(signature: Signature) -> str:
    samples = f"{signature.input_dtype} {list(signature.input_shape)}"
    places = f" {list(signature.places)}" if signature.places else ""
    return f"{samples} for {signature.classes} labels{places}"
