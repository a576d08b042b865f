"""Rewrites some of PyTorch's functions in simpler ones while a model is traced.

A rewrite happens above autograd, so its gradient needs no extra rule. `trainer_export.functions`
lists the rewrites by function. Only traces use them: the reference of an exported graph is the
original module.
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
"""The rewrites by function: each takes the arguments and returns the result, or NotImplemented."""

_TORCH = str(Path(torch.__file__).parent)
_EXPORTER = str(Path(__file__).parent)
# A rewrite, of the exporter or of a layer, and the exporter's modes of fake tensors and records.
_BETWEEN_LINES = ("__torch_function__", "__torch_dispatch__", "dispatch")
_LINE = "stack_trace"  # torch.fx copies the value of this key to every node


class Rewriting(TorchFunctionMode):
    """Rewrites functions, and records the line of the model's file that called each one.

    Traced nodes keep the line for messages.
    """

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
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
    """Return the module and line in an entry of trace metadata, for a message.

    Empty if there are none.
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
    """Return the innermost line outside PyTorch and the exporter.

    Empty if there is no such line below the exporter.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name in _BETWEEN_LINES:
            pass  # it stands between two lines of a model
        elif code.co_filename.startswith(_EXPORTER):
            return ""  # anything else of the exporter is above the model
        elif not code.co_filename.startswith((_TORCH, "<")):
            return f"line {frame.f_lineno} of {Path(code.co_filename).name}"
        frame = frame.f_back
    return ""
