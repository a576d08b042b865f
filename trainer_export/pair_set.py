"""Exports pairs of models that are trained in one graph: the step of both, and what evaluates each
of the two.

    <out>/<name>/<sent tier>+<own tier>/manifest.json             a `PairManifest`
    <out>/<name>/<sent tier>+<own tier>/<routine>.onnx            the step
    <out>/<name>/<sent tier>+<own tier>/own-init.safetensors      what the device's own model starts from
    <out>/<name>/<sent tier>+<own tier>/adaptor-init.safetensors  what the sent model's own part starts from, if any
    <out>/<name>/<sent tier>+<own tier>/{sent,own}/*.onnx         eval, infer, stats

``<name>`` is ``<sent arch>+<own arch>`` if nothing else is said. The sent model's ordinary set
(layout, first weights) is exported by `trainer_export.artifact_set`; the two agree where arch,
settings and tier do. With an adaptor they need to agree in the other parameters alone
(specification 5.4). A pair takes its place by a rename after its last check, with all pairs of its
name.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.manifest import (
    CheckSpec,
    FileSpec,
    Manifest,
    next_name,
    noise_input,
    parameter_input,
    state_input,
)
from fleet_protocol.pair_manifest import (
    SIDES,
    AdaptorSpec,
    PairManifest,
    Side,
    loss_name,
    side_name,
)
from fleet_protocol.weights import encode_weights
from models.architecture import Architecture, build
from models.parts import parameters_in
from models.registry import infer_layout
from models.tier import Tier
from models.zoo.dropout import feed_noise
from models.zoo.layers import set_mode
from models.zoo.randomized_model import vocabulary_of
from trainer_export.batches import SizedBatches
from trainer_export.check import Worst, calm_torch, open_session, repeated, run_session
from trainer_export.exported import Export
from trainer_export.footprint import Footprint, count_flops, peak_memory
from trainer_export.formats.files import SetFile
from trainer_export.formats.onnx import check_graphs, write_forward_graphs, written
from trainer_export.manifests import (
    Facts,
    content_of,
    graph_spec,
    manifest_of,
    versions,
)
from trainer_export.model_inputs import Signature, model_noise
from trainer_export.pair_step import PairRoutine, pair_routine, trace_pair
from trainer_export.progress import Counter, Progress
from trainer_export.publishing import replacing, write_file
from trainer_export.recipe import Recipe
from trainer_export.reference import LEARNING_RATE, TorchOptimizer, in_float64

_STAGES = 4  # of one pair: the step traced and checked, the forward graphs of each model


def check_pair(
    model: bytes,
    routine: PairRoutine,
    modules: tuple[nn.Module, nn.Module],
    recipe: Recipe,
    batches: SizedBatches,
) -> CheckSpec:
    """Train both models with PyTorch, let the graph take each step from there, and compare losses
    and all tensors.

    The modules, the device's own and the one it was sent, are as their authors wrote them, and not
    changed. Returns the figures of the first run within the limit; an ExportError names the tensor
    that deviates in all.
    """
    session = open_session(model)
    shapes = [model_noise(module, batches.signature) for module in modules]

    def run(seeded: SizedBatches, exact: bool) -> CheckSpec:
        worst = Worst()
        reference = _Reference(routine, modules, recipe)
        for number, (x, y) in enumerate(seeded.take(seeded.steps)):
            worst.sizes.append(len(y))
            noise = [seeded.noise(shape, len(y), 2 * number + i) for i, shape in enumerate(shapes)]
            feed = {
                **reference.snapshot(),
                "x": x.numpy(),
                "y": y.numpy(),
                "lr": np.array(LEARNING_RATE, np.float32),
            }
            feed |= {knob.name: np.array(knob.checked_with, np.float32) for knob in routine.knobs}
            for side, drawn in zip(SIDES, noise, strict=True):
                feed |= {
                    noise_input(side_name(side, path)): numbers.numpy()
                    for path, numbers in drawn.items()
                }
            outputs = run_session(session, feed)
            twin = in_float64(reference, x, y, noise) if exact else None
            for side, loss in zip(SIDES, reference.step(x, y, noise), strict=True):
                worst.compare(outputs, {loss_name(side): loss})
            expected = reference.snapshot()
            true = twin.snapshot() if twin else None
            values = {name: outputs.pop(next_name(name)) for name in expected}
            for side in SIDES:
                for kind in (parameter_input(""), state_input("")):
                    part = [name for name in expected if name.startswith(side_name(side, kind))]
                    worst.compare(
                        values,
                        {n: expected[n] for n in part},
                        true and {n: true[n] for n in part},
                    )
        return worst.report(f"onnx/{routine.name}", seeded.steps)

    return repeated(run, batches)


class _Reference:
    """PyTorch training both modules, neither of which sees the other's new weights."""

    def __init__(
        self, routine: PairRoutine, modules: tuple[nn.Module, nn.Module], recipe: Recipe
    ) -> None:
        self._routine = routine
        self._modules = [set_mode(copy.deepcopy(module), "train") for module in modules]
        self._optimizers = [
            TorchOptimizer(recipe, module, underway=True) for module in self._modules
        ]

    def step(self, x: Tensor, y: Tensor, noise: list[dict[str, Tensor]]) -> list[NDArray[Any]]:
        """One step of both; returns the losses."""
        logits = []
        for module, drawn in zip(self._modules, noise, strict=True):
            feed_noise(module, drawn)
            logits.append(module(x))
        losses = []
        for position, (knob, optimizer) in enumerate(
            zip(self._routine.knobs, self._optimizers, strict=True)
        ):
            own = logits[position]
            other = logits[1 - position].detach()
            loss = self._routine.pytorch(own, other, y, knob.checked_with)
            losses.append(loss.detach().numpy())
            optimizer.step(loss, materialize=True)
        return losses

    def double(self) -> None:
        """Go on in float64."""
        for module, optimizer in zip(self._modules, self._optimizers, strict=True):
            module.double()
            optimizer.double()

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """All parameters and states by their names in the graph; the next step changes them."""
        values: dict[str, NDArray[Any]] = {}
        for side, module, optimizer in zip(SIDES, self._modules, self._optimizers, strict=True):
            named = {
                parameter_input(name): p.detach().numpy() for name, p in module.named_parameters()
            }
            named |= {state_input(name): value for name, value in optimizer.states().items()}
            values |= {side_name(side, name): value for name, value in named.items()}
        return values


