"""Export and check the step in which two models teach each other (FML), as one artifact set.

The exporter compares each graph with PyTorch.

Example: shoal export-mutual --meme conv --personal lenet5
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.common import AsJson, ModelsFile, Settings
from shoal.cli.console import bytes_text, error_console, print_json, print_rows, print_text
from shoal.cli.grouped import grouped
from shoal.extras import needs

if TYPE_CHECKING:
    from fleet_protocol.manifest import Manifest
    from fleet_protocol.pair_manifest import PairManifest


@dataclass(frozen=True)
class _Options:
    meme: Annotated[
        str,
        typer.Option(
            help="Architecture of the fleet's model (the meme), or of a model that shares its"
            " trunk.",
            rich_help_panel="Model",
        ),
    ]
    personal: Annotated[
        str,
        typer.Option(
            help="Architecture of the model that stays on the board.", rich_help_panel="Model"
        ),
    ]
    settings: Annotated[
        Settings,
        typer.Option(
            "--set",
            help="Setting of both models, for example input_shape=1,28,28 or classes=10.",
            rich_help_panel="Model",
        ),
    ] = None
    meme_settings: Annotated[
        Settings,
        typer.Option(
            "--meme-set",
            help="Setting that applies only to the fleet's model.",
            rich_help_panel="Model",
        ),
    ] = None
    personal_settings: Annotated[
        Settings,
        typer.Option(
            "--personal-set",
            help="Setting that applies only to the personal model.",
            rich_help_panel="Model",
        ),
    ] = None
    meme_width: Annotated[
        float,
        typer.Option(
            help="Width of the fleet's model. Every device trains it at this width; FML has no"
            " sub-models.",
            rich_help_panel="Tiers",
        ),
    ] = 1.0
    meme_depth: Annotated[
        int | None,
        typer.Option(
            help="Depth of the fleet's model in blocks; by default, all blocks.",
            rich_help_panel="Tiers",
        ),
    ] = None
    personal_width: Annotated[
        float, typer.Option(help="Width of the personal model.", rich_help_panel="Tiers")
    ] = 1.0
    personal_depth: Annotated[
        int | None,
        typer.Option(
            help="Depth of the personal model in blocks; by default, all blocks.",
            rich_help_panel="Tiers",
        ),
    ] = None
    # Options carry the paper's words for its parts; the code calls them sent and own.
    adaptor: Annotated[
        str,
        typer.Option(
            help="Parts of the meme that stay on the board: blocks, or modules by path, for"
            " example head. Required if these parts have a different shape in the fleet's"
            " model.",
            rich_help_panel="Model",
        ),
    ] = ""
    out: Annotated[
        Path, typer.Option(help="Folder for the mutual sets.", rich_help_panel="Output")
    ] = Path("sets")
    name: Annotated[
        str,
        typer.Option(
            help="Subfolder for the sets, by default MEME+PERSONAL; the command replaces existing"
            " sets in it.",
            rich_help_panel="Model",
        ),
    ] = ""
    models: ModelsFile = None
    momentum: Annotated[
        float,
        typer.Option(help="SGD momentum of both models; 0 for none.", rich_help_panel="Recipe"),
    ] = 0.9
    weight_decay: Annotated[float, typer.Option(help="Weight decay.", rich_help_panel="Recipe")] = (
        5e-4
    )
    clip_norm: Annotated[
        float,
        typer.Option(
            help="Clip the norm of each model's gradient to this value; 0 for no clipping.",
            rich_help_panel="Recipe",
        ),
    ] = 1.0
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the initial weights of the personal model and the adaptor.",
            rich_help_panel="Start",
        ),
    ] = 0
    as_json: AsJson = False


@grouped(_Options)
def _export_mutual(options: _Options) -> None:
    with needs("export"):
        from models.registry import Registry, infer_layout
        from trainer_export.optimizers.sgd import Sgd
        from trainer_export.pair_set import Pair, PairModel, export_pairs
        from trainer_export.recipe import Recipe

    from shoal.cli.options import parse_settings
    from shoal.cli.progress import export_bar

    registry = Registry.zoo()
    if options.models is not None:
        registry = registry.with_file(options.models)
    shared = parse_settings("--set", options.settings or [])

    def model(arch: str, settings: dict[str, Any], width: float, depth: int | None) -> PairModel:
        architecture = registry.get(arch)
        # A model's own setting has priority over that of both.
        # Checked here, so that an unknown setting names the option and not the exporter.
        complete = architecture.settings({**shared, **settings})
        tier = infer_layout(architecture, complete).tier(width, depth)
        return PairModel(architecture, tier, complete)

    meme_settings = parse_settings("--meme-set", options.meme_settings or [])
    personal_settings = parse_settings("--personal-set", options.personal_settings or [])
    meme = model(options.meme, meme_settings, options.meme_width, options.meme_depth)
    personal = model(
        options.personal, personal_settings, options.personal_width, options.personal_depth
    )
    adaptor = [name.strip() for name in options.adaptor.split(",")]
    # Without the option, the only name is empty.
    pair = Pair(meme, personal, tuple(name for name in adaptor if name))
    sgd = Sgd(momentum=options.momentum, weight_decay=options.weight_decay)
    recipe = Recipe(sgd, clip_norm=options.clip_norm or None)
    with export_bar(
        error_console(), f"exporting {options.meme} and {options.personal}"
    ) as progress:
        (report,) = export_pairs(
            [pair],
            recipe,
            options.out,
            name=options.name,
            seed=options.seed,
            progress=progress,
        )
    figures = _figures(report.manifest)
    if options.as_json:
        deviation = report.worst_deviation
        print_json({"set": str(report.folder), **figures, "worst_deviation": deviation})
        return
    print_rows(f"mutual set {report.folder}", _rows(figures), empty="nothing was exported")
    print_text(
        "copy this folder to the board and name it in its device.toml: [own_model] set = "
        f'"{report.folder}"'
    )


def _figures(manifest: "PairManifest") -> dict[str, Any]:
    """Return the figures of each model of a set, and of the step that trains both."""
    from fleet_protocol.pair_manifest import SIDES

    step = {
        "parameters": sum(manifest.side(side).parameter_count for side in SIDES),
        "graph_bytes": manifest.graph.size,
        "peak_memory_bytes": manifest.peak_memory_bytes,
        "worst_deviation": max(check.worst_relative for check in manifest.checks),
    }
    adaptor = () if manifest.adaptor is None else manifest.adaptor.parameters
    return {
        # Keys as in the options; programs read them.
        "personal": _model(manifest.own),
        "meme": _model(manifest.sent),
        "step": step,
        "adaptor": list(adaptor),
    }


def _model(manifest: "Manifest") -> dict[str, Any]:
    """Return the figures of one model."""
    return {
        "arch": manifest.arch,
        "tier": manifest.tier,
        "parameters": manifest.parameter_count,
        "graph_bytes": sum(graph.size for graph in manifest.graphs.values()),
        "worst_deviation": max(check.worst_relative for check in manifest.checks),
    }


def _rows(figures: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row for each model and one for the step that trains both."""
    meme_title = "meme (sent and averaged)"
    if figures["adaptor"]:
        meme_title += f" without {', '.join(figures['adaptor'])}"
    titles = {"meme": meme_title, "personal": "personal, stays", "step": "joint step"}
    rows = []
    for key, title in titles.items():
        model = figures[key]
        memory = ""
        # Only the joint step trains.
        if key == "step":
            memory = bytes_text(model["peak_memory_bytes"])
        rows.append(
            {
                "model": title,
                "architecture": model.get("arch", ""),
                "tier": model.get("tier", ""),
                "parameters": f"{model['parameters']:,}",
                "graphs": bytes_text(model["graph_bytes"]),
                "peak training memory": memory,
                "largest deviation": f"{model['worst_deviation']:.1e}",
            }
        )
    return rows
