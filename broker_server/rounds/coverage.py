"""Counts which coordinates of a model a run's updates have covered, from the stored plans.

A coordinate is a unit of a width axis in a block: a channel may be trained in one block and not in
a deeper one. The label rule is left out: it concerns rows of labels, which no plan cuts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from broker_server.rounds.run_context import RunContext
from broker_server.store import Store, TaskPhase
from broker_server.store.task_records import PlannedTask
from broker_server.strategies.strategy import PlanRequest
from fleet_protocol.errors import ConfigError
from models.axes import AxisKind
from models.block_names import HEAD, STEM, block_name
from models.layout import Layout
from models.parameters import Parameter
from models.plan import Plan
from models.tier import Tier

MOST_CELLS = 96  # of one axis: more would not fit a page

Row = tuple[str, str]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CoveredAxis:
    """One axis in one block.

    Attributes:
        block: ``stem``, ``block1`` ..., or ``head``.
        axis: name of a width axis of the block's parameters; empty if they have no such axis.
        covered: number of units that at least one merged update contained.
        counts: merged updates that contained a unit, each as a mean over the units of one cell.
        held: share of a cell that the plans of the newest round examined contain.
    """

    block: str
    axis: str
    size: int
    covered: int
    counts: tuple[float, ...]
    held: tuple[float, ...]


@dataclass(frozen=True)
class Coverage:
    """The coverage of a run.

    Attributes:
        round: the last round that is counted.
        rounds: the newest round of the run.
        updates: number of merged updates that are counted.
        tiers: every tier that was offered in the run, largest first.
        devices: every device that was selected, by id.
        axes: block by block.
    """

    run: str
    round: int
    rounds: int
    updates: int
    tiers: tuple[str, ...]
    devices: tuple[str, ...]
    axes: tuple[CoveredAxis, ...]


def count_coverage(
    store: Store,
    context: RunContext,
    *,
    upto: int | None = None,
    tier: str | None = None,
    device: str | None = None,
) -> Coverage:
    """Count what the merged updates of a run contained.

    Args:
        store: store of the run.
        context: the run.
        upto: the last round that counts; None for the newest.
        tier: count only this tier.
        device: count only this device.

    Raises:
        ConfigError: the round, tier or device was never selected.
    """
    tasks = store.planned_tasks(context.run)
    newest = tasks[-1].round if tasks else 0
    tiers = sorted({task.tier for task in tasks}, key=Tier.parse, reverse=True)
    devices = sorted({task.device for task in tasks})
    _require_asked(context, "tier", tier, tiers)
    _require_asked(context, "device", device, devices)
    until = newest if upto is None else upto
    if until > newest:
        raise ConfigError(f"run {context.run} has no round {until}; its rounds: 1 to {newest}")
    chosen = []
    merged = []
    for task in tasks:
        if task.round > until or tier not in {None, task.tier} or device not in {None, task.device}:
            continue
        chosen.append(task)
        # Asked is not covered: an update that was refused or never came has trained no coordinate
        # of the global model.
        if task.phase == TaskPhase.MERGED.value:
            merged.append(task)
    # Plans are not stored: each is made again from the seed, the device and the version.
    rows = _rows(context.artifacts.layout)
    counts = _count_updates(context, rows, merged)
    held = _count_updates(context, rows, _of_last_round(chosen))
    axes = []
    for row in rows:
        axes.append(_covered_axis(row, counts[row], held[row]))
    return Coverage(
        run=context.run,
        round=until,
        rounds=newest,
        updates=len(merged),
        tiers=tuple(tiers),
        devices=tuple(devices),
        axes=tuple(axes),
    )


def _of_last_round(tasks: Sequence[PlannedTask]) -> list[PlannedTask]:
    """Return the tasks of the last round among some; the tasks are in the order of their rounds."""
    last_tasks = []
    for task in tasks:
        if task.round == tasks[-1].round:
            last_tasks.append(task)
    return last_tasks


def _require_asked(
    context: RunContext, kind: str, wanted: str | None, asked: Sequence[str]
) -> None:
    if wanted is not None and wanted not in asked:
        names = ", ".join(asked[:20]) or "none"
        raise ConfigError(f"run {context.run} selected no {kind} {wanted!r}; it selected {names}")


def _covered_axis(row: Row, counts: Floats, held: Floats) -> CoveredAxis:
    block, axis = row
    return CoveredAxis(
        block=block,
        axis=axis,
        size=len(counts),
        covered=int(np.count_nonzero(counts)),
        counts=_cells(counts),
        # Updates of a round overlap; a unit that several of them contain is still one unit.
        held=_cells(np.minimum(held, 1)),
    )


def _rows(layout: Layout) -> list[Row]:
    """List the width axes of each block, in the order of the model.

    A block that no width cuts is one coordinate.
    """
    blocks = [STEM]
    for number in range(1, layout.depth + 1):
        blocks.append(block_name(number))
    blocks.append(HEAD)
    rows: list[Row] = []
    for block in blocks:
        parameters = _parameters_of(layout, block)
        if not parameters:
            continue
        for axis in _width_axes(layout, parameters) or [""]:
            rows.append((block, axis))
    return rows


def _parameters_of(layout: Layout, block: str) -> list[Parameter]:
    parameters = []
    for spec in layout.parameters:
        if spec.block == block:
            parameters.append(spec)
    return parameters


def _width_axes(layout: Layout, parameters: Sequence[Parameter]) -> list[str]:
    """List the width axes that some parameters have, in the order in which they first occur."""
    names: list[str] = []
    for spec in parameters:
        for dim in spec.dims:
            for segment in dim.segments:
                name = segment.axis
                if layout.axes[name].kind is AxisKind.WIDTH and name not in names:
                    names.append(name)
    return names


def _count_updates(
    context: RunContext, rows: Sequence[Row], tasks: Sequence[PlannedTask]
) -> dict[Row, Floats]:
    """Count for each unit of each row how many updates of the tasks contained it."""
    layout = context.artifacts.layout
    counts: dict[Row, Floats] = {}
    for row in rows:
        _, axis = row
        size = layout.axes[axis].size if axis else 1
        counts[row] = np.zeros(size)
    # Devices may share a plan, which is then made once for all their updates.
    times: Counter[tuple[str, int]] = Counter()
    by_plan: dict[tuple[str, int], PlannedTask] = {}
    for task in tasks:
        # A key names a plan within one version; a moving plan has other units in the next.
        planned = (task.plan_key, task.version)
        times[planned] += 1
        by_plan[planned] = task
    static_plans: dict[str, Plan] = {}  # which are the same for every version
    for (key, version), updates in times.items():
        plan = static_plans.get(key)
        if plan is None:
            plan = _plan_again(context, by_plan[key, version])
        if plan.kind == "static":
            static_plans[key] = plan
        for row in rows:
            if _is_trained(layout, plan, row):
                counts[row] += updates * _held_share(layout, plan, row)
    return counts


def _plan_again(context: RunContext, task: PlannedTask) -> Plan:
    tier = Tier.parse(task.tier)
    request = PlanRequest(tier, task.device, task.version, context.config.seed)
    return context.strategy.plan(request).plan


def _is_trained(layout: Layout, plan: Plan, row: Row) -> bool:
    """Return whether updates of a plan contain an axis of a block.

    A shallow tier lacks whole blocks, and a tier with a trained share holds blocks that it does not
    train.
    """
    block, axis = row
    if block not in plan.blocks:
        return False
    for spec in _parameters_of(layout, block):
        has_axis = not axis or axis in _width_axes(layout, [spec])
        if has_axis and spec.name not in plan.frozen:
            return True
    return False


def _held_share(layout: Layout, plan: Plan, row: Row) -> Floats | float:
    """Return how often each unit of a row occurs in a plan, as a mean over the plan's indices.

    A block may have separate indices for an axis, one array for each parameter that has it.
    """
    block, axis = row
    if not axis:
        return 1.0
    names = {spec.name for spec in _parameters_of(layout, block)}
    own = []
    for (name, _, override_axis), units in plan.overrides.items():
        if override_axis == axis and name in names:
            own.append(units)
    indices = own or [plan.indices[axis]]
    size = layout.axes[axis].size
    return np.bincount(np.concatenate(indices), minlength=size) / len(indices)


def _cells(values: Floats) -> tuple[float, ...]:
    """Return means over at most `MOST_CELLS` cells of equal size."""
    cells = np.array_split(values, min(len(values), MOST_CELLS))
    return tuple(round(float(cell.mean()), 4) for cell in cells)
