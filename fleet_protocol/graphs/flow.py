"""Which values of a graph are the batch itself, moved or changed entry by entry, and which have met the model.

A training step meets its samples in contractions with parameters, and gives back sums over a batch: losses,
gradients and the statistics of norms. A graph whose output is the batch, rolled, padded, scaled or added to something,
is none. This finds such graphs where they are written plainly; it cannot find those that are written to deceive
(`docs/security.md`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleet_protocol.graphs.model import Graph, Node
from fleet_protocol.graphs.operators import CONTRACTIONS, MASKING, MASKS, REDUCTIONS, SELECTORS, SIZES


def is_batch(name: str) -> bool:
    """Whether a graph's input belongs to the samples: ``x`` and ``y``; the label mask is what the device has, too."""
    return name in {"x", "y", "mask"}


@dataclass(frozen=True)
class _Kind:
    """What is known of a value."""

    bare: bool  # entries of it may be entries of the batch, or one to one functions of them
    model: bool  # it depends on parameters
    met: bool = False  # batch and parameters have met in it, in a contraction
    mask: bool = False  # its entries are true or false


_NEITHER = _Kind(bare=False, model=False)


def bare_outputs(graph: Graph, batch: Iterable[str]) -> tuple[str, ...]:
    """Names of outputs that the batch reaches without a reduction, or a contraction that parameters have a part in.

    The nodes are in an order in which they can run; `batch` names the inputs that carry samples or labels. Nothing that
    the exporter writes has such an output.
    """
    samples = frozenset(batch)
    kinds = {
        port.name: _Kind(bare=port.name in samples, model="param." in port.name or "state." in port.name)
        for port in graph.inputs
    }
    _follow(graph, kinds)
    return tuple(port.name for port in graph.outputs if kinds.get(port.name, _NEITHER).bare)


def _follow(graph: Graph, kinds: dict[str, _Kind]) -> None:
    """Add the kinds of all values of a graph to those of what it is given."""
    for node in graph.nodes:
        given = [kinds.get(name, _NEITHER) for name in node.inputs]
        if node.body is None:
            kinds.update(dict.fromkeys(node.outputs, _kind(node, given)))
        else:
            kinds.update(zip(node.outputs, _looped(node.body, given, kinds), strict=True))


def _looped(body: Graph, given: list[_Kind], around: Mapping[str, _Kind]) -> list[_Kind]:
    """The kinds of what a loop gives: a step reads what the one before it gave, so once more until nothing is new."""
    while True:
        kinds = {**around, **{port.name: kind for port, kind in zip(body.inputs, given, strict=True)}}
        _follow(body, kinds)
        made = [kinds.get(port.name, _NEITHER) for port in body.outputs]
        told = [*made, *[_NEITHER] * len(given)]
        carried = [
            _Kind(old.bare or new.bare, old.model, old.met and new.met, old.mask and new.mask)
            for old, new in zip(given, told, strict=False)
        ]
        if carried == given:
            return made
        given = carried


def _kind(node: Node, given: list[_Kind]) -> _Kind:
    if node.op_type in SIZES:
        return _NEITHER
    model, met = any(kind.model for kind in given), any(kind.met for kind in given)
    if node.op_type in REDUCTIONS or (node.op_type in CONTRACTIONS and model):
        return _Kind(bare=False, model=model, met=model and any(kind.bare or kind.met for kind in given))
    if node.op_type == "Mul" and any(kind.met and not kind.bare for kind in given):
        # Padding is left out by a factor of 0: that says which entries are taken, as a selector does.
        return _Kind(bare=any(kind.bare and not kind.mask for kind in given), model=model, met=met)
    mask = node.op_type in MASKS or (node.op_type in MASKING and all(kind.mask for kind in given if kind.bare))
    selector = SELECTORS.get(node.op_type)
    others = [kind for i, kind in enumerate(given) if i != selector]
    bare = any(kind.bare for kind in others)
    if selector is not None and not any(kind.model for kind in others):
        bare = bare or (selector < len(given) and given[selector].bare)
    return _Kind(bare=bare, model=model, met=met, mask=mask and bare)
