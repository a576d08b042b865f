"""Recomputes cheap values instead of keeping them, if that lowers a graph's peak memory.

While this lowers a significant peak, a value that waits for a late consumer is dropped and
recomputed just before that consumer from values that are alive there anyway (for example, both
halves of a max pooling from the normalised map).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
from onnx import helper

from trainer_export.graph import values_read
from trainer_export.sized_graph import VIEWS, SizedGraph, attribute

_SMALL_BYTES = 64 * 1024  # values below this size are never recomputed
_LITTLE_BYTES = 8 * 1024 * 1024  # a small peak beside the 100 MB of a process
_WORK_FACTOR = 8  # largest number of recomputed bytes per saved byte
_THIN_COLUMNS = 16  # a product over so few columns costs little more than its result

_COMMUTATIVE = frozenset({"Add", "Max", "Min", "Mul"})
_CHEAP = VIEWS | _COMMUTATIVE | {"HardSigmoid", "Pad", "Relu", "Slice", "Split", "Sub", "Transpose"}


class _TooExpensiveError(Exception):
    """Recomputing a value is too expensive."""


@dataclass(frozen=True)
class _Peak:
    """The moment of peak memory of a run."""

    nbytes: int  # bytes of live values, without inputs, outputs and constants
    index: int  # index of the node that runs then
    alive: frozenset[str]  # values (not views) that are in memory then


@dataclass(frozen=True)
class _NodeFacts:
    """The facts about a node that a schedule needs; reading them from the node takes longer."""

    is_view: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: frozenset[str]  # including those of its inner graphs


class _Facts:
    """Caches the facts of nodes; schedules that differ in a few nodes share it."""

    def __init__(self) -> None:
        # The node is kept with its facts, so that no other object gets its id.
        self._by_node: dict[int, tuple[onnx.NodeProto, _NodeFacts]] = {}

    def of(self, node: onnx.NodeProto) -> _NodeFacts:
        """Return the facts of a node."""
        entry = self._by_node.get(id(node))
        if entry is None:
            facts = _NodeFacts(
                node.op_type in VIEWS,
                tuple(node.input),
                tuple(node.output),
                frozenset(values_read(node)),
            )
            entry = (node, facts)
            self._by_node[id(node)] = entry
        return entry[1]


class _Schedule:
    """An order of nodes, and the lifetime of each value in it.

    Args:
        nodes: the nodes in the order in which they run.
        sizes: sizes of values in bytes.
        fixed: values that live outside a run: inputs, outputs, constants.
        facts: of the nodes.
    """

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        sizes: Mapping[str, int],
        fixed: frozenset[str],
        facts: _Facts,
    ) -> None:
        self.nodes = list(nodes)
        self.sizes = dict(sizes)
        self.fixed = fixed
        self.facts = facts
        self._by_index = [facts.of(node) for node in self.nodes]
        # The values whose memory each node reads.
        self._read_roots: list[set[str]] = []
        self.owner: dict[str, str] = {}
        self.uses: dict[str, list[int]] = {}
        self.producer: dict[str, onnx.NodeProto] = {}
        for index, node in enumerate(self.nodes):
            of_node = self._by_index[index]
            if of_node.is_view:
                self.owner[of_node.outputs[0]] = self.root(of_node.inputs[0])
            for name in of_node.outputs:
                self.producer[name] = node
            roots = {self.root(name) for name in of_node.reads}
            self._read_roots.append(roots)
            for name in roots:
                self.uses.setdefault(name, []).append(index)
        self.outside = fixed | {self.root(name) for name in fixed}

    def root(self, name: str) -> str:
        """Return the value that owns the memory of a name."""
        return self.owner.get(name, name)

    @cached_property
    def peak(self) -> _Peak:
        """Return the moment of peak memory."""
        nbytes = 0
        peak = 0
        for index, live in enumerate(self._live_bytes()):
            if live > nbytes:
                nbytes = live
                peak = index
        return _Peak(nbytes, peak, self._alive_at(peak))

    def has_peak_below(self, nbytes: int) -> bool:
        """Return whether fewer bytes are live at every moment."""
        return all(live < nbytes for live in self._live_bytes())

    def _live_bytes(self) -> Iterator[int]:
        """Yield the bytes of live values while each node runs."""
        live = 0
        alive: set[str] = set()
        for index, facts in enumerate(self._by_index):
            new = []
            for name in facts.outputs:
                if self._has_memory(name):
                    new.append(name)
            alive.update(new)
            live += sum(self.sizes.get(name, 0) for name in new)
            yield live
            for name in self._read_roots[index].union(new):
                if name in alive and self._last_use(name, index) <= index:
                    alive.discard(name)
                    live -= self.sizes.get(name, 0)

    def _alive_at(self, moment: int) -> frozenset[str]:
        """Return the values that are in memory while a node runs."""
        alive = set()
        for index, facts in enumerate(self._by_index[: moment + 1]):
            for name in facts.outputs:
                if self._has_memory(name) and self._last_use(name, index) >= moment:
                    alive.add(name)
        return frozenset(alive)

    def _last_use(self, name: str, index: int) -> int:
        """Return the index of the last node that reads a value; if none does, the given one."""
        uses = self.uses.get(name)
        return uses[-1] if uses else index

    def _has_memory(self, name: str) -> bool:
        """Return whether the run allocates memory for an output of a node."""
        return bool(name) and name not in self.owner and name not in self.outside


def compute_again(graph: SizedGraph) -> None:
    """Drop and recompute values, one after the other.

    It ends when the peak is small or cannot be lowered further.
    """
    fixed = set()
    for value in (*graph.proto.input, *graph.proto.output):
        fixed.add(value.name)
    fixed.update(tensor.name for tensor in graph.proto.initializer)
    # Sizes of the current graph, which was rewritten since the last measurement.
    model = helper.make_model(graph.proto, opset_imports=[helper.make_opsetid("", 18)])
    sizes = SizedGraph(model).sizes
    schedule = _Schedule(graph.proto.node, sizes, frozenset(fixed), _Facts())
    peak = schedule.peak
    while peak.nbytes > _LITTLE_BYTES:
        better = _improved(graph, schedule, peak)
        if better is None:
            break
        schedule = better
        peak = schedule.peak
    graph.replace(schedule.nodes)


def _improved(
    graph: SizedGraph,
    schedule: _Schedule,
    peak: _Peak,
) -> _Schedule | None:
    """Return the schedule with one value recomputed so that its peak is lower.

    The largest such value is chosen first, and among equals the first by name, so that the result
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
        except _TooExpensiveError:
            continue
        if candidate.has_peak_below(peak.nbytes):
            return candidate
    return None


