"""``shoal export-mutual``: the fleet's model and a board's own become one checked mutual set, for FML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import Manifest
from fleet_protocol.mutual_manifest import SIDES, MutualManifest
from shoal_cli.console import bytes_text, error_console, output_console, print_json, print_rows
from shoal_cli.options import parse_settings

__all__ = ["add_to"]

Settings = list[str] | None


def _export_mutual(
    meme: Annotated[str, typer.Option(help="Architecture of the fleet's model, or of what shares its trunk.")],
    personal: Annotated[str, typer.Option(help="Architecture of the model that stays on the board.")],
    settings: Annotated[
        Settings, typer.Option("--set", help="Setting of both, for example input_shape=1,28,28 or classes=10.")
    ] = None,
    meme_settings: Annotated[Settings, typer.Option("--meme-set", help="Setting of the fleet's model alone.")] = None,
    personal_settings: Annotated[
        Settings, typer.Option("--personal-set", help="Setting of the personal model alone.")
    ] = None,
    meme_width: Annotated[float, typer.Option(help="Width of the fleet's model; FML trains the whole of it.")] = 1.0,
    meme_depth: Annotated[int | None, typer.Option(help="Its depth in blocks; by default all.")] = None,
    personal_width: Annotated[float, typer.Option(help="Width of the personal model.")] = 1.0,
    personal_depth: Annotated[int | None, typer.Option(help="Its depth in blocks; by default all.")] = None,
    adaptor: Annotated[
        str,
        typer.Option(
            help="Parts of the meme that start and stay on the board, for example head: blocks or modules by path. "
            "Needed where they have another shape than in the fleet's model."
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder of the mutual sets.")] = Path("sets"),
    name: Annotated[
        str, typer.Option(help="Folder under it, whose former sets are replaced; by default MEME+PERSONAL.")
    ] = "",
    models: Annotated[Path | None, typer.Option(help="Python file with architectures of your own.")] = None,
    momentum: Annotated[float, typer.Option(help="SGD momentum of both models; 0 for none.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 5e-4,
    clip_norm: Annotated[float, typer.Option(help="Bound of each model's gradient norm; 0 for none.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the first weights of personal model and adaptor.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Lower the step in which two models teach each other, check it against PyTorch, and publish it as one set."""
    try:
        from models.registry import Registry, infer_layout  # noqa: PLC0415  (torch: seconds)
        from trainer_export.artifact_set import Progress  # noqa: PLC0415
        from trainer_export.mutual_set import MutualModel, MutualPair, export_mutual  # noqa: PLC0415
        from trainer_export.recipe import Recipe  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(f"exporting needs the extra `export` ({error.name} is not installed)") from error

    registry = Registry.zoo() if models is None else Registry.zoo().with_file(models)
    shared = parse_settings("--set", settings or [])

    def model(arch: str, option: str, own: Settings, width: float, depth: int | None) -> MutualModel:
        architecture = registry.get(arch)
        chosen = architecture.settings({**shared, **parse_settings(option, own or [])})
        return MutualModel(architecture, infer_layout(architecture, chosen).tier(width, depth), chosen)

    pair = MutualPair(
        model(meme, "--meme-set", meme_settings, meme_width, meme_depth),
        model(personal, "--personal-set", personal_settings, personal_width, personal_depth),
        tuple(part.strip() for part in adaptor.split(",") if part.strip()),
    )
    recipe = Recipe(momentum=momentum, weight_decay=weight_decay, clip_norm=clip_norm or None)
    console = error_console()
    with ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # it would leave an empty line before an error
    ) as bar:
        shown = bar.add_task(f"exporting {meme} and {personal}", total=None)

        def progress(state: Progress) -> None:
            bar.update(shown, description=state.stage, completed=state.done, total=state.total)

        (report,) = export_mutual([pair], recipe, out, name=name, seed=seed, progress=progress)
    found = _found(report.manifest)
    if as_json:
        print_json({"set": str(report.folder), **found, "worst_deviation": report.worst_deviation})
        return
    print_rows(f"mutual set {report.folder}", _rows(found), empty="nothing was exported")
    output_console().print(
        f'copy this folder to the board and name it in its device.toml: [personal] set = "{report.folder}"',
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _found(manifest: MutualManifest) -> dict[str, Any]:
    """The figures of a set, by model and of the step of both."""
    step = {
        "parameters": sum(manifest.side(side).parameter_count for side in SIDES),
        "graph_bytes": manifest.graph.size,
        "peak_memory_bytes": manifest.peak_memory_bytes,
        "worst_deviation": max(check.worst_relative for check in manifest.checks),
    }
    adaptor = () if manifest.adaptor is None else manifest.adaptor.parameters
    return {
        **{side: _model(manifest.side(side)) for side in SIDES},
        "step": step,
        "adaptor": list(adaptor),
    }


def _model(manifest: Manifest) -> dict[str, Any]:
    return {
        "arch": manifest.arch,
        "tier": manifest.tier,
        "parameters": manifest.parameter_count,
        "graph_bytes": sum(graph.size for graph in manifest.graphs.values()),
        "worst_deviation": max(check.worst_relative for check in manifest.checks),
    }


def _rows(found: dict[str, Any]) -> list[dict[str, str]]:
    names = {"meme": "meme, sent and averaged", "personal": "personal, stays", "step": "the step of both"}
    if found["adaptor"]:
        names["meme"] = f"meme, sent and averaged without {', '.join(found['adaptor'])}"
    return [
        {
            "model": title,
            "architecture": found[key].get("arch", ""),
            "tier": found[key].get("tier", ""),
            "parameters": f"{found[key]['parameters']:,}",
            "graphs": bytes_text(found[key]["graph_bytes"]),
            "peak training memory": bytes_text(found[key]["peak_memory_bytes"]) if key == "step" else "",
            "worst deviation": f"{found[key]['worst_deviation']:.1e}",
        }
        for key, title in names.items()
    ]


def add_to(app: typer.Typer) -> None:
    """Register the command.

    Args:
        app: the application.
    """
    app.command("export-mutual")(_export_mutual)
