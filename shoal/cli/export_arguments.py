"""The options of `shoal export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson, ModelsFile, Settings


# A dataclass and not parameters of a function: several modules read the same options.
@dataclass(frozen=True)
class ExportArguments:
    """The options of `shoal export`, with the help that the command prints."""

    arch: Annotated[
        str,
        typer.Option(
            help="Name of an architecture in the zoo or in --models.",
            rich_help_panel="Model",
        ),
    ] = ""
    model: Annotated[
        str,
        typer.Option(
            help="Model from a package: transformers:FOLDER, timm:NAME or package.module:Class.",
            rich_help_panel="Model",
        ),
    ] = ""
    axes: Annotated[
        Settings,
        typer.Option(
            "--axis",
            help="How to cut an argument of --model: ARGUMENT=FORM, where FORM is width, heads:N,"
            " groups:N, depth, classes or off.",
            rich_help_panel="Model",
        ),
    ] = None
    write_builder: Annotated[
        Path | None,
        typer.Option(
            help="Write the builder of --model to a Python file, and export nothing.",
            rich_help_panel="Model",
        ),
    ] = None
    widths: Annotated[
        str, typer.Option(help="Width ratios, for example 1,0.5,1/16.", rich_help_panel="Tiers")
    ] = "1"
    depths: Annotated[
        str,
        typer.Option(
            help="Depths in blocks, for example 2,4; by default, the full depth.",
            rich_help_panel="Tiers",
        ),
    ] = ""
    trained: Annotated[
        str,
        typer.Option(
            help="Shares of the blocks that tiers train, counted from the top, for example"
            " 1,0.5,head; head trains no block.",
            rich_help_panel="Tiers",
        ),
    ] = "1"
    windows: Annotated[
        bool,
        typer.Option(
            "--windows",
            help="Also export each share of --trained at every other position, for a"
            " strategy.window other than top.",
            rich_help_panel="Tiers",
        ),
    ] = False
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
            help="Number of labels of a tier with its own head, for example w1.00-d2=5.",
            rich_help_panel="Model",
        ),
    ] = None
    formats: Annotated[
        str,
        typer.Option(
            help="Formats of the graphs: any of onnx, ort-training and executorch; by default,"
            " onnx and (if installed) ort-training.",
            rich_help_panel="Output",
        ),
    ] = ""
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="A fleet.toml or sim.toml with the recipe (model.recipe) and the contract; other"
            " options override the recipe.",
            rich_help_panel="Recipe",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(help="Optimizer: sgd (the default), adam or adamw.", rich_help_panel="Recipe"),
    ] = None
    optimizer_set: Annotated[
        Settings,
        typer.Option(
            help="Parameter of the optimizer, for example beta1=0.95.", rich_help_panel="Recipe"
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
        typer.Option(
            help="Parameter of the loss, for example delta=0.5.", rich_help_panel="Recipe"
        ),
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
            help="Clip the global gradient norm to this value, by default 1; 0 for no clipping.",
            rich_help_panel="Recipe",
        ),
    ] = None
    clip_value: Annotated[
        float | None,
        typer.Option(
            help="Clip each entry of the gradient to this absolute value before clipping the norm.",
            rich_help_panel="Recipe",
        ),
    ] = None
    accumulate: Annotated[
        bool,
        typer.Option(
            "--accumulate",
            help="Let devices split a batch into micro-batches (micro_batch in the train table).",
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
            help="Replace batch norm, dropout, fused attention and in-place activations with"
            " modules that can be exported, and list the replaced modules; --no-convert"
            " refuses such modules.",
            rich_help_panel="Model",
        ),
    ] = True
    metrics: Annotated[
        str,
        typer.Option(
            help="Metrics to evaluate besides the loss, for example f1,perplexity.",
            rich_help_panel="Recipe",
        ),
    ] = ""
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Only list how each tensor is cut in each tier; export nothing.",
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
            help="Keep existing tiers, and add the requested ones.",
            rich_help_panel="Tiers",
        ),
    ] = False
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Remove existing tiers that are not requested.",
            rich_help_panel="Tiers",
        ),
    ] = False
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of tiers to export in parallel; by default, one per core, with at most"
            " 1.5 GB of memory in total.",
            rich_help_panel="Output",
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help="Bounds of the peak training memory of a tier in MB, for batches of 32, such as"
            " 96,48. A tier above a bound gets a further plan, which recomputes activations and"
            " takes longer; each device gets the fastest plan that fits.",
            rich_help_panel="Tiers",
        ),
    ] = None
    start: Annotated[
        Path | None,
        typer.Option(
            help="Start from a .safetensors, .pt or .bin file, from the folder of a checkpoint"
            " in such files, or from the newest version in a store.",
            rich_help_panel="Start",
        ),
    ] = None
    start_name: Annotated[
        Settings,
        typer.Option(
            help="New name of a tensor of --start, as THEIRS=OURS, for example 'model.*=*';"
            " 'head.*=' omits the matching tensors.",
            rich_help_panel="Start",
        ),
    ] = None
    start_partial: Annotated[
        bool,
        typer.Option(
            "--start-partial",
            help="Load only the tensors of --start that fit; initialise the others at random.",
            rich_help_panel="Start",
        ),
    ] = False
    start_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Minimum share of tensors that --start-partial must load; 0.5 by default.",
            rich_help_panel="Start",
        ),
    ] = None
    as_json: AsJson = False
