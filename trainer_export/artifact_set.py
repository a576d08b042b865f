"""Exports an architecture for many tiers into a folder of content-addressed files, all of them
checked or none.

    <out>/objects/<sha256[:2]>/<sha256>    every file by content
    <out>/<arch>/layout.json               axes of the global model
    <out>/<arch>/init.safetensors          initial global weights, in layout order
    <out>/<arch>/<tier>/base.safetensors   frozen tensors, where there are any: one file under many names, or a slice
    <out>/<arch>/<tier>/manifest.json      what a device must know
    <out>/<arch>/<tier>/head.safetensors   initial weights of a head of the tier's own, where it has one
    <out>/<arch>/<tier>/own_class.safetensors  how weights load into the user's class; not sent to boards
    <out>/<arch>/<tier>/*.onnx             the portable graphs, hard links into objects
    <out>/<arch>/<tier>/ort-training/*     the same for onnxruntime-training
    <out>/<arch>/<tier>/executorch/*.pte   train, eval and infer for Android, iOS and C++
    <out>/<arch>/<tier>/made-from.json     what they depend on; a tier that would come out the same is taken as it is

A set is built in a folder beside the old one and takes its place by a rename after its last check,
so a failed or interrupted export leaves what was there, and nothing else.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
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

FORMATS: tuple[Format, ...] = ("onnx", "ort-training", "executorch")
Others = Literal["refuse", "add", "replace"]
"""What becomes of tiers that are there and not asked for: an error, they stay, or they go."""


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
    def of(cls, tier: Tier, manifest: Manifest, *, taken: bool) -> "TierReport":
        """What a manifest says of its tier."""
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
    others: Others = "refuse",
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
        ConfigError: no tier, a format that there is not or that is not installed, a head for a tier
            that is not exported, or tiers that would be dropped.
        PlanError: the model cannot have one of the tiers or heads.
        ExportError: an operator cannot be exported, or a graph does not agree with PyTorch; nothing
            is published.
        StorageError: a file cannot be written; what was published before is still there.
    """
    wanted = list(dict.fromkeys(tiers))
    chosen = installed_formats() if formats is None else tuple(formats)
    unknown = [item for item in chosen if item not in FORMATS]
    if not wanted or unknown:
        wrong = (
            f"unknown format {unknown[0]!r}; there are {', '.join(FORMATS)}"
            if unknown
            else "no tier to export"
        )
        raise ConfigError(f"{arch.name}: {wrong}")
    for name, written_by in (
        ("ort-training", ort_training),
        ("executorch", executorch),
    ):
        if name in chosen and not written_by.is_installed():
            raise ConfigError(f"{arch.name}: {written_by.NOT_INSTALLED}")
    with calm_torch():
        layout = infer_layout(arch, settings)
    _refuse_uncut(layout, wanted)
    heads = dict(heads or {})
    there = _tiers_in(out / arch.name)
    left = [tier for tier in there if tier not in wanted]
    if left and others == "refuse":
        raise ConfigError(
            f"{arch.name} in {out} has {', '.join(tier.id for tier in left)}, too, which a fleet may be using;"
            " --add keeps what is there beside what is new, --replace drops it"
        )
    if others == "add":
        wanted += left
        heads |= {
            tier: classes for tier, classes in there.items() if tier in left and classes is not None
        }
    if heads:
        stray = next((tier for tier in heads if tier not in wanted), None)
        if stray is not None:
            raise ConfigError(
                f"{arch.name}: tier {stray.id} shall have a head of its own but is not exported"
            )
        layout = replace(layout, heads={tier.id: classes for tier, classes in heads.items()})
    export = Export(arch, layout, recipe, seed)
    try:
        with calm_torch(), replacing(out / arch.name) as folder:
            write_file(folder / "layout.json", layout.to_json().encode())
            weights = initial_weights(arch, settings, seed)
            weights = (
                weights if start is None else start.put_into(weights, further_names(arch, settings))
            )
            bases = _bases(
                layout,
                {item.name: weights.pop(item.name) for item in layout.base},
                wanted,
            )
            write_file(folder / "init.safetensors", encode_weights(weights))
            del weights
            sets = TierSets(export, chosen, bases, folder)
            taken = {
                tier
                for tier in wanted
                if tier in there and sets.take(tier, out / arch.name / tier.id)
            }
            todo = [sets.job(tier) for tier in wanted if tier not in taken]
            counter = Counter(progress, len(todo) * (1 + 2 * len(chosen)))
            run_jobs(todo, jobs, counter.start)
            manifests = [
                parse_manifest((folder / tier.id / "manifest.json").read_bytes()) for tier in wanted
            ]
    except OSError as error:
        raise StorageError(
            f"{arch.name} cannot be written to {out}: {error}; what was published before is unchanged"
        ) from error
    counter.finish()
    return tuple(
        TierReport.of(t, found, taken=t in taken)
        for t, found in zip(wanted, manifests, strict=True)
    )


def _tiers_in(folder: Path) -> dict[Tier, int | None]:
    """The tiers of a set, each with the labels of a head of its own, if it has one."""
    try:
        heads = Layout.from_json((folder / "layout.json").read_bytes()).heads
    except (OSError, ShoalError):
        heads = {}
    found = {}
    for path in sorted(folder.glob("*/manifest.json")):
        with contextlib.suppress(PlanError):
            found[Tier.parse(path.parent.name)] = heads.get(path.parent.name)
    return found


def _bases(
    layout: Layout, frozen: Mapping[str, NDArray[np.float32]], tiers: Sequence[Tier]
) -> dict[float, SetFile]:
    """The file of the frozen tensors for each width: the same for all unless a width cuts one of
    them.
    """
    if not frozen:
        return {}
    widths = dict.fromkeys(tier.width for tier in tiers)
    if layout.cut_base is None:
        return dict.fromkeys(widths, SetFile(BASE, "base.safetensors", encode_weights(frozen)))
    held = replace(layout, parameters=layout.base, base=(), statistics=(), heads={})
    parts = {
        width: slice_weights(held, make_plan(held, held.tier(width)), frozen) for width in widths
    }
    return {
        width: SetFile(BASE, "base.safetensors", encode_weights(part))
        for width, part in parts.items()
    }


def _refuse_uncut(layout: Layout, tiers: Sequence[Tier]) -> None:
    """Refuse tiers that the model cannot have, and narrow ones where none is narrower than the
    whole.
    """

    def shapes(tier: Tier) -> dict[str, tuple[int, ...]]:
        return {**layout.shapes(tier), **layout.base_of(tier)}

    whole = {tier: shapes(layout.tier(1.0, tier.depth)) for tier in tiers}
    narrow = [tier for tier in tiers if tier.width < 1]
    if narrow and all(shapes(tier) == whole[tier] for tier in narrow):
        raise ConfigError(
            f"{layout.arch}: nothing is cut in {', '.join(tier.id for tier in narrow)}, whose parameters are those of"
            " the whole model; ask for the sizes that shall shrink, cut.width(name, size), or export width 1 alone"
        )


def installed_formats() -> tuple[Format, ...]:
    """The formats that are written unless asked otherwise: ``onnx``, and ``ort-training`` where
    that is installed.
    """
    return ("onnx", "ort-training") if ort_training.is_installed() else ("onnx",)
