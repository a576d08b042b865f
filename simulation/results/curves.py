"""Curves of a plot: the values of several seeds at the same places.

A curve is a method or a setting with one history per seed. Its line is their mean; its band ranges
from the lowest to the highest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simulation.results.quantities import Judged, Quantity

_GRID_POINTS = 400
Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One line of a plot; consecutive curves with the same panel share it.

    Attributes:
        label: label in the legend.
        histories: the rounds of each seed, in order; at least one seed.
        published: the paper's value, marked at the right edge.
        panel: title of the panel.
        targets: target values, each drawn as a line in its panel.
    """

    label: str
    histories: Sequence[Sequence[Judged]]
    published: float | None = None
    panel: str = ""
    targets: Sequence[float] = ()


@dataclass(frozen=True)
class Band:
    """Values of all seeds at the same places."""

    places: Values  # [places]
    values: Values  # [seeds, places]


def by_round(curve: Curve, quantity: Quantity) -> Band:
    """Return the values at the rounds that every seed evaluated."""
    seeds: list[dict[int, float]] = []
    for rows in curve.histories:
        evaluated: dict[int, float] = {}
        for row in rows:
            value = quantity.value(row)
            if value is not None:
                evaluated[row.round] = value
        seeds.append(evaluated)
    common: list[int] = []
    if seeds:
        # A mean over other seeds at each round would jump.
        rounds_of_seeds = map(set, seeds)
        common = sorted(set.intersection(*rounds_of_seeds))
    values: list[list[float]] = []
    for evaluated in seeds:
        values.append([evaluated[number] for number in common])
    places = np.array(common, dtype=np.float64)
    return Band(places, np.array(values, dtype=np.float64))


def by_spent(curve: Curve, spent: Callable[[Sequence[Judged]], Values], quantity: Quantity) -> Band:
    """Return the values of all seeds on one grid.

    It starts at the latest first value of a seed and ends with the shortest seed.
    """
    seeds: list[Values] = []
    for rows in curve.histories:
        seeds.append(_points(rows, spent(rows), quantity))
    nothing = Band(np.empty(0), np.empty((len(seeds), 0)))
    if not seeds or min(map(len, seeds)) == 0:
        return nothing
    grid = _common_grid(seeds)
    if not grid.size:
        return nothing
    values: list[Values] = []
    for points in seeds:
        places = points[:, 0]
        values.append(np.interp(grid, places, points[:, 1]))
    return Band(grid, np.array(values))


def _common_grid(seeds: Sequence[Values]) -> Values:
    """Return places that all seeds reach; empty if one ends before another begins.

    Args:
        seeds: places and values of each, ``[rounds, 2]``.
    """
    if len(seeds) == 1:
        return seeds[0][:, 0]  # a single seed keeps its own points
    first = -math.inf
    last = math.inf
    for points in seeds:
        first = max(first, points[0, 0])
        last = min(last, points[-1, 0])
    if first > last:
        return np.empty(0)
    # A grid of one place if two ends meet.
    return np.unique(np.linspace(first, last, _GRID_POINTS))


def _points(rows: Sequence[Judged], places: Values, quantity: Quantity) -> Values:
    """Return the places and values of the evaluated rounds, ``[rounds, 2]``."""
    points: list[tuple[float, float]] = []
    for place, row in zip(places, rows, strict=True):
        value = quantity.value(row)
        if value is not None:
            points.append((place, value))
    return np.array(points)
