"""Lower the step in which two models teach each other, check it, and publish one set (FML).

Each graph is compared with PyTorch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.common import AsJson, ModelsFile, Settings
from shoal.cli.console import bytes_text, error_console, print_json, print_rows, say
from shoal.cli.grouped import grouped
from shoal.extras import needs

if TYPE_CHECKING:
    from fleet_protocol.manifest import Manifest
    from fleet_protocol.pair_manifest import PairManifest


@dataclass(frozen=True)
class _Options:
    meme: Annotated[
        str,
        typer.Option(help="Architecture of the fleet's model, or of what shares its trunk."),
    ]
    personal: Annotated[
        str, typer.Option(help="Architecture of the model that stays on the board.")
    ]
    settings: Annotated[
        Settings,
        typer.Option(
            "--set",
            help="Setting of both, for example input_shape=1,28,28 or classes=10.",
        ),
    ] = None
    meme_settings: Annotated[
        Settings, typer.Option("--meme-set", help="Setting of the fleet's model alone.")
    ] = None
    personal_settings: Annotated[
        Settings,
        typer.Option("--personal-set", help="Setting of the personal model alone."),
    ] = None
    meme_width: Annotated[
        float,
        typer.Option(help="Width of the fleet's model; FML trains the whole of it."),
    ] = 1.0
    meme_depth: Annotated[int | None, typer.Option(help="Its depth in blocks; by default all.")] = (
        None
    )
    personal_width: Annotated[float, typer.Option(help="Width of the personal model.")] = 1.0
    personal_depth: Annotated[
        int | None, typer.Option(help="Its depth in blocks; by default all.")
    ] = None
    adaptor: Annotated[
        str,
        typer.Option(
            help="Parts of the meme that start and stay on the board, for example head: blocks or modules by path. "
            "Needed where they have another shape than in the fleet's model."
        ),
    ] = ""
    out: Annotated[Path, typer.Option(help="Folder of the mutual sets.")] = Path("sets")
    name: Annotated[
        str,
        typer.Option(
            help="Folder under it, whose former sets are replaced; by default MEME+PERSONAL."
        ),
    ] = ""
    models: ModelsFile = None
    momentum: Annotated[float, typer.Option(help="SGD momentum of both models; 0 for none.")] = 0.9
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 5e-4
    clip_norm: Annotated[
        float, typer.Option(help="Bound of each model's gradient norm; 0 for none.")
    ] = 1.0
    seed: Annotated[
        int,
        typer.Option(help="Seed of the first weights of personal model and adaptor."),
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

    registry = (
        Registry.zoo() if options.models is None else Registry.zoo().with_file(options.models)
    )
    shared = parse_settings("--set", options.settings or [])

    def model(arch: str, settings: dict[str, Any], width: float, depth: int | None) -> PairModel:
        architecture = registry.get(arch)
        chosen = architecture.settings({**shared, **settings})
        return PairModel(
            architecture, infer_layout(architecture, chosen).tier(width, depth), chosen
        )

    meme_settings = parse_settings("--meme-set", options.meme_settings or [])
    own_settings = parse_settings("--personal-set", options.personal_settings or [])
    pair = Pair(
        model(options.meme, meme_settings, options.meme_width, options.meme_depth),
        model(
            options.personal,
            own_settings,
            options.personal_width,
            options.personal_depth,
        ),
        tuple(part.strip() for part in options.adaptor.split(",") if part.strip()),
    )
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
    found = _found(report.manifest)
    if options.as_json:
        print_json(
            {
                "set": str(report.folder),
                **found,
                "worst_deviation": report.worst_deviation,
            }
        )
        return
    print_rows(f"mutual set {report.folder}", _rows(found), empty="nothing was exported")
    say(
        f'copy this folder to the board and name it in its device.toml: [own_model] set = "{report.folder}"'
    )


def _found(manifest: "PairManifest") -> dict[str, Any]:
    """The figures of a set, by model and of the step of both."""
    from fleet_protocol.pair_manifest import SIDES

    step = {
        "parameters": sum(manifest.side(side).parameter_count for side in SIDES),
        "graph_bytes": manifest.graph.size,
        "peak_memory_bytes": manifest.peak_memory_bytes,
        "worst_deviation": max(check.worst_relative for check in manifest.checks),
    }
    adaptor = () if manifest.adaptor is None else manifest.adaptor.parameters
    return {
        "personal": _model(manifest.own),
        "meme": _model(manifest.sent),
        "step": step,
        "adaptor": list(adaptor),
    }


def _model(manifest: "Manifest") -> dict[str, Any]:
    return {
        "arch": manifest.arch,
        "tier": manifest.tier,
        "parameters": manifest.parameter_count,
        "graph_bytes": sum(graph.size for graph in manifest.graphs.values()),
        "worst_deviation": max(check.worst_relative for check in manifest.checks),
    }


def _rows(found: dict[str, Any]) -> list[dict[str, str]]:
    names = {
        "meme": "meme, sent and averaged",
        "personal": "personal, stays",
        "step": "the step of both",
    }
    if found["adaptor"]:
        names["meme"] = f"meme, sent and averaged without {', '.join(found['adaptor'])}"
    return [
        {
            "model": title,
            "architecture": found[key].get("arch", ""),
            "tier": found[key].get("tier", ""),
            "parameters": f"{found[key]['parameters']:,}",
            "graphs": bytes_text(found[key]["graph_bytes"]),
            "peak training memory": bytes_text(found[key]["peak_memory_bytes"])
            if key == "step"
            else "",
            "worst deviation": f"{found[key]['worst_deviation']:.1e}",
        }
        for key, title in names.items()
    ]
