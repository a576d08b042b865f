"""Exports an architecture for several tiers into one folder; publishes all tiers or none.

Each file is stored by its content:

    <out>/objects/<sha256[:2]>/<sha256>    every file by content
    <out>/<arch>/layout.json               axes of the global model
    <out>/<arch>/init.safetensors          initial global weights, in layout order
    <out>/<arch>/<tier>/base.safetensors   frozen tensors, if any: one file for many, or a slice
    <out>/<arch>/<tier>/manifest.json      what a device must know
    <out>/<arch>/<tier>/plan-*.json        the same with less memory and slower steps
    <out>/<arch>/<tier>/head.safetensors initial weights of the tier's own head, if any
    <out>/<arch>/<tier>/own_class.safetensors how weights fit the user's class; not for boards
    <out>/<arch>/<tier>/*.onnx the portable graphs, hard links into objects
    <out>/<arch>/<tier>/ort-training/* the same for onnxruntime-training
    <out>/<arch>/<tier>/executorch/*.pte train, eval and infer for Android, iOS and C++
    <out>/<arch>/<tier>/made-from.json what the files depend on; unchanged tiers are copied

A set is built in a folder beside the old one and replaces it by a rename after the last check. So a
failed or interrupted export changes nothing and leaves no files.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.manifest import BASE, parse_manifest
from fleet_protocol.memory_plans import PLAN_FILES
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
from trainer_export.packages.stored_names import current_names, merged_tensors
from trainer_export.parallel import run_jobs
from trainer_export.progress import Counter, Progress
from trainer_export.publishing import replacing, write_file
from trainer_export.recipe import Recipe
from trainer_export.start import InitialWeights
from trainer_export.tier_report import TierReport
from trainer_export.tier_selection import (
    TierSelection,
    UnaskedTiers,
    refuse_uncut_tiers,
    select_tiers,
    with_heads,
)
from trainer_export.tier_set import Format, TierSets
from trainer_export.torch_version import require_known_torch
from trainer_export.traced_program import warm_up

FORMATS: tuple[Format, ...] = ("onnx", "ort-training", "executorch")
_OPTIONAL = {"ort-training": ort_training, "executorch": executorch}
"""Formats that need an extra package, and the modules that write them."""


@dataclass(frozen=True)
class ExportRequest:
    """The model, tiers and recipe of an export.

    Attributes:
        arch: the architecture.
        settings: settings that differ from its defaults.
        tiers: the shapes to export; the first of equal ones counts.
        recipe: what a training step does.
        heads: number of labels of tiers that have a separate head.
        seed: seed of the initial weights and of the random batches of the checks.
        start: initial weights of the global model, including frozen tensors; None to draw them.
        layout: what `infer_layout` returns for the architecture and settings, for a caller that
            has it, so that it is not proved twice; None to infer it.
        memory: bounds of the peak memory of a training step in bytes, for batches of 32. A tier
            whose step exceeds a bound gets a further plan, which recomputes activations.
    """

    arch: Architecture
    settings: Mapping[str, Any] | None
    tiers: Sequence[Tier]
    recipe: Recipe
    heads: Mapping[Tier, int] = field(default_factory=dict)
    seed: int = 0
    start: InitialWeights | None = None
    layout: Layout | None = None
    memory: tuple[float, ...] = ()


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export that do not affect the content of a tier's files.

    Attributes:
        formats: formats to write, by default `installed_formats`. ``onnx`` is always written; if
            ``ort-training`` or ``executorch`` does not support the model, report and manifest give
            the reason under ``skipped``.
        others: treatment of published tiers that are not requested; tiers that stay are updated.
        jobs: number of tiers exported in parallel, each in its own process; 1 exports one after
            another in this process, None as many as cores and memory allow.
        progress: called before each stage, and once at the end.
    """

    formats: Sequence[Format] | None = None
    others: UnaskedTiers = "refuse"
    jobs: int | None = 1
    progress: Callable[[Progress], None] | None = None

    @property
    def written(self) -> tuple[Format, ...]:
        """Return the formats that are written."""
        return installed_formats() if self.formats is None else tuple(self.formats)


