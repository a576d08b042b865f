"""Exports an architecture for many tiers into one folder, all of them checked or none.

Each file is stored by its content:

    <out>/objects/<sha256[:2]>/<sha256>    every file by content
    <out>/<arch>/layout.json               axes of the global model
    <out>/<arch>/init.safetensors          initial global weights, in layout order
    <out>/<arch>/<tier>/base.safetensors   frozen tensors, if any: one file for many, or a slice
    <out>/<arch>/<tier>/manifest.json      what a device must know
    <out>/<arch>/<tier>/head.safetensors   initial weights of a head of the tier's own, if any
    <out>/<arch>/<tier>/own_class.safetensors  how weights fit the user's class; not for boards
    <out>/<arch>/<tier>/*.onnx             the portable graphs, hard links into objects
    <out>/<arch>/<tier>/ort-training/*     the same for onnxruntime-training
    <out>/<arch>/<tier>/executorch/*.pte   train, eval and infer for Android, iOS and C++
    <out>/<arch>/<tier>/made-from.json     what they depend on; an unchanged tier is copied

A set is built in a folder beside the old one and takes its place by a rename after its last check,
so a failed or interrupted export leaves what was there, and nothing else.
"""

import contextlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError, PlanError, ShoalError, StorageError
from fleet_protocol.manifest import BASE, Manifest, parse_manifest
from fleet_protocol.weights import encode_weights
from models.architecture import Architecture
from models.layout import Layout
from models.plan import make_plan, slice_weights
from models.registry import infer_layout
from models.tier import Tier
from models.zoo.initial_state import further_names, initial_weights
from trainer_export.check import calm_torch
from trainer_export.exported import Export
from trainer_export.formats import executorch, ort_training
from trainer_export.formats.files import SetFile
from trainer_export.parallel import run_jobs
from trainer_export.progress import Counter, Progress
from trainer_export.publishing import replacing, write_file
from trainer_export.recipe import Recipe
from trainer_export.start import Start
from trainer_export.tier_set import Format, TierSets
from trainer_export.torch_version import require_known_torch

FORMATS: tuple[Format, ...] = ("onnx", "ort-training", "executorch")
_OPTIONAL = {"ort-training": ort_training, "executorch": executorch}
"""Formats that need a package of their own, and the modules that write them."""

UnaskedTiers = Literal["refuse", "add", "replace"]
"""What becomes of published tiers that are not asked for: an error, they stay, or they go."""


@dataclass(frozen=True)
class TierReport:
    """The result of one tier.

    Attributes:
        parameters: number of scalars.
        flops_per_sample: floating point operations of one forward pass of one sample.
        peak_memory_bytes: estimate for training at batch 32, beyond the runtime itself.
        worst_deviation: largest deviation from PyTorch of any of its graphs, relative to the
            tensor's largest value.
        skipped: formats that were asked for and that the model cannot have, each with the reason.
        taken: whether it was there already and would come out the same.
    """

    tier: Tier
    parameters: int
    flops_per_sample: int
    graph_bytes: int
    peak_memory_bytes: int
    worst_deviation: float
    skipped: Mapping[str, str] = field(default_factory=dict)
    taken: bool = False

    @classmethod
    def from_manifest(cls, tier: Tier, manifest: Manifest, *, taken: bool) -> "TierReport":
        """Return what a manifest says of its tier."""
        return cls(
            tier,
            manifest.parameter_count,
            manifest.flops_per_sample,
            sum(spec.size for spec in manifest.graphs.values()),
            manifest.peak_memory_bytes,
            max(check.worst_relative for check in manifest.checks),
            manifest.skipped,
            taken,
        )


@dataclass(frozen=True)
class _Selection:
    """The tiers of a new set.

    Attributes:
        tiers: all of them, those that stay from the published set at the end.
        heads: number of labels of tiers with a head of their own.
        published: tiers of the published set, whether they stay or not.
    """

    tiers: Sequence[Tier]
    heads: Mapping[Tier, int]
    published: Container[Tier]


