"""``shoal export``: a PyTorch architecture becomes checked artifact sets, one per tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from fleet_protocol.errors import ConfigError
from shoal_cli.console import bytes_text, count_text, error_console, print_json, print_rows
from shoal_cli.options import parse_floats, parse_heads, parse_ints, parse_settings

if TYPE_CHECKING:
    from trainer_export.artifact_set import TierReport

__all__ = ["add_to"]


def _export(
    arch: Annotated[str, typer.Option(help="Name of the architecture: one of the zoo, or of --models.")],
    widths: Annotated[str, typer.Option(help="Width ratios, for example 1,0.5,1/16.")] = "1",
    depths: Annotated[str, typer.Option(help="Depths in blocks, for example 2,4; by default the full depth.")] = "",
    out: Annotated[Path, typer.Option(help="Artifact folder.")] = Path("artifacts"),
    models: Annotated[Path | None, typer.Option(help="Python file with architectures of your own.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the architecture, for example channels=32,64.")
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option("--head", help="Labels of a tier with a head of its own, for example w1.00-d2=5."),
    ] = None,
    formats: Annotated[str, typer.Option(help="Any of onnx and ort-training.")] = "onnx,ort-training",
    momentum: Annotated[float, typer.Option(help="SGD momentum; 0 for none.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 5e-4,
    clip_norm: Annotated[float, typer.Option(help="Bound of the global gradient norm; 0 for none.")] = 1.0,
    proximal: Annotated[bool, typer.Option("--proximal", help="Add the proximal term that FedProx needs.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the initial global weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Lower the training step of an architecture for each tier, check it against PyTorch, and publish the sets."""
    try:
        from models.registry import Registry, infer_layout  # noqa: PLC0415  (torch: seconds)
        from trainer_export.artifact_set import FORMATS, Progress, export_architecture  # noqa: PLC0415
        from trainer_export.recipe import Recipe  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(f"exporting needs the extra `export` ({error.name} is not installed)") from error

    named = [part.strip() for part in formats.split(",")]
    unknown = [name for name in named if name not in FORMATS]
    if unknown:
        raise ConfigError(f"--formats: no format {unknown[0]!r}; there are {', '.join(FORMATS)}")
    wanted = tuple(name for name in FORMATS if name in named)
    registry = Registry.zoo() if models is None else Registry.zoo().with_file(models)
    architecture = registry.get(arch)
    chosen = architecture.settings(parse_settings("--set", settings or []))
    layout = infer_layout(architecture, chosen)
    depth_list: tuple[int | None, ...] = parse_ints("--depths", depths) if depths else (None,)
    tiers = tuple(layout.tier(width, depth) for depth in depth_list for width in parse_floats("--widths", widths))
    own_heads = parse_heads("--head", heads or [])
    recipe = Recipe(momentum=momentum, weight_decay=weight_decay, clip_norm=clip_norm or None, proximal=proximal)

    with ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=error_console(),
        transient=True,
    ) as bar:
        shown = bar.add_task(f"exporting {arch}", total=len(tiers))

        def progress(state: Progress) -> None:
            bar.update(shown, description=f"{state.tier}: {state.stage}", completed=state.done, total=state.total)

        reports = export_architecture(
            architecture,
            chosen,
            tiers,
            recipe,
            out,
            formats=wanted,
            seed=seed,
            progress=progress,
            heads=own_heads,
        )

    _print_reports(reports, f"{arch} in {out}", as_json=as_json)


def _print_reports(reports: Sequence[TierReport], title: str, *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "tier": report.tier.id,
                    "parameters": report.parameters,
                    "flops_per_sample": report.flops_per_sample,
                    "graph_bytes": report.graph_bytes,
                    "peak_memory_bytes": report.peak_memory_bytes,
                    "worst_deviation": report.worst_deviation,
                    "skipped": dict(report.skipped),
                }
                for report in reports
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
            }
            for report in reports
        ],
        empty="nothing was exported",
    )
    for name, reason in {name: reason for report in reports for name, reason in report.skipped.items()}.items():
        error_console().print(f"[yellow]{name} was skipped:[/] {reason}", soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the command.

    Args:
        app: the application.
    """
    app.command("export")(_export)
