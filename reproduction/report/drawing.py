"""Draw the plots of a table from its stored curves."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reproduction.experiment import Arm, Experiment, Scale
from reproduction.figures import stand_ins
from reproduction.stored import Point
from simulation.results.figures import save
from simulation.results.history import ACCURACY, Quantity
from simulation.results.plots import Curve, accuracy_over, over_rounds
from simulation.results.tier_plots import Widths, widths_by_device

# Curves in one panel, as many as there are colours; more are drawn in panels by the data of an arm.
_MOST_TOGETHER = 7


def draw(experiment: Experiment, scale: Scale, points: Sequence[Point], folder: Path) -> None:
    """Write the plots of a table.

    There is one for each quantity that the figures are taken from, accuracy over time and bytes
    where a figure is of a time or at a number of bytes, and the widths of the devices where they
    choose them, of the first seed of each arm.

    Raises:
        StorageError: if a file cannot be written.
    """
    arms: list[Arm] = []
    for arm in experiment.arms:
        if any(point.arm == arm.name for point in points):
            arms.append(arm)
    title = experiment.title
    for published, here in stand_ins(experiment, {(arm.name, scale) for arm in arms}):
        title += f" ({here} stands for {published}, of which the published figures are)"
    plots = _plots_of_quantities(arms, points, title)
    widths: list[Widths] = []
    for arm in arms:
        widths += _widths(arm, scale, points)
    if widths:
        plots["widths"] = widths_by_device(widths, title=title)
    for name, figure in plots.items():
        save(figure, folder / f"{experiment.table}-{name}.png")


def _plots_of_quantities(
    arms: Sequence[Arm], points: Sequence[Point], title: str
) -> dict[str, Any]:
    """Draw every quantity over rounds, and accuracy also over what figures measure it by."""
    quantities: list[Quantity] = []
    costs: set[str] = set()
    for arm in arms:
        for measure in arm.measures:
            costs.add(measure.over)
            if measure.quantity is not None and measure.quantity not in quantities:
                quantities.append(measure.quantity)
    plots: dict[str, Any] = {}
    for quantity in quantities:
        curves = _curves(arms, points, quantity)
        if not curves:
            continue
        plots[quantity.name] = over_rounds(curves, quantity=quantity, title=title)
        if quantity == ACCURACY:
            plots |= _accuracy_plots(costs, curves, title)
    return plots


def _accuracy_plots(costs: set[str], curves: Sequence[Curve], title: str) -> dict[str, Any]:
    """Draw accuracy over each cost that figures measure it by."""
    plots: dict[str, Any] = {}
    if "time" in costs:
        plots["time"] = accuracy_over("time", curves, title=title)
    if "bytes" in costs:
        plots["bytes"] = accuracy_over("bytes", curves, title=title)
    return plots


def _runs(arm: Arm, points: Sequence[Point]) -> list[list[Point]]:
    """Return the curves of an arm, seed by seed."""
    runs: dict[int, list[Point]] = {}
    for point in points:
        if point.arm == arm.name:
            runs.setdefault(point.seed, []).append(point)
    return [runs[seed] for seed in sorted(runs)]


def _curves(arms: Sequence[Arm], points: Sequence[Point], quantity: Quantity) -> list[Curve]:
    """Return the curves of arms with figures of a quantity, as far as it was evaluated."""
    curves: list[Curve] = []
    for arm in arms:
        curve = _curve(arm, _runs(arm, points), quantity)
        if curve is not None:
            curves.append(curve)
    if len(curves) <= _MOST_TOGETHER:
        return curves
    panels: list[Curve] = []
    for curve in curves:
        label, _, panel = curve.label.partition("/")
        panels.append(replace(curve, label=label, panel=panel))
    return sorted(panels, key=lambda curve: curve.panel)


def _curve(arm: Arm, runs: list[list[Point]], quantity: Quantity) -> Curve | None:
    """Return the curve of an arm, unless it has no figure of the quantity or a run no value."""
    plotted = ""
    targets: list[float] = []
    for measure in arm.measures:
        if measure.quantity != quantity:
            continue
        if measure.target is None:
            plotted = measure.name
        else:
            targets.append(measure.target)
    if not plotted or not all(_is_evaluated(run, quantity) for run in runs):
        return None
    published = arm.published.get(plotted)
    share = 100.0 if quantity.share else 1.0
    value = None if published is None else published.value / share
    return Curve(arm.name, runs, value, targets=targets)


def _is_evaluated(run: Sequence[Point], quantity: Quantity) -> bool:
    return any(quantity.value(point) is not None for point in run)


def _widths(arm: Arm, scale: Scale, points: Sequence[Point]) -> list[Widths]:
    """Return the widths of an arm's first seed, if its devices choose any."""
    run = _runs(arm, points)[0]
    by_round: dict[int, tuple[float | None, ...]] = {}
    for point in run:
        if point.widths:
            by_round[point.round] = point.by_device
    if not by_round:
        return []
    seed = run[0].seed
    devices = [kind.type for kind in arm.config(scale, seed).devices.kinds]
    return [Widths(f"{arm.name}, seed {seed}", devices, by_round)]