def export_architecture(
    request: ExportRequest, out: Path, options: ExportOptions | None = None
) -> tuple[TierReport, ...]:
    """Export, check and publish the artifact sets of some tiers of one architecture.

    Args:
        request: the model, tiers and recipe.
        out: folder of all artifact sets; created if it is missing.
        options: options; None for the defaults.

    Returns:
        One report per tier in order; kept tiers come last.

    Raises:
        ConfigError: an unsupported version of PyTorch, no tier, an unknown format or one that is
            not installed, a head for a tier that is not exported, or existing tiers that would be
            removed.
        PlanError: the model does not support one of the tiers or heads.
        ExportError: an operator cannot be exported, a graph differs from PyTorch, or a step needs
            more memory than it may; nothing is published.
        StorageError: a file cannot be written; the previously published set is unchanged.
    """
    require_known_torch()
    options = options or ExportOptions()
    arch = request.arch
    wanted = list(dict.fromkeys(request.tiers))
    _refuse_formats(arch, wanted, options.written)
    layout = request.layout
    if layout is None:
        with calm_torch():
            layout = infer_layout(arch, request.settings)
    refuse_uncut_tiers(layout, wanted)

    selection = select_tiers(out / arch.name, wanted, request.heads, options.others)
    # Heads change the shapes of a tier only, so they are added to the inferred layout.
    layout = with_heads(layout, selection.heads)
    export = Export(arch, layout, request.recipe, request.seed)
    try:
        # The folder takes the published name only if the block ends without an error.
        with calm_torch(), replacing(out / arch.name) as folder:
            write_file(folder / "layout.json", layout.to_json().encode())
            bases = _write_weights(export, request, selection.tiers, folder)
            sets = TierSets(export, options.written, bases, folder, request.memory)
            reused = _reuse_published(sets, selection, out / arch.name)
            todo = [sets.job(tier) for tier in selection.tiers if tier not in reused]
            # A tier is traced once, and each of its formats is written and checked.
            stages = 1 + 2 * len(options.written) + bool(request.memory)
            counter = Counter(options.progress, len(todo) * stages)
            run_jobs(todo, options.jobs, counter.start, prepare=warm_up)
            # Read before the folder takes its name, so that a set without one is not published.
            reports = _reports(folder, selection.tiers, reused)
    except OSError as error:
        raise StorageError(
            f"cannot write {arch.name} to {out}: {error}; the previously published set is unchanged"
        ) from error
    counter.finish()
    return reports


def installed_formats() -> tuple[Format, ...]:
    """Return the formats written by default: ``onnx``, and ``ort-training`` if it is installed."""
    return ("onnx", "ort-training") if ort_training.is_installed() else ("onnx",)


def _refuse_formats(
    arch: Architecture,
    tiers: Sequence[Tier],
    formats: Sequence[str],
) -> None:
    """Refuse a request without tiers, and formats that are unknown or not installed."""
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(
                f"{arch.name}: unknown format {name!r}; choose from {', '.join(FORMATS)}"
            )
    if not tiers:
        raise ConfigError(f"{arch.name}: no tier is requested; name at least one width and depth")
    for name, writer in _OPTIONAL.items():
        if name in formats and not writer.is_installed():
            raise ConfigError(f"{arch.name}: {writer.NOT_INSTALLED}")


def _write_weights(
    export: Export,
    request: ExportRequest,
    tiers: Sequence[Tier],
    folder: Path,
) -> dict[float, SetFile]:
    """Write the initial weights, and return the files of the frozen ones by width."""
    weights = initial_weights(export.arch, request.settings, export.seed)
    if request.start is not None:
        further = further_names(export.arch, request.settings)
        tensors = merged_tensors(export.arch, request.settings, request.start.tensors)
        start = replace(request.start, tensors=tensors)
        # A checkpoint may have further tensors of the model that no layout lists.
        renamed = current_names(export.arch, request.settings, tensors.keys())
        weights = start.with_names(renamed).put_into(weights, further)
    frozen = {}
    # Frozen tensors travel in their own file, and no device trains them.
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

    All widths share one file, encoded once, unless a width cuts one of the tensors.
    """
    if not frozen:
        return {}
    widths = dict.fromkeys(tier.width for tier in tiers)
    if layout.cut_base is None:
        # One file for all widths: each device stores it once, by its content.
        return dict.fromkeys(widths, _base_file(frozen))
    # A plan slices parameters, so the frozen tensors get a separate layout as its parameters.
    frozen_layout = replace(layout, parameters=layout.base, base=(), statistics=(), heads={})
    bases = {}
    for width in widths:
        plan = make_plan(frozen_layout, frozen_layout.tier(width))
        bases[width] = _base_file(slice_weights(frozen_layout, plan, frozen))
    return bases


def _base_file(tensors: Mapping[str, NDArray[np.float32]]) -> SetFile:
    """Return the file of frozen tensors."""
    return SetFile(BASE, "base.safetensors", encode_weights(tensors))


def _reuse_published(
    sets: TierSets,
    selection: TierSelection,
    folder: Path,
) -> set[Tier]:
    """Copy the published tiers that a new export would not change, and return them."""
    reused = set()
    for tier in selection.tiers:
        if tier in selection.published and sets.reuse(tier, folder / tier.id):
            reused.add(tier)
    return reused


def _reports(
    folder: Path, tiers: Sequence[Tier], reused: Container[Tier]
) -> tuple[TierReport, ...]:
    """Return the reports of a set's tiers from their manifests."""
    reports = []
    for tier in tiers:
        manifest = parse_manifest((folder / tier.id / "manifest.json").read_bytes())
        plans = []
        for path in (folder / tier.id).glob(PLAN_FILES):
            plans.append(parse_manifest(path.read_bytes()))
        reports.append(TierReport.from_manifest(tier, manifest, plans, taken=tier in reused))
    return tuple(reports)
