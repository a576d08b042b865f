"""Names of graphs that are parts of others: a training step in two parts, and exits in stages."""

from collections.abc import Iterable

BELOW = "onnx/below"
"""Key of the graph of the frozen layers, if a board may keep its outputs."""

ABOVE = "onnx/above"
"""Key of the training step that takes these outputs instead of computing them."""

_EXIT = "onnx/exit"

_KEPT = "kept."


def kept_input(number: int) -> str:
    """Return the output of the graph below what is trained, and the input of the step above it."""
    return f"{_KEPT}{number}"


def is_kept_input(name: str) -> bool:
    """Return whether an input of a step is computed from the samples by the graph below it."""
    return name.startswith(_KEPT)


def stays_on_board(key: str) -> bool:
    """Return whether the outputs of a graph have a row for each sample, and never leave a board."""
    return key == BELOW or key.startswith(_EXIT)


def exit_keys(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of the stages that end at each exit of a model, the shallowest first."""
    numbers: list[int] = []
    for key in keys:
        number = key.removeprefix(_EXIT)
        if number != key and number.isdecimal():
            numbers.append(int(number))
    return tuple(f"{_EXIT}{number}" for number in sorted(numbers))