# The public entry point: one keyword for each option of `shoal export`.
def export_architecture(  # noqa: PLR0913  (an argument for each thing that it needs)
    arch: Architecture,
    settings: Mapping[str, Any] | None,
    tiers: Sequence[Tier],
    recipe: Recipe,
    out: Path,
    formats: Sequence[Format] | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    heads: Mapping[Tier, int] | None = None,
    others: UnaskedTiers = "refuse",
    jobs: int | None = 1,
    start: Start | None = None,
) -> tuple[TierReport, ...]:
    """Export, check and publish the artifact sets of some tiers of one architecture.

    Args:
        arch: the architecture.
        settings: settings that differ from its defaults.
        tiers: the shapes to export; the first of equal ones counts.
        recipe: what a training step does.
        out: folder of all artifact sets; made if it is not there.
        formats: ``onnx`` is always written; ``ort-training`` beside it, where the runtime has the
            gradients: if not, report and manifest say so under ``skipped``, and so for
            ``executorch``. By default `installed_formats`.
        seed: of the initial weights and of the random batches of the checks.
        progress: called before each stage, and once at the end.
        heads: number of labels of tiers that have a head of their own.
        others: what becomes of tiers that are there and not asked for; those that stay are brought
            up to date.
        jobs: tiers at a time, each in a process of its own; 1 for one after the other in this, None
            for as many as cores and memory allow. The files are the same.
        start: what the global model starts from, frozen tensors included; by default it is drawn.

    Returns:
        One report per tier, in order, those that stay at the end.

    Raises:
        ConfigError: another PyTorch than those supported, no tier, an unknown format or one that
            is not installed, a head for a tier that is not exported, or tiers that would be
            dropped.
        PlanError: the model cannot have one of the tiers or heads.
        ExportError: an operator cannot be exported, or a graph does not agree with PyTorch; nothing
            is published.
        StorageError: a file cannot be written; what was published before is still there.
    """
    require_known_torch()
    wanted = list(dict.fromkeys(tiers))
    chosen = installed_formats() if formats is None else tuple(formats)
    _refuse_formats(arch, wanted, chosen)
    with calm_torch():
        layout = infer_layout(arch, settings)
    _refuse_uncut(layout, wanted)

    selection = _select_tiers(out / arch.name, wanted, heads or {}, others)
    layout = _with_heads(layout, selection.heads)
    export = Export(arch, layout, recipe, seed)
    try:
        with calm_torch(), replacing(out / arch.name) as folder:
            write_file(folder / "layout.json", layout.to_json().encode())
            bases = _write_weights(export, settings, start, selection.tiers, folder)
            sets = TierSets(export, chosen, bases, folder)
            reused = _reuse_published(sets, selection, out / arch.name)
            todo = []
            for tier in selection.tiers:
                if tier not in reused:
                    todo.append(sets.job(tier))
            # A tier is traced once, and each of its formats is written and checked.
            counter = Counter(progress, len(todo) * (1 + 2 * len(chosen)))
            run_jobs(todo, jobs, counter.start)
            # Read before the folder takes its name, so that a set without one is not published.
            manifests = []
            for tier in selection.tiers:
                manifests.append(_read_manifest(folder, tier))
    except OSError as error:
        raise StorageError(
            f"{arch.name} cannot be written to {out}: {error}; what was published before is"
            " unchanged"
        ) from error
    counter.finish()
    reports = []
    for tier, manifest in zip(selection.tiers, manifests, strict=True):
        reports.append(TierReport.from_manifest(tier, manifest, taken=tier in reused))
    return tuple(reports)


def _with_heads(layout: Layout, heads: Mapping[Tier, int]) -> Layout:
    """Return the layout with the numbers of labels of tiers that have a head of their own."""
    if not heads:
        return layout
    classes_by_tier = {}
    for tier, classes in heads.items():
        classes_by_tier[tier.id] = classes
    return replace(layout, heads=classes_by_tier)


def installed_formats() -> tuple[Format, ...]:
    """Return the formats written by default: ``onnx``, and ``ort-training`` if it is installed."""
    return ("onnx", "ort-training") if ort_training.is_installed() else ("onnx",)


def _refuse_formats(arch: Architecture, tiers: Sequence[Tier], formats: Sequence[str]) -> None:
    """Refuse a request without tiers, and formats that are unknown or not installed."""
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(
                f"{arch.name}: unknown format {name!r}; there are {', '.join(FORMATS)}"
            )
    if not tiers:
        raise ConfigError(f"{arch.name}: no tier to export")
    for name, writer in _OPTIONAL.items():
        if name in formats and not writer.is_installed():
            raise ConfigError(f"{arch.name}: {writer.NOT_INSTALLED}")


def _refuse_uncut(layout: Layout, tiers: Sequence[Tier]) -> None:
    """Refuse tiers that the model cannot have, and narrow ones if no width cuts anything."""
    # Whole first, for all tiers: a tier that the model cannot have is the error to report.
    whole = {}
    for tier in tiers:
        whole[tier] = _shapes(layout, layout.tier(1.0, tier.depth))
    narrow = []
    for tier in tiers:
        if tier.width < 1:
            narrow.append(tier)
    if narrow and all(_shapes(layout, tier) == whole[tier] for tier in narrow):
        raise ConfigError(
            f"{layout.arch}: nothing is cut in {_ids(narrow)}, whose parameters are those of the"
            " whole model; ask for the sizes that shall shrink, cut.width(name, size), or export"
            " width 1 alone"
        )


