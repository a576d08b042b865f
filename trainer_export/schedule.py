"""An order in which the nodes of a graph run, and the memory that it needs at each moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx

from trainer_export.graph import values_read
from trainer_export.sized_graph import VIEWS


@dataclass(frozen=True)
class Peak:
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


class Facts:
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


class Schedule:
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
        facts: Facts,
    ) -> None:
        self.nodes = list(nodes)
        self.sizes = dict(sizes)
        self.fixed = fixed
        self.facts = facts
        self._by_index = [facts.of(node) for node in self.nodes]
        self.owner: dict[str, str] = {}
        # Not `root`, because a graph has thousands of nodes and is scheduled a hundred times.
        owner_of = self.owner.get
        for of_node in self._by_index:
            if of_node.is_view:
                source = of_node.inputs[0]
                self.owner[of_node.outputs[0]] = owner_of(source, source)
        views = self.owner.keys() & fixed
        self.outside = fixed.union(self.owner[name] for name in views)

    @cached_property
    def uses(self) -> dict[str, list[int]]:
        """The indices of the nodes that read each value, in order."""
        owner_of = self.owner.get
        uses: dict[str, list[int]] = {}
        for index, of_node in enumerate(self._by_index):
            for name in {owner_of(name, name) for name in of_node.reads}:
                uses.setdefault(name, []).append(index)
        return uses

    @cached_property
    def producer(self) -> dict[str, onnx.NodeProto]:
        """The node that computes each value."""
        producer: dict[str, onnx.NodeProto] = {}
        for node, of_node in zip(self.nodes, self._by_index, strict=True):
            for name in of_node.outputs:
                producer[name] = node
        return producer

    def root(self, name: str) -> str:
        """Return the value that owns the memory of a name."""
        return self.owner.get(name, name)

    @cached_property
    def peak(self) -> Peak:
        """Return the moment of peak memory."""
        nbytes = max(self.live_bytes, default=0)
        index = self.live_bytes.index(nbytes) if nbytes else 0
        return Peak(nbytes, index, self._alive_at(index))

    def has_peak_below(self, nbytes: int) -> bool:
        """Return whether fewer bytes are live at every moment."""
        return max(self.live_bytes, default=0) < nbytes

    def excess(self, nbytes: int) -> int:
        """Return the live bytes above a bound, summed over all moments."""
        return sum(max(0, live - nbytes) for live in self.live_bytes)

    @cached_property
    def live_bytes(self) -> list[int]:
        """The bytes of live values while each node runs."""
        # Not `_has_memory` and `_last_use`, for the reason in `__init__`.
        sizes = self.sizes
        owner = self.owner
        outside = self.outside
        last_uses = self._last_uses
        begun = [0] * len(self.nodes)
        ended = [0] * len(self.nodes)
        for index, facts in enumerate(self._by_index):
            for name in facts.outputs:
                nbytes = sizes.get(name, 0)
                if nbytes and name not in owner and name not in outside:
                    begun[index] += nbytes
                    ended[last_uses.get(name, index)] += nbytes
        live = 0
        moments: list[int] = []
        for new, old in zip(begun, ended, strict=True):
            live += new
            moments.append(live)
            live -= old
        return moments

    def _alive_at(self, moment: int) -> frozenset[str]:
        """Return the values that are in memory while a node runs."""
        alive = set()
        for index, facts in enumerate(self._by_index[: moment + 1]):
            for name in facts.outputs:
                if self._has_memory(name) and self._last_use(name, index) >= moment:
                    alive.add(name)
        return frozenset(alive)

    @cached_property
    def _last_uses(self) -> dict[str, int]:
        """The index of the last node that reads each value."""
        owner_of = self.owner.get
        last: dict[str, int] = {}
        for index, of_node in enumerate(self._by_index):
            for name in of_node.reads:
                last[owner_of(name, name)] = index
        return last

    def _last_use(self, name: str, index: int) -> int:
        """Return the index of the last node that reads a value; if none does, the given one."""
        return self._last_uses.get(name, index)

    def _has_memory(self, name: str) -> bool:
        """Return whether the run allocates memory for an output of a node."""
        return bool(name) and name not in self.owner and name not in self.outside
