"""Draws the plots of a table from its stored curves."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reproduction.experiment import Arm, Experiment, Scale
from reproduction.figures import stand_ins
from reproduction.stored import Point
from simulation.results.curves import Curve
from simulation.results.figures import save
from simulation.results.plots import over_rounds, over_spent
from simulation.results.quantities import ACCURACY, Quantity
from simulation.results.tier_plots import Widths, widths_by_device

Points = Sequence[Point]
Plots = dict[str, Any]
"""Figures of Matplotlib, by the end of their files' names."""
ByDevice = tuple[float | None, ...]
"""The width of each device; None for one that did not take part."""

# Largest number of curves in a panel, one per colour; more are drawn in panels by data set.
_MOST_TOGETHER = 7


def draw(
    experiment: Experiment,
    scale: Scale,
    points: Points,
    folder: Path,
) -> None:
    """Write the plots of a table.

    There is one for each quantity of the figures, accuracy over time or bytes if a figure depends
    on them, and the widths of the devices if they choose them, for the first seed of each arm.

    Raises:
        StorageError: a file cannot be written.
    """
    names = {point.arm for point in points}
    arms: list[Arm] = []
    runs: list[tuple[str, Scale]] = []
    for arm in experiment.arms:
        if arm.name in names:
            arms.append(arm)
            runs.append((arm.name, scale))
    title = experiment.title
    for published, here in stand_ins(experiment, runs):
        # The line of the published figure in the plot is then of other data.
        title += f" ({here} stands for {published}, the data set of the published figures)"
    plots = _plots_of_quantities(arms, points, title)
    widths: list[Widths] = []
    for arm in arms:
        widths += _widths(arm, scale, points)
    if widths:
        plots["widths"] = widths_by_device(widths, title=title)
    for name, figure in plots.items():
        save(figure, folder / f"{experiment.table}-{name}.png")


def _plots_of_quantities(
    arms: Sequence[Arm],
    points: Points,
    title: str,
) -> Plots:
    """Draw every quantity over rounds, and accuracy also over the costs in the figures."""
    quantities: list[Quantity] = []
    costs: set[str] = set()
    for arm in arms:
        for measure in arm.measures:
            costs.add(measure.over)
            quantity = measure.quantity
            if quantity is not None and quantity not in quantities:
                quantities.append(quantity)
    plots: Plots = {}
    for quantity in quantities:
        curves = _curves(arms, points, quantity)
        if not curves:
            continue
        plots[quantity.name] = over_rounds(curves, quantity=quantity, title=title)
        # Costs are only measured for the accuracy of the global model.
        if quantity == ACCURACY:
            plots |= _accuracy_plots(costs, curves, title)
    return plots


def _accuracy_plots(
    costs: set[str],
    curves: Sequence[Curve],
    title: str,
) -> Plots:
    """Draw accuracy over each cost that figures measure it by."""
    plots: Plots = {}
    if "time" in costs:
        plots["time"] = over_spent("time", curves, title=title)
    if "bytes" in costs:
        plots["bytes"] = over_spent("bytes", curves, title=title)
    return plots


def _runs(arm: Arm, points: Points) -> list[list[Point]]:
    """Return the curves of an arm, seed by seed."""
    runs: dict[int, list[Point]] = {}
    for point in points:
        if point.arm == arm.name:
            run = runs.setdefault(point.seed, [])
            run.append(point)
    return [runs[seed] for seed in sorted(runs)]


def _curves(
    arms: Sequence[Arm],
    points: Points,
    quantity: Quantity,
) -> list[Curve]:
    """Return the curves of arms with figures of a quantity, if evaluated."""
    curves: list[Curve] = []
    for arm in arms:
        curve = _curve(arm, _runs(arm, points), quantity)
        if curve is not None:
            curves.append(curve)
    if len(curves) <= _MOST_TOGETHER:
        return curves
    panels: list[Curve] = []
    for curve in curves:
        # Behind the slash is the data set, so arms that can be compared share a panel.
        label, _, panel = curve.label.partition("/")
        panels.append(replace(curve, label=label, panel=panel))
    return sorted(panels, key=lambda curve: curve.panel)


def _curve(
    arm: Arm,
    runs: list[list[Point]],
    quantity: Quantity,
) -> Curve | None:
    """Return the curve of an arm; None if a figure or the values of a run are missing."""
    plotted = ""
    targets: list[float] = []
    for measure in arm.measures:
        if measure.quantity != quantity:
            continue
        # A measure with a target only marks it; the published value is that of the other one.
        if measure.target is None:
            plotted = measure.name
        else:
            targets.append(measure.target)
    if not plotted:
        return None
    for run in runs:
        # A mean over some of the seeds must not be drawn as one over all.
        if not _is_evaluated(run, quantity):
            return None
    value = None
    published = arm.published.get(plotted)
    if published is not None:
        # A paper prints shares in %.
        value = published.value / (100.0 if quantity.share else 1.0)
    return Curve(arm.name, runs, value, targets=targets)


def _is_evaluated(run: Points, quantity: Quantity) -> bool:
    return any(quantity.value(point) is not None for point in run)


def _widths(
    arm: Arm,
    scale: Scale,
    points: Points,
) -> list[Widths]:
    """Return the widths of an arm's first seed, if its devices choose any."""
    # The picture shows one seed, because no device has trained a mean of widths.
    run = _runs(arm, points)[0]
    by_round: dict[int, ByDevice] = {}
    for point in run:
        if point.widths:
            by_round[point.round] = point.by_device
    if not by_round:
        return []
    seed = run[0].seed
    config = arm.config(scale, seed)
    devices = [kind.type for kind in config.devices.kinds]
    return [Widths(f"{arm.name}, seed {seed}", devices, by_round)]
