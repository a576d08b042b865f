"""Disables the conversion of models in a ``with`` block; does not import torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_CLASSES: ContextVar[list[str] | None] = ContextVar("unconverted_classes", default=None)


@contextmanager
def unconverted() -> Iterator[Sequence[str]]:
    """Let `models.zoo.conversion.convert` return modules unchanged.

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
    """Return the list to append to within a block of `unconverted`; None outside a block."""
    return _CLASSES.get()
