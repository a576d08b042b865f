"""Whether builders convert their models, for the time of a ``with`` block; it imports no torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_LEFT_OUT: ContextVar[list[str] | None] = ContextVar("left_out", default=None)


@contextmanager
def unconverted() -> Iterator[Sequence[str]]:
    """Let `models.zoo.conversion.convert` return modules as they are.

    It notes the class of each here.
    """
    classes: list[str] = []
    token = _LEFT_OUT.set(classes)
    try:
        yield classes
    finally:
        _LEFT_OUT.reset(token)


def left_out() -> list[str] | None:
    """The classes that the `unconverted` block around the caller notes.

    None where there is no such block.
    """
    return _LEFT_OUT.get()
