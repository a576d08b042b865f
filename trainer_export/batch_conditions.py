"""Observes how a model uses the symbol for its batch: as a number, or in conditions."""

import sys
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import traceback
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from typing_extensions import override

from trainer_export.rewriting import line_of, place_of

MANY = 10**6
"""A batch size above any number in a condition."""

_TORCH = str(torch.__path__[0])
_GUARD_FRAMES = 12  # most calls of PyTorch between a condition and its value; today there are 5


class BatchSymbol(ShapeEnv):
    """Observes how a model uses its batch size.

    Attributes:
        where: the first place where it was used as a number, or decided a branch.
        other_sizes: sizes for which a condition of the model goes the other way.
    """

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.other_sizes: set[int] = set()

    def restart(self) -> None:
        """Forget what was observed, for another trace."""
        super().__init__()
        self.other_sizes = set()
        self.where = ""

    @override
    def _get_user_frame(self) -> FrameType | None:
        """Return the nearest call outside PyTorch, whose own search loads its compiler."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - no public name
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        return frame

    @override
    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        value = super().evaluate_expr(*args, **kwargs)
        caller = sys._getframe(1)  # noqa: SLF001 - no public name
        if _is_condition_of_model(caller):
            self.other_sizes |= _sizes_beyond(args[0], bool(value))
        if (self.replacements or self.other_sizes) and not self.where:
            self.where = place_of(traceback.current_meta, line_of(caller))
        return value


def _is_condition_of_model(frame: FrameType | None) -> bool:
    """Return whether a condition outside PyTorch compares a size."""
    for _ in range(_GUARD_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == "__bool__":
            caller = frame.f_back
            return caller is not None and not caller.f_code.co_filename.startswith(_TORCH)
        frame = frame.f_back
    return False


def _sizes_beyond(condition: Any, value: bool) -> set[int]:
    """Return batch sizes for which a condition on the size has a different result from the example.

    Tried are 1, many, and the numbers that it names with their neighbours.
    """
    sizes = {1, 2, MANY}
    for number in condition.atoms(sympy.Integer):
        for size in range(int(number) - 1, int(number) + 2):
            if size > 0:
                sizes.add(size)
    symbols = condition.free_symbols
    beyond: set[int] = set()
    for size in sizes:
        result = condition.subs(dict.fromkeys(symbols, size))
        if bool(result) != value:
            beyond.add(size)
    return beyond
