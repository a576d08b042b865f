"""Computes cheap values again instead of keeping them, where that lowers the peak of a graph's
memory.

While it lowers a peak that is felt, a value that waits for a late consumer is dropped and computed
again just before that consumer, from values that are alive there anyway (both halves of a max-pool
from the normalised map).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


class _Schedule:
    """An order of nodes, and how long each value lives in it; those that are fixed live outside."""

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        sizes: Mapping[str, int],
        fixed: frozenset[str],
    ) -> None:
        self.nodes = list(nodes)
        self.sizes = dict(sizes)
        self.fixed = fixed
        self.owner: dict[str, str] = {}
        self.uses: dict[str, list[int]] = {}
        self.producer: dict[str, onnx.NodeProto] = {}
        for index, node in enumerate(self.nodes):
            if node.op_type in VIEWS:
                self.owner[node.output[0]] = self.root(node.input[0])
            self.producer.update(dict.fromkeys(node.output, node))
            for name in {self.root(name) for name in values_read(node)}:
                self.uses.setdefault(name, []).append(index)
        self.outside = fixed | {self.root(name) for name in fixed}

    def root(self, name: str) -> str:
        """The value whose memory a name means."""
        return self.owner.get(name, name)

    def peak(self) -> _Peak:
        """The worst moment."""
        live = 0
        worst = _Peak(0, 0, frozenset())
        alive: set[str] = set()
        for index, node in enumerate(self.nodes):
            new = [n for n in node.output if n and n not in self.owner and n not in self.outside]
            alive.update(new)
            live += sum(self.sizes.get(name, 0) for name in new)
            if live > worst.nbytes:
                worst = _Peak(live, index, frozenset(alive))
            ended = {self.root(n) for n in values_read(node)} | set(new)
            for name in [n for n in ended if n in alive and self.uses.get(n, [index])[-1] <= index]:
                alive.discard(name)
                live -= self.sizes.get(name, 0)
        return worst


def compute_again(graph: SizedGraph) -> None:
    """Drop and recompute values, one after the other, as long as the peak is not little and goes
    down.
    """
    fixed = frozenset(
        {v.name for v in (*graph.proto.input, *graph.proto.output)}
        | {t.name for t in graph.proto.initializer}
    )
    sizes = SizedGraph(
        helper.make_model(graph.proto, opset_imports=[helper.make_opsetid("", 18)])
    ).sizes
    schedule = _Schedule(graph.proto.node, sizes, fixed)
    peak = schedule.peak()
    while peak.nbytes > _LITTLE_BYTES and (better := _improved(graph, schedule, peak)) is not None:
        schedule = better
        peak = schedule.peak()
    graph.replace(schedule.nodes)


def _improved(graph: SizedGraph, schedule: _Schedule, peak: _Peak) -> _Schedule | None:
    """The schedule with one value recomputed so that its peak is lower, the largest such value
    first.
    """
    waiting = [name for name in peak.alive if schedule.sizes.get(name, 0) >= _SMALL_BYTES]
    for name in sorted(waiting, key=lambda n: (-schedule.sizes[n], n)):
        uses = schedule.uses.get(name, [])
        late = next((index for index in uses if index > peak.index), None)
        if late is None or peak.index in uses:
            continue
        try:
            candidate = _recomputed(graph, schedule, name, late)
        except _TooDear:
            continue
        if candidate.peak().nbytes < peak.nbytes:
            return candidate
    return None


def _recomputed(graph: SizedGraph, schedule: _Schedule, target: str, late: int) -> _Schedule:
    """The schedule in which ``target`` is computed again before the node ``late``, or `_TooDear`
    where that is dear.
    """
    renamed: dict[str, str] = {}
    clones: list[onnx.NodeProto] = []
    sizes = dict(schedule.sizes)
    targets = set(schedule.producer[target].output)

    def again(name: str) -> str:
        if name in renamed:
            return renamed[name]
        root = schedule.root(name)
        node = schedule.producer.get(name)
        if node is None or (root not in targets and _stays(schedule, root, late)):
            return name
        thin = _is_thin(graph, node)
        if node.op_type not in _CHEAP and not thin:
            raise _TooDear
        inputs = [again(i) for i in node.input]
        if node.op_type in _COMMUTATIVE and inputs == list(node.input):
            # another expression for the same value, which the runtime does not merge with the first
            inputs.reverse()
        for output in node.output:
            renamed[output] = graph.name()
            sizes[renamed[output]] = schedule.sizes.get(output, 0)
        clone = onnx.NodeProto()
        clone.CopyFrom(node)
        del clone.input[:], clone.output[:]
        clone.input.extend(inputs)
        clone.output.extend(renamed[output] for output in node.output)
        clone.name = f"{node.op_type}.{clone.output[0]}"
        if thin:
            _set_unlike(clone)
        clones.append(clone)
        return renamed[name]

    tail = []
    for node in schedule.nodes[late:]:
        inputs = [again(name) if schedule.root(name) in targets else name for name in node.input]
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.input[:]
        copy.input.extend(inputs)
        tail.append(copy)
    work = sum(
        sizes[name] for clone in clones if clone.op_type not in VIEWS for name in clone.output
    )
    if work > _WORK_FACTOR * schedule.sizes[target]:
        raise _TooDear
    return _Schedule([*schedule.nodes[:late], *clones, *tail], sizes, schedule.fixed)


def _is_thin(graph: SizedGraph, node: onnx.NodeProto) -> bool:
    """Whether a node is a product over so few columns that it costs little more than writing its
    result.
    """
    shape = (
        graph.shapes.get(node.input[0], ())
        if node.op_type == "Gemm" and len(node.input) == 2
        else ()
    )
    return len(shape) == 2 and shape[0 if attribute(node, "transA") else 1] <= _THIN_COLUMNS


def _set_unlike(node: onnx.NodeProto) -> None:
    """Make a product another expression, which the runtime does not merge with the first: beta
    scales nothing here.
    """
    kept = [attribute for attribute in node.attribute if attribute.name != "beta"]
    del node.attribute[:]
    node.attribute.extend(
        [*kept, helper.make_attribute("beta", float(node.output[0].rpartition(".")[2]))]
    )


def _stays(schedule: _Schedule, root: str, late: int) -> bool:
    """Whether a value is there at a node anyway, or is so small that it may as well be."""
    if root in schedule.outside or schedule.sizes.get(root, 0) < _SMALL_BYTES:
        return True
    return schedule.uses.get(root, [-1])[-1] >= late
