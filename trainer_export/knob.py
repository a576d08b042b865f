"""Numbers that tasks set for a loss: inputs of a step graph, so that no round needs an export."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Knob:
    """A number of a loss that a task sets.

    Attributes:
        checked_with: its value during the check of the graph.
        initial: its value in training if the task does not set it.
    """

    name: str
    checked_with: float
    initial: float = 1.0
