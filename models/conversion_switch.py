"""Switch off the conversion of models for the time of a ``with`` block; imports no torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_CLASSES: ContextVar[list[str] | None] = ContextVar("unconverted_classes", default=None)


@contextmanager
def unconverted() -> Iterator[Sequence[str]]:
    """Let `models.zoo.conversion.convert` return modules as they are.

    Yields:
        The names of their classes, to which each call of `convert` appends one.
    """
    classes: list[str] = []
    token = _CLASSES.set(classes)
    try:
        yield classes
    finally:
        _CLASSES.reset(token)


def unconverted_classes() -> list[str] | None:
    """Return the list to append to within a block of `unconverted`, or None outside of one."""
    return _CLASSES.get()
