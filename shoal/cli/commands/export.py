"""Export a model for training on boards: check each tier's graphs, and publish its artifact set.

The exporter compares each graph with PyTorch.

Example: shoal export --models model.py --arch model --widths 1,0.5,0.25
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fleet_protocol.errors import ConfigError
from shoal.cli.common import AsJson, ModelsFile, Settings
from shoal.cli.console import error_console
from shoal.cli.export_tables import print_cuts, print_replacements, print_reports
from shoal.cli.grouped import grouped
from shoal.extras import needs

if TYPE_CHECKING:
    from fleet_protocol.recipe import RecipeTable
    from models.layout import Layout
    from models.tier import Tier
    from trainer_export.start import Start
    from trainer_export.tier_set import Format


@dataclass(frozen=True)
class _Options:
    arch: Annotated[
        str,
        typer.Option(
            help="Name of the architecture: one of the zoo, or of --models.",
            rich_help_panel="Model",
        ),
    ]
    widths: Annotated[
        str, typer.Option(help="Width ratios, for example 1,0.5,1/16.", rich_help_panel="Tiers")
    ] = "1"
    depths: Annotated[
        str,
        typer.Option(
            help="Depths in blocks, for example 2,4; by default the full depth.",
            rich_help_panel="Tiers",
        ),
    ] = ""
    out: Annotated[Path, typer.Option(help="Artifact folder.", rich_help_panel="Output")] = Path(
        "artifacts"
    )
    models: ModelsFile = None
    settings: Annotated[
        Settings,
        typer.Option(
            "--set",
            help="Setting of the architecture, for example channels=32,64.",
            rich_help_panel="Model",
        ),
    ] = None
    heads: Annotated[
        Settings,
        typer.Option(
            "--head",
            help="Labels of a tier with its own head, for example w1.00-d2=5.",
            rich_help_panel="Model",
        ),
    ] = None
    formats: Annotated[
        str,
        typer.Option(
            help="Any of onnx, ort-training and executorch; by default onnx and, if installed, "
            "ort-training.",
            rich_help_panel="Output",
        ),
    ] = ""
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="A fleet.toml or sim.toml whose model.recipe counts where no option does.",
            rich_help_panel="Recipe",
        ),
    ] = None
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, adam, adamw; by default sgd.", rich_help_panel="Recipe")
    ] = None
    optimizer_set: Annotated[
        Settings,
        typer.Option(
            help="Number of the optimizer, for example beta1=0.95.", rich_help_panel="Recipe"
        ),
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(
            help="Loss to minimise; by default masked-cross-entropy.", rich_help_panel="Recipe"
        ),
    ] = None
    loss_set: Annotated[
        Settings,
        typer.Option(help="Number of the loss, for example delta=0.5.", rich_help_panel="Recipe"),
    ] = None
    momentum: Annotated[
        float | None,
        typer.Option(help="SGD momentum, by default 0.9; 0 for none.", rich_help_panel="Recipe"),
    ] = None
    weight_decay: Annotated[
        float | None,
        typer.Option(help="Weight decay, by default the optimizer's.", rich_help_panel="Recipe"),
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(
            help="Bound of the global gradient norm, by default 1; 0 for none.",
            rich_help_panel="Recipe",
        ),
    ] = None
    clip_value: Annotated[
        float | None,
        typer.Option(
            help="Bound of each entry of the gradient, before that of its norm.",
            rich_help_panel="Recipe",
        ),
    ] = None
    accumulate: Annotated[
        bool,
        typer.Option(
            "--accumulate",
            help="Let devices take a batch in pieces (micro_batch of the train table).",
            rich_help_panel="Recipe",
        ),
    ] = False
    proximal: Annotated[
        bool,
        typer.Option(
            "--proximal", help="Add the proximal term that FedProx needs.", rich_help_panel="Recipe"
        ),
    ] = False
    convert: Annotated[
        bool,
        typer.Option(
            "--convert/--no-convert",
            help="Replace batch norm, dropout, fused attention and in-place activations by what "
            "exports, and say which; --no-convert refuses them.",
            rich_help_panel="Model",
        ),
    ] = True
    metrics: Annotated[
        str,
        typer.Option(
            help="Metrics of evaluations beside the loss, for example f1,perplexity.",
            rich_help_panel="Recipe",
        ),
    ] = ""
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="List how each tensor is cut in each tier, and export nothing.",
            rich_help_panel="Tiers",
        ),
    ] = False
    seed: Annotated[
        int, typer.Option(help="Seed of the initial global weights.", rich_help_panel="Start")
    ] = 0
    add: Annotated[
        bool,
        typer.Option(
            "--add",
            help="Keep the tiers that are there beside those asked for.",
            rich_help_panel="Tiers",
        ),
    ] = False
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Drop the tiers that are there and not asked for.",
            rich_help_panel="Tiers",
        ),
    ] = False
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tiers at a time; by default as many as cores and 1.5 GB allow.",
            rich_help_panel="Output",
        ),
    ] = None
    start: Annotated[
        Path | None,
        typer.Option(
            help="Start from a .safetensors, .pt or .bin file, or a store's newest version.",
            rich_help_panel="Start",
        ),
    ] = None
    start_name: Annotated[
        Settings,
        typer.Option(
            help="Name of a tensor of --start in this model, THEIRS=OURS, for example 'model.*=*'.",
            rich_help_panel="Start",
        ),
    ] = None
    start_partial: Annotated[
        bool,
        typer.Option(
            "--start-partial",
            help="Take of --start what fits, and leave the rest as it is drawn.",
            rich_help_panel="Start",
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
        print_replacements(replacements, as_json=options.as_json)
    layout = infer_layout(architecture, settings)
    tiers = _tiers(options, layout)
    if options.explain:
        print_cuts(layout, tiers, as_json=options.as_json)
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
    print_reports(reports, f"{options.arch} in {options.out}", as_json=options.as_json)


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