@dataclass(frozen=True)
class PairModel:
    """One of the two models of a pair, with the settings that differ from its architecture's
    defaults.
    """

    arch: Architecture
    tier: Tier
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Two models that are trained on the same batch."""

    sent: PairModel  # the copy of the global model, or of its shared part with an adaptor
    own: PairModel  # the model that stays on the device
    # parts of the sent model that stay on the device and start there (`models.parts`); usually
    # ``head``
    adaptor: tuple[str, ...] = ()
    routine: str | None = None  # what trains them; None where there is but one for pairs

    @property
    def folder(self) -> str:
        """Name of the pair's folder."""
        return f"{self.sent.tier.id}+{self.own.tier.id}"

    @property
    def models(self) -> tuple[tuple[Side, PairModel], ...]:
        """Both by their side, in the order of `SIDES`."""
        return ("own", self.own), ("sent", self.sent)


@dataclass(frozen=True)
class PairReport:
    """The result of one pair."""

    folder: Path
    manifest: PairManifest
    # largest deviation from PyTorch of any of its graphs, relative to the tensor's largest value
    worst_deviation: float


def export_pairs(
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
        pairs: what to export; all of them are published together under one name.
        recipe: the optimizer of both models.
        out: folder of all artifact sets; made if it is not there.
        name: of the folder under it; from the architectures if empty, which must then be the same
            in all pairs.
        seed: of the first weights of own models and adaptors, and of the random batches of the
            checks.
        progress: called before each stage, and once at the end.

    Returns:
        One report per pair, in order.

    Raises:
        ConfigError: no pair, pairs that need a name or share a folder, a routine that there is not,
            a recipe with a proximal term or a loss of its own, models of which one takes other
            samples or labels than the other, or an adaptor that leaves nothing to share.
        PlanError: a model cannot have its tier, or the sent one lacks a part of its adaptor.
        ExportError: an operator cannot be exported, or a graph does not agree with PyTorch; nothing
            is published.
        StorageError: a file cannot be written; what was published before is still there.
    """
    names = list(dict.fromkeys(name or f"{p.sent.arch.name}+{p.own.arch.name}" for p in pairs))
    folders = [pair.folder for pair in pairs]
    if len(names) != 1 or len(set(folders)) != len(folders):
        what = (
            "no pair to export"
            if not pairs
            else f"pairs {', '.join(names)} in folders {', '.join(folders)}"
        )
        raise ConfigError(f"{what}; give pairs of different tiers, one `name` for each export")
    counter = Counter(progress, len(pairs) * _STAGES)
    try:
        with calm_torch(), replacing(out / names[0]) as fresh:
            made = [
                _export_pair(_prepared(pair, recipe, seed, counter), fresh / pair.folder)
                for pair in pairs
            ]
    except OSError as error:
        raise StorageError(
            f"{names[0]} cannot be written to {out}: {error}; what was published before is unchanged"
        ) from error
    counter.finish()
    return tuple(
        PairReport(
            out / names[0] / pair.folder,
            manifest,
            max(
                c.worst_relative
                for c in (*manifest.checks, *manifest.own.checks, *manifest.sent.checks)
            ),
        )
        for pair, manifest in zip(pairs, made, strict=True)
    )


@dataclass(frozen=True)
class _Prepared:
    """A pair that can be exported."""

    pair: Pair
    routine: PairRoutine
    exports: Mapping[Side, Export]
    modules: Mapping[Side, nn.Module]
    batches: SizedBatches

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        """The modules in the order of `SIDES`."""
        return self.modules["own"], self.modules["sent"]


def _prepared(pair: Pair, recipe: Recipe, seed: int, counter: Counter) -> _Prepared:
    exports = {side: _export(model, recipe, seed, counter) for side, model in pair.models}
    modules = {side: exports[side].module(model.tier) for side, model in pair.models}
    signatures = {
        side: exports[side].signature_of(model.tier, modules[side]) for side, model in pair.models
    }
    signature = signatures["sent"]
    if signatures["own"] != signature:
        raise ConfigError(
            f"the model that is sent, {pair.sent.arch.name}, takes {_words(signature)}, the device's own, "
            f"{pair.own.arch.name}, {_words(signatures['own'])}; both must be made for the same samples and labels"
        )
    vocabulary = min(vocabulary_of(module) for module in modules.values())
    return _Prepared(
        pair,
        pair_routine(pair.routine),
        exports,
        modules,
        SizedBatches(signature, vocabulary, seed=seed),
    )


def _export_pair(prepared: _Prepared, folder: Path) -> PairManifest:
    pair = prepared.pair
    exports = prepared.exports
    batches = prepared.batches
    recipe = exports["own"].recipe
    seed = exports["own"].seed
    start = exports["own"].counter.start
    adaptor = _adaptor(pair, exports["sent"])
    start(pair.folder, "tracing the step of both models")
    step = written(trace_pair(prepared.routine, prepared.both, batches.signature, recipe))
    start(pair.folder, "checking it against PyTorch")
    checks = (check_pair(step.data, prepared.routine, prepared.both, recipe, batches),)
    write_file(folder / step.path, step.data)
    manifests: dict[Side, Manifest] = {}
    for side, _ in pair.models:
        start(pair.folder, f"tracing and checking the forward graphs of the model {side}")
        manifests[side], files = _forward_set(prepared, side)
        for file in files:
            write_file(folder / file.path, file.data)
    first = SetFile(
        "own/init",
        "own-init.safetensors",
        encode_weights(_first_weights(pair.own, seed)),
    )
    write_file(folder / first.path, first.data)
    kept = None
    if adaptor:
        weights = _first_weights(pair.sent, seed)
        kept = SetFile(
            "sent/adaptor",
            "adaptor-init.safetensors",
            encode_weights({n: weights[n] for n in adaptor}),
        )
        write_file(folder / kept.path, kept.data)
    manifest = PairManifest(
        routine=prepared.routine.name,
        own=manifests["own"],
        sent=manifests["sent"],
        graph=graph_spec(step),
        own_init=FileSpec(**content_of(first)),
        adaptor=None if kept is None else AdaptorSpec(**content_of(kept), parameters=adaptor),
        peak_memory_bytes=peak_memory(step.model),
        checks=checks,
        versions=versions(),
    )
    write_file(folder / "manifest.json", manifest.to_bytes())
    return manifest


def _adaptor(pair: Pair, sent: Export) -> tuple[str, ...]:
    """Names of the parameters of the sent model that stay on the device."""
    chosen = parameters_in(sent.layout, pair.adaptor)
    kept = [item.name for item in sent.layout.kept(pair.sent.tier)]
    if chosen and set(kept) <= set(chosen):
        raise ConfigError(
            f"the adaptor {', '.join(pair.adaptor)} is all of {pair.sent.arch.name}, so nothing would"
            " be shared with the fleet; name fewer parts"
        )
    return tuple(name for name in kept if name in chosen)


def _export(model: PairModel, recipe: Recipe, seed: int, counter: Counter) -> Export:
    layout = infer_layout(model.arch, model.settings)
    layout.tier(model.tier.width, model.tier.depth)
    return Export(model.arch, layout, recipe, seed, counter)


def _forward_set(prepared: _Prepared, side: Side) -> tuple[Manifest, list[SetFile]]:
    """What evaluates one of the models, below a folder with the name of its side."""
    export = prepared.exports[side]
    module = prepared.modules[side]
    tier = dict(prepared.pair.models)[side].tier
    signature = prepared.batches.signature
    graphs = write_forward_graphs(module, signature, export.recipe)
    checks = check_graphs(graphs, module, export.recipe, prepared.batches)
    files: list[SetFile] = [replace(graph, path=f"{side}/{graph.path}") for graph in graphs]
    footprint = Footprint(
        export.layout.parameter_count(tier),
        *count_flops(module, signature),
        peak_memory(graphs[0].model),
    )
    return manifest_of(
        export,
        tier,
        files,
        Facts(signature, model_noise(module, signature), checks, footprint),
    ), files


def _first_weights(model: PairModel, seed: int) -> dict[str, NDArray[Any]]:
    """Fresh weights of a model's own shape; no two seeds share any.

    They are not those that `artifact_set` draws from the same seed: an own model of the fleet's
    architecture would start as the sent one's twin, and two models that agree have nothing to teach
    each other.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.SeedSequence([seed], spawn_key=(1,)).generate_state(1)[0]))
        module: nn.Module = build(model.arch, model.tier, settings=model.settings)
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def _words(signature: Signature) -> str:
    labels = f" {list(signature.places)}" if signature.places else ""
    return f"{signature.input_dtype} {list(signature.input_shape)} for {signature.classes} labels{labels}"
