"""Computes cheap values again instead of keeping them, if that lowers a graph's peak of memory.

While it lowers a peak that is felt, a value that waits for a late consumer is dropped and computed
again just before that consumer, from values that are alive there anyway (both halves of a max-pool
from the normalised map).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
from onnx import helper

from trainer_export.graph import values_read
from trainer_export.sized_graph import VIEWS, SizedGraph, attribute

_SMALL_BYTES = 64 * 1024  # values below this may live as long as they like
_LITTLE_BYTES = 8 * 1024 * 1024  # a peak that is little beside the 100 MB of a process that trains
_WORK_FACTOR = 8  # bytes computed again per byte saved, at most
_THIN_COLUMNS = 16  # a product over so few columns costs little more than writing its result

_COMMUTATIVE = frozenset({"Add", "Max", "Min", "Mul"})
_CHEAP = VIEWS | _COMMUTATIVE | {"HardSigmoid", "Pad", "Relu", "Slice", "Split", "Sub", "Transpose"}


class _TooDear(Exception):
    """A value cannot be had again for little."""


@dataclass(frozen=True)
class _Peak:
    """The worst moment of a run."""

    nbytes: int  # of live values, inputs, outputs and constants left out
    index: int  # of the node that runs then
    alive: frozenset[str]  # values (not views) that lie in memory meanwhile


class _Reads:
    """Which values nodes read; schedules that differ in a few nodes share it."""

    def __init__(self) -> None:
        # A node is kept with what it reads, so that no other one takes its identity.
        self._by_node: dict[int, tuple[onnx.NodeProto, frozenset[str]]] = {}

    def of(self, node: onnx.NodeProto) -> frozenset[str]:
        """Return the values that a node reads, those that a graph inside it reads among them."""
        entry = self._by_node.get(id(node))
        if entry is None:
            entry = (node, frozenset(values_read(node)))
            self._by_node[id(node)] = entry
        return entry[1]


class _Schedule:
    """An order of nodes, and how long each value lives in it.

    Args:
        nodes: in the order in which they run.
        sizes: bytes of values.
        fixed: values that live outside of a run: inputs, outputs, constants.
        reads: what nodes read.
    """

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        sizes: Mapping[str, int],
        fixed: frozenset[str],
        reads: _Reads,
    ) -> None:
        self.nodes = list(nodes)
        self.sizes = dict(sizes)
        self.fixed = fixed
        self.reads = reads
        # For each node whose memory it reads.
        self._read_roots: list[set[str]] = []
        self.owner: dict[str, str] = {}
        self.uses: dict[str, list[int]] = {}
        self.producer: dict[str, onnx.NodeProto] = {}
        for index, node in enumerate(self.nodes):
            if node.op_type in VIEWS:
                self.owner[node.output[0]] = self.root(node.input[0])
            self.producer.update(dict.fromkeys(node.output, node))
            roots = {self.root(name) for name in reads.of(node)}
            self._read_roots.append(roots)
            for name in roots:
                self.uses.setdefault(name, []).append(index)
        self.outside = fixed | {self.root(name) for name in fixed}

    def root(self, name: str) -> str:
        """Return the value whose memory a name means."""
        return self.owner.get(name, name)

    @cached_property
    def peak(self) -> _Peak:
        """The worst moment."""
        live = 0
        worst = _Peak(0, 0, frozenset())
        alive: set[str] = set()
        for index, node in enumerate(self.nodes):
            new = []
            for name in node.output:
                if self._has_memory(name):
                    new.append(name)
            alive.update(new)
            live += sum(self.sizes.get(name, 0) for name in new)
            if live > worst.nbytes:
                worst = _Peak(live, index, frozenset(alive))
            for name in self._read_roots[index].union(new):
                last_use = self.uses.get(name, [index])[-1]
                if name in alive and last_use <= index:
                    alive.discard(name)
                    live -= self.sizes.get(name, 0)
        return worst

    def _has_memory(self, name: str) -> bool:
        """Return whether an output of a node lies in memory that the run takes for it."""
        return bool(name) and name not in self.owner and name not in self.outside


def compute_again(graph: SizedGraph) -> None:
    """Drop and recompute values, one after the other.

    It ends when the peak is little or goes down no more.
    """
    fixed = set()
    for value in (*graph.proto.input, *graph.proto.output):
        fixed.add(value.name)
    fixed.update(tensor.name for tensor in graph.proto.initializer)
    # Sizes of the graph as it is now, rewritten since it was measured.
    model = helper.make_model(graph.proto, opset_imports=[helper.make_opsetid("", 18)])
    sizes = SizedGraph(model).sizes
    schedule = _Schedule(graph.proto.node, sizes, frozenset(fixed), _Reads())
    peak = schedule.peak
    while peak.nbytes > _LITTLE_BYTES:
        better = _improved(graph, schedule, peak)
        if better is None:
            break
        schedule = better
        peak = schedule.peak
    graph.replace(schedule.nodes)


def _improved(graph: SizedGraph, schedule: _Schedule, peak: _Peak) -> _Schedule | None:
    """Return the schedule with one value recomputed so that its peak is lower.

    The largest such value comes first, and of equal ones the first by name, so that the result
    does not depend on the order of a set.
    """
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
            candidate = _recomputed(graph, schedule, name, late)
        except _TooDear:
            continue
        if candidate.peak.nbytes < peak.nbytes:
            return candidate
    return None


def _recomputed(graph: SizedGraph, schedule: _Schedule, target: str, late: int) -> _Schedule:
    """Return the schedule in which a value is computed again before a late consumer.

    Args:
        graph: gives names, and shapes.
        schedule: the order of nodes so far.
        target: the value.
        late: index of the first consumer that reads the copy.

    Raises:
        _TooDear: it costs too much.
    """
    copies = _Copies(graph, schedule, target, late)
    tail = []
    for node in schedule.nodes[late:]:
        if not any(schedule.root(name) in copies.targets for name in node.input):
            tail.append(node)
            continue
        inputs = []
        for name in node.input:
            is_target = schedule.root(name) in copies.targets
            inputs.append(copies.copy_of(name) if is_target else name)
        copy = _copied(node)
        copy.input.extend(inputs)
        tail.append(copy)
    if copies.work() > _WORK_FACTOR * schedule.sizes[target]:
        raise _TooDear
    nodes = [*schedule.nodes[:late], *copies.nodes, *tail]
    return _Schedule(nodes, copies.sizes, schedule.fixed, schedule.reads)


class _Copies:
    """The nodes that compute a value again, and all that is not alive then of what they read."""

    def __init__(self, graph: SizedGraph, schedule: _Schedule, target: str, late: int) -> None:
        self.targets = set(schedule.producer[target].output)
        self.nodes: list[onnx.NodeProto] = []
        self.sizes = dict(schedule.sizes)
        self._graph = graph
        self._schedule = schedule
        self._late = late
        self._renamed: dict[str, str] = {}

    def copy_of(self, name: str) -> str:
        """Return the name of a value computed again, or its own if it is alive then."""
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
        """Return the bytes that the copies write."""
        total = 0
        for node in self.nodes:
            if node.op_type not in VIEWS:
                total += sum(self.sizes[name] for name in node.output)
        return total

    def _copy(self, node: onnx.NodeProto) -> None:
        thin = _is_thin(self._graph, node)
        if node.op_type not in _CHEAP and not thin:
            raise _TooDear
        inputs = [self.copy_of(name) for name in node.input]
        if node.op_type in _COMMUTATIVE and inputs == list(node.input):
            # Another expression for the same value, which the runtime does not merge with the
            # first.
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
    """Make a product another expression, which the runtime does not merge with the first.

    Beta scales nothing here, so it may be any number of its own.
    """
    kept = []
    for setting in node.attribute:
        if setting.name != "beta":
            kept.append(setting)
    number = float(node.output[0].rpartition(".")[2])
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("beta", number)])


def _stays(schedule: _Schedule, root: str, late: int) -> bool:
    """Return whether a value is alive at a node anyway, or is so small that it may as well be."""
    if root in schedule.outside or schedule.sizes.get(root, 0) < _SMALL_BYTES:
        return True
    return schedule.uses.get(root, [-1])[-1] >= late