def _ids(tiers: Sequence[Tier]) -> str:
    return ", ".join(tier.id for tier in tiers)


def _shapes(layout: Layout, tier: Tier) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tier's tensors, frozen ones among them."""
    return {**layout.shapes(tier), **layout.base_of(tier)}


def _select_tiers(
    published: Path,
    wanted: Sequence[Tier],
    heads: Mapping[Tier, int],
    unasked: UnaskedTiers,
) -> _Selection:
    """Join the tiers that are asked for with those of the published set that stay.

    Args:
        published: folder of the published set; it need not exist.
        wanted: the tiers that are asked for.
        heads: number of labels of those with a head of their own.
        unasked: what becomes of published tiers that are not wanted.

    Raises:
        ConfigError: tiers would be dropped, or a head is for a tier that is not exported.
    """
    earlier = _published_tiers(published)
    unwanted = []
    for tier in earlier:
        if tier not in wanted:
            unwanted.append(tier)
    if unwanted and unasked == "refuse":
        raise ConfigError(
            f"{published.name} in {published.parent} has {_ids(unwanted)}, too, which a fleet may"
            " be using; --add keeps what is there beside what is new, --replace drops it"
        )
    tiers = list(wanted)
    own_heads = dict(heads)
    if unasked == "add":
        tiers += unwanted
        for tier in unwanted:
            classes = earlier[tier]
            if classes is not None:
                own_heads[tier] = classes
    for tier in own_heads:
        if tier not in tiers:
            raise ConfigError(
                f"{published.name}: tier {tier.id} shall have a head of its own but is not exported"
            )
    return _Selection(tiers, own_heads, earlier)


def _published_tiers(folder: Path) -> dict[Tier, int | None]:
    """Return the tiers of a set, each with the number of labels if it has a head of its own."""
    try:
        heads = Layout.from_json((folder / "layout.json").read_bytes()).heads
    except (OSError, ShoalError):
        heads = {}
    tiers: dict[Tier, int | None] = {}
    for path in sorted(folder.glob("*/manifest.json")):
        name = path.parent.name
        with contextlib.suppress(PlanError):  # a folder that is not named as a tier is none
            tiers[Tier.parse(name)] = heads.get(name)
    return tiers


def _write_weights(
    export: Export,
    settings: Mapping[str, Any] | None,
    start: Start | None,
    tiers: Sequence[Tier],
    folder: Path,
) -> dict[float, SetFile]:
    """Write the initial weights, and return the files of the frozen ones by width."""
    weights = initial_weights(export.arch, settings, export.seed)
    if start is not None:
        weights = start.put_into(weights, further_names(export.arch, settings))
    frozen = {}
    for tensor in export.layout.base:
        frozen[tensor.name] = weights.pop(tensor.name)
    bases = _bases(export.layout, frozen, tiers)
    write_file(folder / "init.safetensors", encode_weights(weights))
    return bases


def _bases(
    layout: Layout,
    frozen: Mapping[str, NDArray[np.float32]],
    tiers: Sequence[Tier],
) -> dict[float, SetFile]:
    """Return the file of the frozen tensors for each width.

    It is the same for all, encoded once, unless a width cuts one of the tensors.
    """
    if not frozen:
        return {}
    widths = dict.fromkeys(tier.width for tier in tiers)
    if layout.cut_base is None:
        return dict.fromkeys(widths, _base_file(frozen))
    # A plan slices parameters, so the frozen tensors take their place in a layout of their own.
    frozen_layout = replace(layout, parameters=layout.base, base=(), statistics=(), heads={})
    bases = {}
    for width in widths:
        plan = make_plan(frozen_layout, frozen_layout.tier(width))
        bases[width] = _base_file(slice_weights(frozen_layout, plan, frozen))
    return bases


def _base_file(tensors: Mapping[str, NDArray[np.float32]]) -> SetFile:
    """Return the file of frozen tensors."""
    return SetFile(BASE, "base.safetensors", encode_weights(tensors))


def _reuse_published(sets: TierSets, selection: _Selection, folder: Path) -> set[Tier]:
    """Copy the published tiers that would come out the same, and return them."""
    reused = set()
    for tier in selection.tiers:
        if tier in selection.published and sets.reuse(tier, folder / tier.id):
            reused.add(tier)
    return reused


def _read_manifest(folder: Path, tier: Tier) -> Manifest:
    """Return the manifest of a tier of a set."""
    return parse_manifest((folder / tier.id / "manifest.json").read_bytes())
