"""Prints the slicing, the conversions and the results of `shoal export`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from shoal.cli.console import bytes_text, count_text, error_console, print_json, print_rows

if TYPE_CHECKING:
    from models.layout import Layout
    from models.tier import Tier
    from models.tier_grid import TierGrid
    from models.zoo.conversion import Replacement
    from trainer_export.packages.search_record import Discovery, Finding
    from trainer_export.tier_report import TierReport


def print_axes(
    title: str, discovery: "Discovery", widths: Sequence[float], *, as_json: bool
) -> None:
    """Print the axes that were found among a constructor's arguments, and what stays whole.

    Args:
        title: the model.
        discovery: what was found.
        widths: widths of the tiers; a column says what each makes of an argument.
        as_json: whether the table goes to standard error, beside JSON.
    """
    rows = []
    for finding in discovery.findings:
        rows.append(_axis_row(finding, widths))
    seconds = f"{discovery.seconds:.1f} s of processor time"
    if not as_json:
        print_rows(f"{title}: axes, found in {seconds}", rows, empty="it has no sizes")
        return
    # Standard output carries only JSON, so the table becomes lines on standard error.
    for row in rows:
        error_console().print(f"{row['argument']}: {row['axis']}", soft_wrap=True)


def _axis_row(finding: "Finding", widths: Sequence[float]) -> dict[str, str]:
    """Return the cells of what was found for some arguments."""
    # A finding without a form keeps its axis whole, with a reason.
    form = finding.form
    row = {
        "argument": " + ".join(finding.places),
        "axis": f"whole: {finding.reason}" if form is None else form.call,
    }
    for width in widths:
        sizes: list[str] = []
        if form is not None:
            sizes = [str(size) for size in form.sizes_at(width).values()]
        row[f"width {width:g}"] = " + ".join(sizes)
    return row


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
            # A tier of less depth lacks the parameters of its last blocks.
            row[tier] = None if shape is None else list(shape)
        rows.append(row)
    if as_json:
        print_json(rows)
        return
    cells = []
    for row in rows:
        cells.append({column: _cell(value) for column, value in row.items()})
    print_rows(f"slicing of {layout.arch}", cells, empty="the model has no parameters")


def _cell(value: object) -> str:
    """Return a value of a row as text."""
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return "" if value is None else str(value)


def print_replacements(replacements: "Sequence[Replacement]", *, as_json: bool) -> None:
    """Print which modules were converted; with JSON output, print to standard error."""
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


def print_omissions(grid: "TierGrid") -> None:
    """Print which tiers do not exist, to standard error."""
    for omission in grid.omissions:
        error_console().print(f"[yellow]{escape(omission)}[/]", soft_wrap=True)


def print_reports(reports: "Sequence[TierReport]", title: str, *, as_json: bool) -> None:
    """Print the results of the export for each tier."""
    if as_json:
        records = []
        for report in reports:
            skipped = dict(report.skipped)
            plans = [vars(plan) for plan in report.plans]
            named = {"tier": report.tier.id, "skipped": skipped, "plans": plans}
            records.append({**vars(report), **named})
        print_json(records)
        return
    rows = []
    for report in reports:
        row = _report_row(report)
        # Most exports train all that they hold.
        if all(exported.trained == exported.parameters for exported in reports):
            del row["trained"]
        if not any(exported.plans for exported in reports):
            del row["plans (repeated work)"]
        rows.append(row)
    print_rows(title, rows, empty="nothing was exported")
    # Most tiers skip the same graphs for the same reason, so each graph is printed once.
    reasons: dict[str, str] = {}
    for report in reports:
        reasons |= report.skipped
    for name, reason in reasons.items():
        why = escape(reason)
        error_console().print(f"[yellow]{escape(name)} was skipped:[/] {why}", soft_wrap=True)


def _report_row(report: "TierReport") -> dict[str, str]:
    """Return the cells of a tier."""
    plans = []
    for plan in report.plans:
        plans.append(f"{bytes_text(plan.peak_memory_bytes)} ({plan.recomputed_share:.0%})")
    return {
        "tier": report.tier.id,
        "parameters": f"{report.parameters:,}",
        "trained": f"{report.trained:,}",
        "FLOPs/sample": count_text(report.flops_per_sample),
        "graphs": bytes_text(report.graph_bytes),
        "peak training memory": bytes_text(report.peak_memory_bytes),
        "plans (repeated work)": ", ".join(plans) or "-",
        "largest deviation": f"{report.worst_deviation:.1e}",
        "made": "unchanged, reused" if report.taken else "now",
    }
