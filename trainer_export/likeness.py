"""A tier is the whole model, only narrower: it has the same parameters and calls the same functions in every module.

A builder may decide by sizes, as residual blocks do that have a shortcut where as many channels come in as go out. In a
narrow tier other sizes may be equal, and then it is another model, which no comparison of a tier with itself shows.
"""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import traceback
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fleet_protocol.errors import ExportError
from models.zoo.layers import set_mode
from trainer_export.rewriting import line_of, place_of
from trainer_export.traced_program import recorded_modules

_REMEDY = (
    "layers must not depend on sizes that are cut, which may be equal in one tier and not in another: decide by a"
    " setting, or by the sizes of the whole model, cut.axes[name].size"
)


Calls = Mapping[tuple[str, str], str]
"""The place of the first call, by module and name of the function."""


class _Calls(TorchFunctionMode):
    """Remembers where each module called which function first."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[tuple[str, str], str] = {}

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        path = ([*traceback.current_meta.get("nn_module_stack", {}).values()] or [("",)])[-1][0]
        if name != "__get__":
            self.places.setdefault(
                (path, name),
                place_of(traceback.current_meta, line_of(sys._getframe(1))),  # noqa: SLF001
            )
        return func(*args, **(kwargs or {}))


def calls_of(model: nn.Module, x: Tensor) -> Calls:
    """What a model calls on a batch of samples; its mode is changed."""
    calls = _Calls()
    with recorded_modules(model), calls:
        set_mode(model, "eval")(x)
    return calls.places


def refuse_unlike(name: str, narrow: nn.Module, theirs: Calls, shapes: Mapping[str, Any], x: Tensor) -> None:
    """See that a tier, whose mode is changed, computes what the whole model does on the same samples.

    Theirs are `calls_of` the model of full width and the same depth; the shapes are those of the tier's parameters, as
    the layout foresees them.

    Raises:
        ExportError: it has other parameters, or calls functions that the whole model does not, or the reverse.
    """
    found = {key: tuple(value.shape) for key, value in narrow.named_parameters()}
    odd = next((key for key in {**shapes, **found} if shapes.get(key) != found.get(key)), None)
    if odd is not None:
        raise ExportError(
            f"{name}: parameter {odd} is {found.get(odd, 'not there')} and should be {shapes.get(odd, 'not there')};"
            f" {_REMEDY}"
        )
    ours = calls_of(narrow, x)
    for more, less, where in ((ours, theirs, "alone"), (theirs, ours, "not")):
        for key, place in more.items():
            if key not in less:
                raise ExportError(f"{name}: {place} calls {key[1]} {where} in this tier; {_REMEDY}")
