"""Lower the training step of an architecture for each tier, check it, and publish the sets.

Each graph is compared with PyTorch.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    from trainer_export.tier_set import Format


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
            help="Any of onnx, ort-training and executorch; by default onnx and, if installed, "
            "ort-training."
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
            "--convert/--no-convert",
            help="Replace batch norm, dropout, fused attention and in-place activations by what "
            "exports, and say which; --no-convert refuses them.",
        ),
    ] = True
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

    from shoal.cli.options import parse_heads, parse_settings
    from shoal.cli.progress import export_bar

    if options.add and options.replace:
        raise ConfigError(
            "--add keeps the tiers that are there, --replace drops them; give one of the two"
        )
    formats = _formats(options.formats, FORMATS)
    registry = Registry.zoo()
    if options.models is not None:
        registry = registry.with_file(options.models)
    architecture = registry.get(options.arch)
    settings = architecture.settings(parse_settings("--set", options.settings or []))
    if options.convert:
        from models.zoo.conversion import convert_where_needed

        architecture, replacements = convert_where_needed(architecture, settings)
        _print_replacements(replacements, as_json=options.as_json)
    layout = infer_layout(architecture, settings)
    tiers = _tiers(options, layout)
    if options.explain:
        _print_cuts(layout, tiers, as_json=options.as_json)
        return
    heads = parse_heads("--head", options.heads or [])
    recipe = Recipe.of(_recipe(options), registry.own)
    unasked: Literal["add", "replace", "refuse"] = "refuse"
    if options.add:
        unasked = "add"
    elif options.replace:
        unasked = "replace"
    with export_bar(error_console(), f"exporting {options.arch}") as progress:
        reports = export_architecture(
            architecture,
            settings,
            tiers,
            recipe,
            options.out,
            formats=formats,
            seed=options.seed,
            progress=progress,
            heads=heads,
            others=unasked,
            jobs=options.jobs,
            start=_start(options),
        )
    _print_reports(reports, f"{options.arch} in {options.out}", as_json=options.as_json)


def _formats(text: str, known: "Sequence[Format]") -> "tuple[Format, ...] | None":
    """Return the formats that the option names; None, the default, if it names none."""
    if not text:
        return None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--formats: no format {name!r}; there are {', '.join(known)}")
    return tuple(name for name in known if name in names)


def _tiers(options: _Options, layout: "Layout") -> tuple["Tier", ...]:
    """Return each width at each depth."""
    from shoal.cli.options import parse_floats, parse_ints

    depths: tuple[int | None, ...] = (None,)
    if options.depths:
        depths = parse_ints("--depths", options.depths)
    tiers = []
    for depth in depths:
        for width in parse_floats("--widths", options.widths):
            tiers.append(layout.tier(width, depth))
    return tuple(tiers)


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
    names = []
    for pair in options.start_name or []:
        theirs, _, ours = pair.partition("=")
        if not ours:
            raise ConfigError("--start-name: give THEIRS=OURS, for example 'model.*=*'")
        names.append((theirs, ours))
    return Start(tensors, str(options.start), names, options.start_partial)


def _print_cuts(layout: "Layout", tiers: "Sequence[Tier]", *, as_json: bool) -> None:
    """Print how each tensor is cut, and its shape in each tier."""
    shapes = {tier.id: layout.shapes(tier) for tier in tiers}
    rows = []
    for parameter in layout.parameters:
        axes = [str(dim) if layout.is_cut(dim) else "-" for dim in parameter.dims]
        row: dict[str, object] = {
            "tensor": parameter.name,
            "block": parameter.block,
            "cut along": axes,
            "whole": list(parameter.shape),
        }
        for tier, tier_shapes in shapes.items():
            shape = tier_shapes.get(parameter.name)
            row[tier] = None if shape is None else list(shape)
        rows.append(row)
    if as_json:
        print_json(rows)
        return
    cells = []
    for row in rows:
        cells.append({column: _cell(value) for column, value in row.items()})
    print_rows(f"{layout.arch}: how it is cut", cells, empty="there are no parameters")


def _cell(value: object) -> str:
    """Return a value of a row as text."""
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return "" if value is None else str(value)


def _print_replacements(replacements: "Sequence[Replacement]", *, as_json: bool) -> None:
    """Print which modules were converted; beside JSON on standard error."""
    rows = []
    for replacement in replacements:
        module = replacement.path or "(the model itself)"
        rows.append({"module": module, "was": replacement.old, "is now": replacement.new})
    if as_json:
        for row in rows:
            error_console().print(
                f"{row['module']}: {row['was']} is now {row['is now']}", soft_wrap=True
            )
        return
    if rows:
        print_rows("converted", rows, empty="")


def _recipe(options: _Options) -> "RecipeTable":
    """Return the recipe of a configuration, if any, with the changes that options make."""
    from fleet_protocol.recipe import Part
    from shoal.cli.options import read_recipe

    table = read_recipe(options.recipe)
    changes: dict[str, object] = {}
    for switch in ("proximal", "accumulate"):
        changes[switch] = getattr(options, switch) or getattr(table, switch)
    for kind, name, assignments in (
        ("optimizer", options.optimizer, options.optimizer_set),
        ("loss", options.loss, options.loss_set),
    ):
        before: Part = getattr(table, kind)
        settings = _numbers(f"--{kind}-set", assignments or [])
        if name is not None and name != before.name:
            changes[kind] = Part(name=name, settings=settings)
        elif settings:
            changes[kind] = Part(name=before.name, settings={**before.settings, **settings})
    for number in ("momentum", "weight_decay", "clip_norm", "clip_value"):
        value = getattr(options, number)
        if value is not None:
            changes[number] = value
    if options.metrics:
        names = options.metrics.split(",")
        changes["metrics"] = tuple(Part(name=name.strip()) for name in names)
    return table.model_copy(update=changes)


def _numbers(option: str, assignments: list[str]) -> dict[str, Any]:
    """Return the numbers that an option sets, with lists as JSON has them."""
    from shoal.cli.options import parse_settings

    numbers = {}
    for key, value in parse_settings(option, assignments).items():
        numbers[key] = list(value) if isinstance(value, tuple) else value
    return numbers


def _print_reports(reports: "Sequence[TierReport]", title: str, *, as_json: bool) -> None:
    """Print what was exported for each tier."""
    if as_json:
        records = []
        for report in reports:
            skipped = dict(report.skipped)
            records.append({**vars(report), "tier": report.tier.id, "skipped": skipped})
        print_json(records)
        return
    print_rows(title, [_report_row(report) for report in reports], empty="nothing was exported")
    reasons: dict[str, str] = {}
    for report in reports:
        reasons |= report.skipped
    for name, reason in reasons.items():
        error_console().print(f"[yellow]{name} was skipped:[/] {reason}", soft_wrap=True)


def _report_row(report: "TierReport") -> dict[str, str]:
    """Return the cells of a tier."""
    return {
        "tier": report.tier.id,
        "parameters": f"{report.parameters:,}",
        "FLOPs/sample": count_text(report.flops_per_sample),
        "graphs": bytes_text(report.graph_bytes),
        "peak training memory": bytes_text(report.peak_memory_bytes),
        "worst deviation": f"{report.worst_deviation:.1e}",
        "made": "before, taken as it is" if report.taken else "now",
    }
