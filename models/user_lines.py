"""Locate the line of a user's file that an error came from; imports neither torch nor exporter."""

from collections.abc import Mapping
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any

_SHOAL = tuple(str(Path(__file__).parents[1] / name) for name in ("models", "trainer_export"))

# Functions of Shoal's layers, modes and sizes, which the model calls and which may call it.
_CALLED_BY_MODELS = ("forward", "__torch_function__", "evaluate_expr")


def at_line_of(error: BaseException) -> str:
    """Describe the innermost line of the model's file that an error passed through.

    Returns:
        `` at line ... of ..., in module ...``, or an empty text if there is no such line.
    """
    place = ""
    module = ""
    for frame, number in walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(_SHOAL):
            if code.co_name not in _CALLED_BY_MODELS:
                place = ""  # what called Shoal is not the model
        elif not code.co_filename.startswith("<") and "torch" not in Path(code.co_filename).parts:
            module = _module_of(code, frame.f_locals) or module
            place = f" at line {number} of {Path(code.co_filename).name}{module}"
    return place


def _module_of(code: CodeType, values: Mapping[str, Any]) -> str:
    """Describe the torch module whose method a frame runs; empty if it is not a method of one."""
    first = values.get(code.co_varnames[0]) if code.co_argcount else None
    return f", in module {type(first).__name__}" if hasattr(first, "named_parameters") else ""


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
