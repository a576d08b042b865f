"""Locates the line of a user's file that caused an error; imports neither torch nor exporter."""

from collections.abc import Mapping
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any

_PACKAGES = Path(__file__).parents[1]
_SHOAL = (str(_PACKAGES / "models"), str(_PACKAGES / "trainer_export"))

# Functions of Shoal that the model calls, and that may call the model. `dispatch` is that of fake
# tensors.
_CALLED_BY_MODELS = (
    "forward",
    "__torch_function__",
    "__torch_dispatch__",
    "evaluate_expr",
    "dispatch",
)


def at_line_of(error: BaseException) -> str:
    """Return the innermost line of the model's file that an error passed through.

    Returns:
        `` at line ... of ..., in module ...``, or an empty text if there is no such line.
    """
    place = ""
    module = ""
    for frame, number in walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(_SHOAL):
            if code.co_name not in _CALLED_BY_MODELS:
                place = ""  # callers of Shoal are not the model
            continue
        file = Path(code.co_filename)
        is_generated = code.co_filename.startswith("<")
        if not is_generated and "torch" not in file.parts:
            module = _module_of(code, frame.f_locals) or module
            place = f" at line {number} of {file.name}{module}"
    return place


def _module_of(code: CodeType, values: Mapping[str, Any]) -> str:
    """Return the torch module whose method a frame runs; empty if there is none."""
    if not code.co_argcount:
        return ""
    first = values.get(code.co_varnames[0])
    # A module by what it has, so that errors can be described without importing torch.
    if not hasattr(first, "named_parameters"):
        return ""
    return f", in module {type(first).__name__}"


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message.

    A line that only announces the next one, with a colon, has that one beside it.
    """
    line, _, rest = str(error).partition("\n")
    if line.rstrip().endswith(":"):
        announced, _, _ = rest.strip().partition("\n")
        line = f"{line.rstrip()} {announced}".rstrip()
    return f"{type(error).__name__}: {line}"
