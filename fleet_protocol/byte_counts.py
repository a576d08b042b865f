"""Sizes in configurations: a number of bytes, or a text such as ``2 GB`` or ``512 MiB``."""

import re
from types import MappingProxyType
from typing import Annotated

from pydantic import BeforeValidator, Field

_UNITS = MappingProxyType(
    {
        "B": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
        "TIB": 2**40,
    }
)
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def _bytes_of(value: object) -> object:
    """Return the number of bytes that a text names; other values are returned as they are."""
    if not isinstance(value, str):
        return value
    form = _FORM.fullmatch(value)
    unit = None if form is None else _UNITS.get(form[2].upper())
    if form is None or unit is None:
        raise ValueError(f'{value!r} is not a size; write "2 GB", "512 MiB" or a number of bytes')
    return round(float(form[1]) * unit)


ByteCount = Annotated[int, BeforeValidator(_bytes_of), Field(ge=0)]
"""A number of bytes, at least 0."""
