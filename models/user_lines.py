"""Where in a user's file an error came from, for messages.

Knows neither torch nor exporter by import.
"""

from pathlib import Path
from traceback import walk_tb

_OURS = tuple(str(Path(__file__).parents[1] / name) for name in ("models", "trainer_export"))
_CALLED_BY_MODELS = (
    "forward",
    "__torch_function__",
    "evaluate_expr",
)  # of our layers, modes and sizes


def at_line_of(error: BaseException) -> str:
    """Where in the model's file a caught error is from, `` at line ...

    Of ..., in module ...``, or nothing.
    """
    found = module = ""
    for frame, number in walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            found = (
                found if code.co_name in _CALLED_BY_MODELS else ""
            )  # what called us is not the model
        elif not code.co_filename.startswith("<") and "torch" not in Path(code.co_filename).parts:
            own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            module = (
                f", in module {type(own).__name__}" if hasattr(own, "named_parameters") else module
            )
            found = f" at line {number} of {Path(code.co_filename).name}{module}"
    return found


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
