"""Watch the constructors of layers while a package makes a model.

Two models of one package have other layers if they have other sizes. So a layer is known by its
place: the lines of code that make it.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

Place = tuple[tuple[str, int], ...]
"""Files and lines, from the one that makes a layer to the one that makes the model."""

Watch = Callable[[nn.Module, inspect.BoundArguments, Place], None]
"""Gets a layer before it is made, with the arguments, which it may change, and its place."""


def make_model(make: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    """Make a model; the places of its layers are below this call."""
    return make(**arguments)


@contextmanager
def watched_layers(kinds: Iterable[type[nn.Module]], watch: Watch) -> Iterator[None]:
    """Call a function for each layer that is made meanwhile.

    Args:
        kinds: classes of layers; subclasses call their constructors.
        watch: the function. It gets no layers that another layer consists of.
    """
    originals: dict[type[nn.Module], Callable[..., None]] = {}
    for kind in kinds:
        originals[kind] = kind.__init__
    watcher = _Watcher(watch)
    for kind in originals:
        watcher.replace(kind)
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[method-assign]


@dataclass
class _Watcher:
    watch: Watch
    is_within_layer: bool = False  # whether the constructor of a layer runs

    def replace(self, kind: type[nn.Module]) -> None:
        """Replace the constructor of a class."""
        original = kind.__init__
        signature = inspect.signature(original)

        def watched(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
            if self.is_within_layer:  # which passes on sizes that are changed already
                original(layer, *args, **kwargs)
                return
            bound = signature.bind(layer, *args, **kwargs)
            self.watch(layer, bound, _place_of(sys._getframe(1)))  # noqa: SLF001 - no public name
            self.is_within_layer = True
            try:
                original(*bound.args, **bound.kwargs)
            finally:
                self.is_within_layer = False

        watched.__signature__ = signature  # type: ignore[attr-defined]
        kind.__init__ = watched  # type: ignore[method-assign, assignment]


def _place_of(frame: FrameType | None) -> Place:
    """Return the lines of code that led from the call that makes the model to a frame."""
    place: list[tuple[str, int]] = []
    while frame is not None and frame.f_code is not make_model.__code__:
        place.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(place)
