"""Which coordinates of a model the updates of a run have covered: the plans that the store tells,
counted by unit.

A coordinate is a unit of a width axis in a block: channels may be trained in one block and not in a
deeper one. The label rule is left out, for it concerns rows of labels, which no plan cuts.
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
from models.layout import HEAD, STEM, Layout, block_name
from models.plan import Plan
from models.tier import Tier

MOST_CELLS = 96  # of one axis: more than a page can show

Row = tuple[str, str]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CoveredAxis:
    """One axis in one block.

    Attributes:
        block: ``stem``, ``block1`` ..., or ``head``.
        axis: name of a width axis that parameters of the block have; empty where they have none.
        covered: units that at least one merged update held.
        counts: merged updates that held a unit, each a mean over the units of one cell.
        held: share of a cell that the plans of the newest round looked at hold.
    """

    block: str
    axis: str
    size: int
    covered: int
    counts: tuple[float, ...]
    held: tuple[float, ...]


@dataclass(frozen=True)
class Coverage:
    """What was covered.

    Attributes:
        round: the last round that is counted.
        rounds: the newest round of the run.
        updates: merged updates that are counted.
        tiers: every tier that was asked in the run, largest first.
        devices: every device that was asked, by id.
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
    """Count what the merged updates of a run held: up to a round, of a tier or of a device, where
    one is given.

    Raises:
        ConfigError: no such round, tier or device was ever asked.
    """
    tasks = store.planned_tasks(context.run)
    newest = tasks[-1].round if tasks else 0
    tiers = sorted({item.tier for item in tasks}, key=Tier.parse, reverse=True)
    devices = sorted({item.device for item in tasks})
    for name, wanted, known in (("tier", tier, tiers), ("device", device, devices)):
        if wanted is not None and wanted not in known:
            there = ", ".join(known[:20]) or "none"
            raise ConfigError(f"run {context.run} asked no {name} {wanted!r}; it asked {there}")
    until = newest if upto is None else upto
    if until > newest:
        raise ConfigError(f"run {context.run} has no round {until}; its rounds: 1 to {newest}")
    chosen = [
        item
        for item in tasks
        if item.round <= until and tier in {None, item.tier} and device in {None, item.device}
    ]
    merged = [item for item in chosen if item.phase == TaskPhase.MERGED.value]
    rows = _rows(context.artifacts.layout)
    counts = _counted(context, rows, merged)
    held = _counted(context, rows, [item for item in chosen if item.round == chosen[-1].round])
    return Coverage(
        run=context.run,
        round=until,
        rounds=newest,
        updates=len(merged),
        tiers=tuple(tiers),
        devices=tuple(devices),
        axes=tuple(
            CoveredAxis(
                block=row[0],
                axis=row[1],
                size=len(counts[row]),
                covered=int(np.count_nonzero(counts[row])),
                counts=_cells(counts[row]),
                held=_cells(np.minimum(held[row], 1)),
            )
            for row in rows
        ),
    )


def _rows(layout: Layout) -> list[Row]:
    """The axes of each block, in the order of the model.

    A block that no width cuts is one coordinate.
    """
    blocks = [
        STEM,
        *(block_name(number) for number in range(1, layout.depth + 1)),
        HEAD,
    ]
    rows: list[Row] = []
    for block in blocks:
        there = [item for item in layout.parameters if item.block == block]
        axes = dict.fromkeys(
            part.axis for item in there for dim in item.dims for part in dim.segments
        )
        cut = [name for name in axes if layout.axes[name].kind is AxisKind.WIDTH]
        rows += [(block, name) for name in cut or [""]] if there else []
    return rows


def _counted(
    context: RunContext, rows: Sequence[Row], tasks: Sequence[PlannedTask]
) -> dict[Row, Floats]:
    layout = context.artifacts.layout
    counts = {row: np.zeros(layout.axes[row[1]].size if row[1] else 1) for row in rows}
    sharing = {(task.plan_key, task.version): task for task in tasks}
    stays: dict[str, Plan] = {}  # plans that need not be made again for every version
    for key, times in Counter((task.plan_key, task.version) for task in tasks).items():
        task = sharing[key]
        plan = stays.get(key[0])
        if plan is None:
            request = PlanRequest(
                Tier.parse(task.tier), task.device, task.version, context.config.seed
            )
            plan = context.strategy.plan(request).plan
        if plan.kind == "static":
            stays[key[0]] = plan
        for row in rows:
            if row[0] in plan.blocks:
                counts[row] += times * _held(layout, plan, row)
    return counts


def _held(layout: Layout, plan: Plan, row: Row) -> Floats | float:
    block, axis = row
    if not axis:
        return 1.0
    names = {item.name for item in layout.parameters if item.block == block}
    own = [units for (name, _, of), units in plan.overrides.items() if of == axis and name in names]
    units = own or [plan.indices[axis]]
    return np.bincount(np.concatenate(units), minlength=layout.axes[axis].size) / len(units)


def _cells(values: Floats) -> tuple[float, ...]:
    cells = np.array_split(values, min(len(values), MOST_CELLS))
    return tuple(round(float(cell.mean()), 4) for cell in cells)
