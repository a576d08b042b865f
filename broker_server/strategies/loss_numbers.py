"""Sends numbers of a loss with each task, such as a weight that grows over the rounds."""

from collections.abc import Callable, Mapping

from fleet_protocol.messages import Instructions

NumbersAfter = Callable[[int], Mapping[str, float]]
"""The numbers of the loss by name, after a number of closed rounds."""


def instruct_numbers(numbers_after: NumbersAfter) -> Callable[[Instructions, int], Instructions]:
    """Return the `instruct` of a strategy whose loss has numbers that change from round to round.

    Args:
        numbers_after: the numbers of each round.
    """

    def instruct(instructions: Instructions, closed_rounds: int) -> Instructions:
        numbers = dict(numbers_after(closed_rounds))
        train = instructions.train.model_copy(update={"knobs": numbers})
        return instructions.model_copy(update={"train": train})

    return instruct
