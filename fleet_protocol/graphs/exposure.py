"""Finds outputs of a graph through which single samples would leave a board.

Each value of a graph has a kind, which follows from the kinds of a node's inputs. The rules are
conservative: they may call a harmless output exposed, but the exporter writes no such graph.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fleet_protocol.graph_parts import is_kept_input
from fleet_protocol.graphs.model import Graph, Node
from fleet_protocol.graphs.operators import (
    CONTRACTIONS,
    MASKING,
    MASKS,
    REDUCTIONS,
    SELECTORS,
    SIZES,
)


@dataclass(frozen=True)
class _Kind:
    """Possible contents of a value."""

    bare: bool  # entries of it may be entries of the batch, or one to one functions of them
    model: bool  # it depends on parameters
    met: bool = False  # batch and parameters have met in it, in a contraction
    mask: bool = False  # its entries are true or false


_NEITHER = _Kind(bare=False, model=False)
_TABLE_AND_PLACES = 2  # inputs of Gather


def is_sample_input(name: str) -> bool:
    """Return whether an input of a graph belongs to the samples.

    These are ``x`` and ``y``, the label mask, which follows from the device's labels, and the
    values that frozen layers compute from the samples.
    """
    return name in {"x", "y", "mask"} or is_kept_input(name)


def exposed_outputs(graph: Graph, batch: Iterable[str]) -> tuple[str, ...]:
    """Return outputs that the batch reaches without a reduction or contraction with parameters.

    Args:
        graph: a graph whose nodes are in an order in which they can run.
        batch: names of the inputs that carry samples or labels.
    """
    samples = frozenset(batch)
    kinds: dict[str, _Kind] = {}
    for port in graph.inputs:
        is_model = "param." in port.name or "state." in port.name
        kinds[port.name] = _Kind(bare=port.name in samples, model=is_model)
    _follow(graph, kinds)
    return tuple(port.name for port in graph.outputs if kinds.get(port.name, _NEITHER).bare)


def _follow(graph: Graph, kinds: dict[str, _Kind]) -> None:
    """Add the kinds of all values of a graph to those of its inputs."""
    for node in graph.nodes:
        inputs = [kinds.get(name, _NEITHER) for name in node.inputs]
        if node.body is None:
            kinds.update(dict.fromkeys(node.outputs, _result_kind(node, inputs)))
        else:
            kinds.update(zip(node.outputs, _loop_kinds(node.body, inputs, kinds), strict=True))


def _loop_kinds(
    body: Graph,
    initial: list[_Kind],
    outer: Mapping[str, _Kind],
) -> list[_Kind]:
    """Return the kinds of a loop's outputs.

    A step reads what the step before it returned, so the body is followed again until the kinds of
    its inputs no longer change. They change in one direction only, so that this ends.
    """
    inputs = initial
    while True:
        kinds = dict(outer)
        for port, kind in zip(body.inputs, inputs, strict=True):
            kinds[port.name] = kind
        _follow(body, kinds)
        outputs = [kinds.get(port.name, _NEITHER) for port in body.outputs]
        carried = _carried_kinds(inputs, outputs)
        if carried == inputs:
            return outputs
        inputs = carried


def _carried_kinds(inputs: Sequence[_Kind], outputs: Sequence[_Kind]) -> list[_Kind]:
    """Return the kinds of a loop's inputs in the next step."""
    carried = []
    for place, old in enumerate(inputs):
        new = outputs[place] if place < len(outputs) else _NEITHER
        carried.append(
            _Kind(
                bare=old.bare or new.bare,
                model=old.model,
                met=old.met and new.met,
                mask=old.mask and new.mask,
            )
        )
    return carried


def _result_kind(node: Node, inputs: list[_Kind]) -> _Kind:
    """Return the kind of a node's outputs."""
    if node.op_type in SIZES:
        return _NEITHER
    model = any(kind.model for kind in inputs)
    met = _have_met(node, inputs)
    if node.op_type in REDUCTIONS or (node.op_type in CONTRACTIONS and model):
        return _Kind(bare=False, model=model, met=model and _has_batch(inputs))
    if node.op_type == "Mul" and _has_mixed(inputs):
        # A factor of 0 leaves padding out: such a mask selects entries, and does not carry them.
        carries_batch = any(kind.bare and not kind.mask for kind in inputs)
        return _Kind(bare=carries_batch, model=model, met=met)
    bare = _keeps_batch(node, inputs)
    return _Kind(bare=bare, model=model, met=met, mask=bare and _is_mask(node, inputs))


def _have_met(node: Node, inputs: Sequence[_Kind]) -> bool:
    """Return whether batch and parameters have met in an input, or meet where rows are looked up.

    An embedding is the product of its table and of ones at the places of the tokens, and counts as
    that contraction.
    """
    if any(kind.met for kind in inputs):
        return True
    if node.op_type != "Gather" or len(inputs) < _TABLE_AND_PLACES:
        return False
    table, places = inputs[:_TABLE_AND_PLACES]
    return table.model and not table.bare and places.bare


def _has_batch(inputs: Sequence[_Kind]) -> bool:
    """Return whether an input depends on the batch in any form."""
    return any(kind.bare or kind.met for kind in inputs)


def _has_mixed(inputs: Sequence[_Kind]) -> bool:
    """Return whether the batch reaches an input only through a contraction with parameters."""
    return any(kind.met and not kind.bare for kind in inputs)


def _keeps_batch(node: Node, inputs: Sequence[_Kind]) -> bool:
    """Return whether the outputs of an operator that keeps entries may have some of the batch."""
    place = SELECTORS.get(node.op_type)
    selected = [kind for position, kind in enumerate(inputs) if position != place]
    if any(kind.bare for kind in selected):
        return True
    if place is None or place >= len(inputs):
        return False
    # Entries that do not depend on parameters may be constants, by which the selection is known.
    return inputs[place].bare and not any(kind.model for kind in selected)


def _is_mask(node: Node, inputs: Sequence[_Kind]) -> bool:
    """Return whether the outputs of a node are a mask if they come from the batch."""
    if node.op_type in MASKS:
        return True
    return node.op_type in MASKING and all(kind.mask for kind in inputs if kind.bare)
