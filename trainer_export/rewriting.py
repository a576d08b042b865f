"""Writes some of PyTorch's functions in simpler ones while a model is traced.

A rewrite stands above autograd, so its gradient needs no rule of its own. It is found in
`trainer_export.functions` by the function that it stands for. Only traces see it: what an exported
graph is compared with is the module as its author wrote it.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.fx import traceback
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fleet_protocol.discovery import discover
from fleet_protocol.errors import ExportError

FUNCTIONS: Mapping[Any, Callable[..., Any]] = discover("trainer_export.functions", "FUNCTIONS")
"""By the function: from its arguments its result, or NotImplemented to leave it as it is."""

_TORCH = str(Path(torch.__file__).parent)
_EXPORTER = str(Path(__file__).parent)
_LINE = "stack_trace"  # under this name torch.fx copies it to every node


class Rewriting(TorchFunctionMode):
    """Rewrites functions, and notes at each the line of the model's file that called it.

    Traced nodes remember the line, for messages.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = line_of(sys._getframe(1))  # noqa: SLF001 - no public name
        if line:
            traceback.current_meta[_LINE] = line
        rule = FUNCTIONS.get(func)
        try:
            result = NotImplemented if rule is None else rule(*args, **(kwargs or {}))
        except ExportError as error:
            place = place_of(traceback.current_meta, line)
            raise ExportError(f"{place}: {error}" if place else str(error)) from error
        return func(*args, **(kwargs or {})) if result is NotImplemented else result

    @override
    def __exit__(self, *error: object) -> None:
        traceback.current_meta.pop(_LINE, None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def place_of(meta: Mapping[str, Any], line: str | None) -> str:
    """Return the module and line that an entry of trace metadata names, for a message.

    Empty if it names none.
    """
    stack = meta.get("nn_module_stack")
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    where = kind
    if not isinstance(kind, str):
        where = f"module {path or '(the model itself)'} ({kind.__name__})"
    return f"{where}, {line}" if line else where


def line_of(frame: FrameType | None) -> str:
    """Return the innermost line that is neither PyTorch's nor the exporter's.

    Empty where there is none below the exporter.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_EXPORTER):
            # A rewrite stands between two lines of a model; anything else of ours is above it.
            if code.co_name != "__torch_function__":
                return ""
        elif not code.co_filename.startswith((_TORCH, "<")):
            return f"line {frame.f_lineno} of {Path(code.co_filename).name}"
        frame = frame.f_back
    return ""
