"""Prints what `shoal export` cut, replaced and published."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.cli.console import bytes_text, count_text, error_console, print_json, print_rows

if TYPE_CHECKING:
    from models.layout import Layout
    from models.tier import Tier
    from models.zoo.conversion import Replacement
    from trainer_export.artifact_set import TierReport


def print_cuts(layout: "Layout", tiers: "Sequence[Tier]", *, as_json: bool) -> None:
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


def print_replacements(replacements: "Sequence[Replacement]", *, as_json: bool) -> None:
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


def print_reports(reports: "Sequence[TierReport]", title: str, *, as_json: bool) -> None:
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