def _recomputed(
    graph: SizedGraph,
    schedule: _Schedule,
    target: str,
    late: int,
) -> _Schedule:
    """Return the schedule in which a value is recomputed before a late consumer.

    Args:
        graph: gives names, and shapes.
        schedule: the order of nodes so far.
        target: the value.
        late: index of the first consumer that reads the copy.

    Raises:
        _TooDear: recomputing costs too much.
    """
    copies = _Copies(graph, schedule, target, late)
    tail = []
    for node in schedule.nodes[late:]:
        read = schedule.facts.of(node).inputs
        if not any(schedule.root(name) in copies.targets for name in read):
            tail.append(node)
            continue
        inputs = []
        for name in read:
            is_target = schedule.root(name) in copies.targets
            inputs.append(copies.copy_of(name) if is_target else name)
        copy = _copied(node)
        copy.input.extend(inputs)
        tail.append(copy)
    if copies.work() > _WORK_FACTOR * schedule.sizes[target]:
        raise _TooExpensiveError
    nodes = [*schedule.nodes[:late], *copies.nodes, *tail]
    return _Schedule(nodes, copies.sizes, schedule.fixed, schedule.facts)


class _Copies:
    """The nodes that recompute a value and all their inputs that are not alive then."""

    def __init__(
        self,
        graph: SizedGraph,
        schedule: _Schedule,
        target: str,
        late: int,
    ) -> None:
        self.targets = set(schedule.producer[target].output)
        self.nodes: list[onnx.NodeProto] = []
        self.sizes = dict(schedule.sizes)
        self._graph = graph
        self._schedule = schedule
        self._late = late
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
        if node.op_type not in _CHEAP and not thin:
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


def _stays(schedule: _Schedule, root: str, late: int) -> bool:
    """Return whether a value is alive at a node anyway, or is small enough to keep."""
    if root in schedule.outside or schedule.sizes.get(root, 0) < _SMALL_BYTES:
        return True
    return schedule.uses.get(root, [-1])[-1] >= late
