"""Lower the training step of an architecture for each tier, check it, and publish the sets.

Each graph is compared with PyTorch.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet_protocol.errors import ConfigError
from shoal.cli.common import AsJson, ModelsFile, Settings
from shoal.cli.console import (
    bytes_text,
    count_text,
    error_console,
    print_json,
    print_rows,
)
from shoal.cli.grouped import grouped
from shoal.extras import needs

if TYPE_CHECKING:
    from fleet_protocol.recipe import RecipeTable
    from models.layout import Layout
    from models.tier import Tier
    from models.zoo.conversion import Replacement
    from trainer_export.artifact_set import TierReport
    from trainer_export.start import Start


@dataclass(frozen=True)
class _Options:
    arch: Annotated[
        str,
        typer.Option(help="Name of the architecture: one of the zoo, or of --models."),
    ]
    widths: Annotated[str, typer.Option(help="Width ratios, for example 1,0.5,1/16.")] = "1"
    depths: Annotated[
        str,
        typer.Option(help="Depths in blocks, for example 2,4; by default the full depth."),
    ] = ""
    out: Annotated[Path, typer.Option(help="Artifact folder.")] = Path("artifacts")
    models: ModelsFile = None
    settings: Annotated[
        Settings,
        typer.Option("--set", help="Setting of the architecture, for example channels=32,64."),
    ] = None
    heads: Annotated[
        Settings,
        typer.Option(
            "--head",
            help="Labels of a tier with a head of its own, for example w1.00-d2=5.",
        ),
    ] = None
    formats: Annotated[
        str,
        typer.Option(
            help="Any of onnx, ort-training and executorch; by default onnx and, if installed, ort-training."
        ),
    ] = ""
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="A fleet.toml or sim.toml whose [model.recipe] counts where no option does."
        ),
    ] = None
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam, adamw; by default sgd.")] = None
    optimizer_set: Annotated[
        Settings, typer.Option(help="Number of the optimizer, for example beta1=0.95.")
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(help="What is made small; by default masked-cross-entropy."),
    ] = None
    loss_set: Annotated[
        Settings, typer.Option(help="Number of the loss, for example delta=0.5.")
    ] = None
    momentum: Annotated[
        float | None, typer.Option(help="SGD momentum, by default 0.9; 0 for none.")
    ] = None
    weight_decay: Annotated[
        float | None, typer.Option(help="Weight decay, by default the optimizer's.")
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(help="Bound of the global gradient norm, by default 1; 0 for none."),
    ] = None
    clip_value: Annotated[
        float | None,
        typer.Option(help="Bound of each entry of the gradient, before that of its norm."),
    ] = None
    accumulate: Annotated[
        bool,
        typer.Option(
            "--accumulate",
            help="Let devices take a batch in pieces ([train] micro_batch).",
        ),
    ] = False
    proximal: Annotated[
        bool,
        typer.Option("--proximal", help="Add the proximal term that FedProx needs."),
    ] = False
    convert: Annotated[
        bool,
        typer.Option(
            "--convert",
            help="Replace batch norm, dropout, fused attention and in-place activations by what exports.",
        ),
    ] = False
    metrics: Annotated[
        str,
        typer.Option(help="What evaluations report beside the loss, for example f1,perplexity."),
    ] = ""
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="List how each tensor is cut in each tier, and export nothing.",
        ),
    ] = False
    seed: Annotated[int, typer.Option(help="Seed of the initial global weights.")] = 0
    add: Annotated[
        bool,
        typer.Option("--add", help="Keep the tiers that are there beside those asked for."),
    ] = False
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Drop the tiers that are there and not asked for."),
    ] = False
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Tiers at a time; by default as many as cores and 1.5 GB allow."),
    ] = None
    start: Annotated[
        Path | None,
        typer.Option(
            help="Start from a .safetensors, .pt or .bin file, or a store's newest version."
        ),
    ] = None
    start_name: Annotated[
        Settings,
        typer.Option(
            help="What a tensor there is called here, THEIRS=OURS, for example 'model.*=*'."
        ),
    ] = None
    start_partial: Annotated[
        bool,
        typer.Option(
            "--start-partial",
            help="Take of --start what fits, and leave the rest as it is drawn.",
        ),
    ] = False
    as_json: AsJson = False


@grouped(_Options)
def _export(options: _Options) -> None:
    with needs("export"):
        from models.registry import Registry, infer_layout
        from trainer_export.artifact_set import FORMATS, export_architecture
        from trainer_export.recipe import Recipe

    from shoal.cli.options import parse_floats, parse_heads, parse_ints, parse_settings
    from shoal.cli.progress import export_bar

    if options.add and options.replace:
        raise ConfigError(
            "--add keeps the tiers that are there, --replace drops them; give one of the two"
        )
    named = [part.strip() for part in options.formats.split(",")]
    unknown = [name for name in named if options.formats and name not in FORMATS]
    if unknown:
        raise ConfigError(f"--formats: no format {unknown[0]!r}; there are {', '.join(FORMATS)}")
    wanted = tuple(name for name in FORMATS if name in named) if options.formats else None
    registry = (
        Registry.zoo() if options.models is None else Registry.zoo().with_file(options.models)
    )
    architecture = registry.get(options.arch)
    chosen = architecture.settings(parse_settings("--set", options.settings or []))
    if options.convert:
        from models.zoo.conversion import converted, replacements

        _print_replacements(replacements(architecture, chosen), as_json=options.as_json)
        architecture = converted(architecture)
    layout = infer_layout(architecture, chosen)
    depths: tuple[int | None, ...] = (
        parse_ints("--depths", options.depths) if options.depths else (None,)
    )
    widths = parse_floats("--widths", options.widths)
    tiers = tuple(layout.tier(width, depth) for depth in depths for width in widths)
    if options.explain:
        _print_cuts(layout, tiers, as_json=options.as_json)
        return
    heads = parse_heads("--head", options.heads or [])
    recipe = Recipe.of(_recipe(options), registry.own)
    with export_bar(error_console(), f"exporting {options.arch}") as progress:
        reports = export_architecture(
            architecture,
            chosen,
            tiers,
            recipe,
            options.out,
            formats=wanted,
            seed=options.seed,
            progress=progress,
            heads=heads,
            others="add" if options.add else "replace" if options.replace else "refuse",
            jobs=options.jobs,
            start=_start(options),
        )
    _print_reports(reports, f"{options.arch} in {options.out}", as_json=options.as_json)


def _start(options: _Options) -> "Start | None":
    from trainer_export.start import Start, read_start

    if options.start is None:
        return None
    if options.start.is_dir():
        from broker_server.store import Store
        from broker_server.store.export import load_version

        with closing(Store(options.start, read_only=True)) as opened:
            tensors = load_version(opened).weights
    else:
        tensors = read_start(options.start)
    names = [
        (theirs, ours)
        for theirs, _, ours in (pair.partition("=") for pair in options.start_name or [])
    ]
    if not all(ours for _, ours in names):
        raise ConfigError("--start-name: give THEIRS=OURS, for example 'model.*=*'")
    return Start(tensors, str(options.start), names, options.start_partial)


def _print_cuts(layout: "Layout", tiers: "Sequence[Tier]", *, as_json: bool) -> None:
    shapes = {tier.id: layout.shapes(tier) for tier in tiers}
    rows: list[dict[str, object]] = [
        {
            "tensor": item.name,
            "block": item.block,
            "cut along": [str(dim) if layout.is_cut(dim) else "-" for dim in item.dims],
            "whole": list(item.shape),
            **{
                tier: list(found[item.name]) if item.name in found else None
                for tier, found in shapes.items()
            },
        }
        for item in layout.parameters
    ]
    if as_json:
        print_json(rows)
        return
    shown = [{key: _sizes(value) for key, value in row.items()} for row in rows]
    print_rows(f"{layout.arch}: how it is cut", shown, empty="there are no parameters")


def _sizes(value: object) -> str:
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return "" if value is None else str(value)


def _print_replacements(done: "Sequence[Replacement]", *, as_json: bool) -> None:
    rows = [
        {
            "module": item.path or "(the model itself)",
            "was": item.old,
            "is now": item.new,
        }
        for item in done
    ]
    if as_json:
        for row in rows:
            error_console().print(
                f"{row['module']}: {row['was']} is now {row['is now']}", soft_wrap=True
            )
        return
    print_rows("converted", rows, empty="nothing had to be converted")


def _recipe(options: _Options) -> "RecipeTable":
    """The recipe of a configuration, if there is one, with what the options say instead."""
    from fleet_protocol.recipe import Part
    from shoal.cli.options import parse_settings, read_recipe

    table = read_recipe(options.recipe)
    changes: dict[str, object] = {
        key: getattr(options, key) or getattr(table, key) for key in ("proximal", "accumulate")
    }
    for kind, name, settings in (
        ("optimizer", options.optimizer, options.optimizer_set),
        ("loss", options.loss, options.loss_set),
    ):
        before: Part = getattr(table, kind)
        given = parse_settings(f"--{kind}-set", settings or [])
        numbers = {
            key: list(each) if isinstance(each, tuple) else each for key, each in given.items()
        }
        if name is not None and name != before.name:
            changes[kind] = Part(name=name, settings=numbers)
        elif numbers:
            changes[kind] = Part(name=before.name, settings={**before.settings, **numbers})
    for number in ("momentum", "weight_decay", "clip_norm", "clip_value"):
        if (value := getattr(options, number)) is not None:
            changes[number] = value
    if options.metrics:
        changes["metrics"] = tuple(Part(name=name.strip()) for name in options.metrics.split(","))
    return table.model_copy(update=changes)


def _print_reports(reports: "Sequence[TierReport]", title: str, *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {**vars(item), "tier": item.tier.id, "skipped": dict(item.skipped)}
                for item in reports
            ]
        )
        return
    print_rows(
        title,
        [
            {
                "tier": report.tier.id,
                "parameters": f"{report.parameters:,}",
                "FLOPs/sample": count_text(report.flops_per_sample),
                "graphs": bytes_text(report.graph_bytes),
                "peak training memory": bytes_text(report.peak_memory_bytes),
                "worst deviation": f"{report.worst_deviation:.1e}",
                "made": "before, taken as it is" if report.taken else "now",
            }
            for report in reports
        ],
        empty="nothing was exported",
    )
    for name, reason in {
        name: reason for report in reports for name, reason in report.skipped.items()
    }.items():
        error_console().print(f"[yellow]{name} was skipped:[/] {reason}", soft_wrap=True)
