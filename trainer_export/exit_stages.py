"""Splits the inference of a model with exits at its exits, so that a sample may leave at any.

A stage returns the logits of its exit and the values that later stages take. So a board that leaves
at an exit has computed nothing behind it, and one that goes on computes nothing again.
"""

from collections.abc import Mapping

from torch import fx

from trainer_export.graph import Port
from trainer_export.sub_programs import Cut, kept_port, needed_for, results_of, sub_program
from trainer_export.traced_program import Trace


def stages_of(inference: Trace) -> tuple[Trace, ...]:
    """Return a program for each visible output of an inference: ``exit1``, ``exit2`` and so on."""
    heads: dict[Port, fx.Node] = {}
    for port, node in zip(inference.outputs, results_of(inference), strict=True):
        if port.name not in inference.hidden:
            heads[port] = node
    needed: dict[Port, set[fx.Node]] = {}
    for port, head in heads.items():
        needed[port] = needed_for([head])
    stages: list[Trace] = []
    passing: dict[fx.Node, Port] = {}
    computed: set[fx.Node] = set()
    for number, (port, head) in enumerate(heads.items(), 1):
        taken = _taken(head, passing)
        computed |= needed.pop(port)
        later = set[fx.Node]().union(*needed.values())
        later -= computed
        returned = {port: head}
        for node in Cut(inference, computed, later).values():
            if node not in passing:
                passing[node] = kept_port(node, len(passing))
                returned[passing[node]] = node
        stages.append(sub_program(inference, f"exit{number}", taken, returned))
    return tuple(stages)


def _taken(head: fx.Node, passing: Mapping[fx.Node, Port]) -> dict[fx.Node, Port]:
    """Return those of the passing values from which the logits of an exit are computed."""
    read: set[fx.Node] = set()
    for node in needed_for([head], passing):
        read.update(node.all_input_nodes)
    taken: dict[fx.Node, Port] = {}
    for node, port in passing.items():
        if node in read:
            taken[node] = port
    return taken
