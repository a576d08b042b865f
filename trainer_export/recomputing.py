"""Recomputes values instead of keeping them, if that lowers a graph's peak memory.

A value that waits for a late consumer is dropped and recomputed just before that consumer from
values that are alive there anyway (for example, both halves of a max pooling from the normalised
map). The nodes that recompute a value are copies of those that computed it, so it has the same
bits. By default, this recomputes only cheap values, while it lowers a significant peak. If a bound
asks for less memory, it also recomputes others (Chen et al., "Training deep nets with sublinear
memory cost", https://arxiv.org/abs/1604.06174).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx
from onnx import helper
from typing_extensions import override

from trainer_export.schedule import Facts, Schedule
from trainer_export.sized_graph import VIEWS, SizedGraph, attribute
from trainer_export.split_parts import without_unread_parts

_SMALL_BYTES = 64 * 1024  # values below this size are never recomputed
_LITTLE_BYTES = 8 * 1024 * 1024  # a small peak beside the 100 MB of a process
_HIGH = 0.95  # share of the peak from which on a moment is high
_THIN_COLUMNS = 16  # a product over so few columns costs little more than its result

_COMMUTATIVE = frozenset({"Add", "Max", "Min", "Mul"})
_CHEAP = VIEWS | _COMMUTATIVE | {"HardSigmoid", "Pad", "Relu", "Slice", "Split", "Sub", "Transpose"}
_POINTWISE = _CHEAP | {
    "Abs",
    "Cast",
    "Concat",
    "Div",
    "Erf",
    "Exp",
    "Expand",
    "Gather",
    "Neg",
    "Pow",
    "Reciprocal",
    "ReduceMean",
    "ReduceSum",
    "Sigmoid",
    "Softmax",
    "Sqrt",
    "Tanh",
    "Where",
}


@dataclass(frozen=True)
class Effort:
    """The nodes that may run again.

    Attributes:
        operators: their operators; None for all except those with an inner graph.
        work: largest number of recomputed bytes per saved byte.
        nodes: largest number of nodes that run again for one value.
    """

    operators: frozenset[str] | None
    work: int
    nodes: int

    def allows(self, node: onnx.NodeProto) -> bool:
        """Return whether a node may run again."""
        if self.operators is not None:
            return node.op_type in self.operators
        return all(entry.type != onnx.AttributeProto.GRAPH for entry in node.attribute)


CHEAP = Effort(_CHEAP, work=8, nodes=400)
"""Views, and operators that only move, add or multiply numbers."""

EFFORTS = (
    CHEAP,
    Effort(_POINTWISE, work=16, nodes=200),
    Effort(None, work=64, nodes=200),
)
"""From the least effort to the most: cheap operators, then norms and activations, then all."""


class Goal(Protocol):
    """The peak that a schedule should have."""

    def is_reached(self, schedule: Schedule) -> bool:
        """Return whether a schedule needs no further change."""

    def better_than(self, schedule: Schedule) -> Callable[[Schedule], bool]:
        """Return a test of whether another schedule is nearer to the goal."""


class SmallPeak(Goal):
    """A peak that is small, or as low as possible."""

    @override
    def is_reached(self, schedule: Schedule) -> bool:
        return schedule.peak.nbytes <= _LITTLE_BYTES

    @override
    def better_than(self, schedule: Schedule) -> Callable[[Schedule], bool]:
        return lambda candidate: candidate.has_peak_below(schedule.peak.nbytes)


@dataclass(frozen=True)
class PeakWithin(Goal):
    """A peak within a bound.

    A schedule is nearer to it if its peak stays or falls and its high moments have fewer bytes in
    total. Two equal blocks have equal peaks: recomputing a value of one of them does not lower the
    highest peak, but is a step towards it.

    Attributes:
        nbytes: the bound.
        nodes: largest number of nodes; near the least possible peak, each value saves little.
    """

    nbytes: int
    nodes: int

    @override
    def is_reached(self, schedule: Schedule) -> bool:
        return schedule.peak.nbytes <= self.nbytes

    @override
    def better_than(self, schedule: Schedule) -> Callable[[Schedule], bool]:
        peak = schedule.peak.nbytes
        # A bound far below would count moments that matter only later.
        level = max(self.nbytes, int(_HIGH * peak))
        excess = schedule.excess(level)

        def is_better(candidate: Schedule) -> bool:
            if len(candidate.nodes) > self.nodes or not candidate.has_peak_below(peak + 1):
                return False
            return candidate.excess(level) < excess

        return is_better


class _TooExpensiveError(Exception):
    """Recomputing a value is too expensive."""


def compute_again(graph: SizedGraph) -> None:
    """Drop and recompute cheap values, until the peak is small or cannot be lowered further."""
    lower_peak(graph, SmallPeak(), (CHEAP,))


def lower_peak(graph: SizedGraph, goal: Goal, efforts: Sequence[Effort]) -> int:
    """Drop and recompute values, one after the other, until a goal is reached.

    Args:
        graph: the graph, whose nodes are replaced.
        goal: when the peak is low enough.
        efforts: tried in order for each value; the next one only if those before lower nothing.

    Returns:
        The peak in bytes, without inputs, outputs and constants.
    """
    schedule = schedule_of(graph)
    while not goal.is_reached(schedule):
        for effort in efforts:
            better = _improved(graph, schedule, goal, effort)
            if better is not None:
                break
        if better is None:
            break
        schedule = better
    graph.replace([*without_unread_parts(graph, schedule.nodes)])
    return schedule.peak.nbytes


def written_bytes(model: onnx.ModelProto) -> int:
    """Return the bytes that all nodes of a graph write, for batches of 32; views write none."""
    sizes = SizedGraph(model).sizes
    total = 0
    for node in model.graph.node:
        if node.op_type not in VIEWS:
            total += sum(sizes.get(name, 0) for name in node.output)
    return total


def schedule_of(graph: SizedGraph) -> Schedule:
    """Return the order in which the nodes of a graph run now."""
    fixed = set()
    for value in (*graph.proto.input, *graph.proto.output):
        fixed.add(value.name)
    fixed.update(tensor.name for tensor in graph.proto.initializer)
    # Sizes of the current graph, which was rewritten since the last measurement.
    model = helper.make_model(graph.proto, opset_imports=[helper.make_opsetid("", 18)])
    sizes = SizedGraph(model).sizes
    return Schedule(graph.proto.node, sizes, frozenset(fixed), Facts())


def _improved(graph: SizedGraph, schedule: Schedule, goal: Goal, effort: Effort) -> Schedule | None:
    """Return the schedule with one value recomputed so that it is nearer to the goal.

    The largest such value is chosen first, and among equals the first by name, so that the result
    does not depend on the order of a set.
    """
    peak = schedule.peak
    is_better = goal.better_than(schedule)
    waiting = []
    for name in peak.alive:
        if schedule.sizes.get(name, 0) >= _SMALL_BYTES:
            waiting.append(name)
    for name in sorted(waiting, key=lambda name: (-schedule.sizes[name], name)):
        uses = schedule.uses.get(name, [])
        late = next((index for index in uses if index > peak.index), None)
        if late is None or peak.index in uses:
            continue
        try:
            candidate = _recomputed(graph, schedule, _Target(name, late, effort))
        except _TooExpensiveError:
            continue
        if is_better(candidate):
            return candidate
    return None


@dataclass(frozen=True)
class _Target:
    """A value to recompute.

    Attributes:
        name: its name.
        late: index of the first consumer that reads the copy.
        effort: the nodes that may run again.
    """

    name: str
    late: int
    effort: Effort


def _recomputed(
    graph: SizedGraph,
    schedule: Schedule,
    target: _Target,
) -> Schedule:
    """Return the schedule in which a value is recomputed before a late consumer.

    Args:
        graph: gives names, and shapes.
        schedule: the order of nodes so far.
        target: the value.

    Raises:
        _TooExpensiveError: recomputing costs too much.
    """
    copies = _Copies(graph, schedule, target)
    late = target.late
    # The recomputed values, and their views.
    replaced = set(copies.targets)
    for name, owner in schedule.owner.items():
        if owner in copies.targets:
            replaced.add(name)
    tail = []
    for node in schedule.nodes[late:]:
        read = schedule.facts.of(node).inputs
        if replaced.isdisjoint(read):
            tail.append(node)
            continue
        inputs = []
        for name in read:
            inputs.append(copies.copy_of(name) if name in replaced else name)
        copy = _copied(node)
        copy.input.extend(inputs)
        tail.append(copy)
    if copies.work() > target.effort.work * schedule.sizes[target.name]:
        raise _TooExpensiveError
    nodes = [*schedule.nodes[:late], *copies.nodes, *tail]
    return Schedule(nodes, copies.sizes, schedule.fixed, schedule.facts)


class _Copies:
    """The nodes that recompute a value and all their inputs that are not alive then."""

    def __init__(
        self,
        graph: SizedGraph,
        schedule: Schedule,
        target: _Target,
    ) -> None:
        self.targets = set(schedule.producer[target.name].output)
        self.nodes: list[onnx.NodeProto] = []
        self.sizes = dict(schedule.sizes)
        self._graph = graph
        self._schedule = schedule
        self._late = target.late
        self._effort = target.effort
        self._begun = 0  # nodes, including those whose inputs are still missing
        self._renamed: dict[str, str] = {}

    def copy_of(self, name: str) -> str:
        """Return the name of a recomputed value, or its original name if it is alive then."""
        if name in self._renamed:
            return self._renamed[name]
        root = self._schedule.root(name)
        node = self._schedule.producer.get(name)
        if node is None:
            return name
        if root not in self.targets and _stays(self._schedule, root, self._late):
            return name
        self._copy(node)
        return self._renamed[name]

    def work(self) -> int:
        """Return the number of bytes that the copies write."""
        total = 0
        for node in self.nodes:
            if node.op_type not in VIEWS:
                total += sum(self.sizes[name] for name in node.output)
        return total

    def _copy(self, node: onnx.NodeProto) -> None:
        thin = _is_thin(self._graph, node)
        if not thin and not self._effort.allows(node):
            raise _TooExpensiveError
        self._begun += 1
        if self._begun > self._effort.nodes:
            raise _TooExpensiveError
        inputs = [self.copy_of(name) for name in node.input]
        if node.op_type in _COMMUTATIVE and inputs == list(node.input):
            # A different expression for the same value, so that the runtime does not merge them.
            inputs.reverse()
        for output in node.output:
            self._renamed[output] = self._graph.name()
            self.sizes[self._renamed[output]] = self._schedule.sizes.get(output, 0)
        copy = _copied(node)
        copy.input.extend(inputs)
        del copy.output[:]
        copy.output.extend(self._renamed[output] for output in node.output)
        copy.name = f"{node.op_type}.{copy.output[0]}"
        if thin:
            _set_unlike(copy)
        self.nodes.append(copy)


def _copied(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a copy of a node without inputs."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.input[:]
    return copy


def _is_thin(graph: SizedGraph, node: onnx.NodeProto) -> bool:
    """Return whether a node is a product over few columns.

    It then costs little more than writing its result.
    """
    if node.op_type != "Gemm" or len(node.input) != 2:
        return False
    shape = graph.shapes.get(node.input[0], ())
    return len(shape) == 2 and shape[0 if attribute(node, "transA") else 1] <= _THIN_COLUMNS


def _set_unlike(node: onnx.NodeProto) -> None:
    """Change a product's expression, so that the runtime does not merge it with the first.

    Beta scales nothing here, so it may be any unique number.
    """
    kept = []
    for setting in node.attribute:
        if setting.name != "beta":
            kept.append(setting)
    number = float(node.output[0].rpartition(".")[2])
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("beta", number)])


def _stays(schedule: Schedule, root: str, late: int) -> bool:
    """Return whether a value is alive at a node anyway, or is small enough to keep."""
    if root in schedule.outside or schedule.sizes.get(root, 0) < _SMALL_BYTES:
        return True
    return schedule.uses.get(root, [-1])[-1] >= late
