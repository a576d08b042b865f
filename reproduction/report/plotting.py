"""Draws the plots of a table from its stored curves alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from reproduction.experiment import Arm, Experiment, Scale
from reproduction.figures import stand_ins
from reproduction.stored import Point
from simulation.results.history import ACCURACY, Quantity
from simulation.results.plots import Curve, Widths, accuracy_over, over_rounds, save, widths_by_device

_MOST_TOGETHER = 7  # curves, which are as many as there are colours; more are drawn apart, by what the methods share


def draw(experiment: Experiment, scale: Scale, points: Sequence[Point], folder: Path) -> None:
    """Write one plot for each quantity that the figures are taken from, and others where these are about more.

    Those are accuracy over time and bytes where a figure is of a time or at so many bytes, and the widths of the
    devices where they choose them, of the first seed of each arm.

    Raises:
        StorageError: a file cannot be written.
    """
    arms = [arm for arm in experiment.arms if any(point.arm == arm.name for point in points)]
    measures = [measure for arm in arms for measure in arm.measures]
    drawn, title = {}, experiment.title
    for published, here in stand_ins(experiment, {(arm.name, scale) for arm in arms}):
        title += f" ({here} stands for {published}, of which the published figures are)"
    for quantity in dict.fromkeys(measure.quantity for measure in measures if measure.quantity is not None):
        if curves := _curves(arms, points, quantity):
            drawn[quantity.name] = over_rounds(curves, quantity=quantity, title=title)
            for what in ("time", "bytes"):
                if quantity == ACCURACY and any(measure.over == what for measure in measures):
                    drawn[what] = accuracy_over(what, curves, title=title)
    if chosen := [widths for arm in arms if (widths := _widths(arm, scale, points))]:
        drawn["widths"] = widths_by_device(chosen, title=title)
    for name, figure in drawn.items():
        save(figure, folder / f"{experiment.table}-{name}.png")


def _runs(arm: Arm, points: Sequence[Point]) -> list[list[Point]]:
    """The curves of an arm, seed by seed."""
    mine = [point for point in points if point.arm == arm.name]
    return [[point for point in mine if point.seed == seed] for seed in sorted({point.seed for point in mine})]


def _curves(arms: Sequence[Arm], points: Sequence[Point], quantity: Quantity) -> list[Curve]:
    """The arms with figures that are taken from a quantity, as far as it was evaluated."""
    curves = []
    for arm in arms:
        histories = _runs(arm, points)
        asked = [measure for measure in arm.measures if measure.quantity == quantity and measure.target is None]
        if asked and all(any(quantity.value(row) is not None for row in rows) for rows in histories):
            figure = arm.published.get(asked[-1].name)
            share = 100.0 if quantity.share else 1.0
            targets = [m.target for m in arm.measures if m.quantity == quantity and m.target is not None]
            published = None if figure is None else figure.value / share
            curves.append(Curve(arm.name, histories, published, targets=targets))
    if len(curves) <= _MOST_TOGETHER:
        return curves
    apart = [replace(item, label=item.label.partition("/")[0], panel=item.label.partition("/")[2]) for item in curves]
    return sorted(apart, key=lambda curve: curve.panel)


def _widths(arm: Arm, scale: Scale, points: Sequence[Point]) -> Widths | None:
    """Those of an arm's first seed; None where the devices choose none."""
    rows = [point for point in _runs(arm, points)[0] if point.widths]
    if not rows:
        return None
    devices = [kind.type for kind in arm.config(scale, rows[0].seed).devices.kinds]
    return Widths(f"{arm.name}, seed {rows[0].seed}", devices, {point.round: point.by_device for point in rows})
