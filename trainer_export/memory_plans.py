"""Plans of a tier: its training step once more for each bound of memory that it exceeds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from trainer_export.formats.files import GraphFile
from trainer_export.memory_bound import peak_of_step, within_memory
from trainer_export.recomputing import written_bytes

_MB = 1_000_000


@dataclass(frozen=True)
class MemoryPlan:
    """The training step of a tier within a bound of memory.

    Attributes:
        name: name of the plan: its bound, such as ``48MB``.
        changed: the graphs that differ from those of the tier.
        graphs: all portable graphs of the plan, the training step first.
        recomputed_share: bytes that the step writes in addition, as a share of those that the
            tier's step writes.
    """

    name: str
    changed: tuple[GraphFile, ...]
    graphs: tuple[GraphFile, ...]
    recomputed_share: float


def plans_within(
    graphs: Sequence[GraphFile], bounds: Sequence[float], tier: str
) -> tuple[MemoryPlan, ...]:
    """Return a plan for each bound that no plan before it is within, the largest first.

    Args:
        graphs: the portable graphs of the tier, the training step first.
        bounds: largest peak memory of a step in bytes, for batches of 32.
        tier: id of the tier, for the error.

    Raises:
        ExportError: a step exceeds a bound, even if it recomputes all it can.
    """
    plans: list[MemoryPlan] = []
    peak = peak_of_step(graphs[0].model)
    work = written_bytes(graphs[0].model)
    for bound in sorted(set(bounds), reverse=True):
        if peak <= bound:
            continue
        plan = _plan(graphs, bound, tier, work)
        peak = peak_of_step(plan.graphs[0].model)
        plans.append(plan)
    return tuple(plans)


def _plan(graphs: Sequence[GraphFile], bound: float, tier: str, work: int) -> MemoryPlan:
    """Return the plan of a bound; `work` is what the tier's step writes, in bytes."""
    name = f"{bound / _MB:g}MB"
    changed: list[GraphFile] = []
    all_graphs: list[GraphFile] = []
    for old, graph in zip(graphs, within_memory(graphs, bound, tier), strict=True):
        if graph is old:
            all_graphs.append(old)
            continue
        path = PurePosixPath(old.path)
        # In the same folder as the file of the tier.
        renamed = replace(graph, path=str(path.with_name(f"{path.stem}-{name}{path.suffix}")))
        changed.append(renamed)
        all_graphs.append(renamed)
    share = written_bytes(all_graphs[0].model) / work - 1
    return MemoryPlan(name, tuple(changed), tuple(all_graphs), share)
