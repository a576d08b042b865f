"""Tables of which the default suite runs a part, and `make test-slow` the rest."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], quick: Callable[[Any], bool]) -> list[Any]:
    """Values for `pytest.mark.parametrize`, tuples where it has several names; what is not quick is
    marked slow.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if quick(value) else pytest.mark.slow,
        )
        for value in values
    ]
