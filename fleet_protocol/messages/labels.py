"""Sets of labels in messages: a list, or for many labels a bitmap."""

import base64
import binascii
import itertools
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_PREFIX = "bitmap:"
# Labels of a bitmap, enough for the largest vocabularies: each bit may become a number in memory.
_MOST = 2**18
_READABLE = 1000  # characters; shorter lists stay lists, which people and earlier versions can read


def _write(labels: tuple[int, ...]) -> list[int] | str:
    """Return a bitmap if it is shorter than the list, and the list is long.

    Only an ascending set of labels can be a bitmap.
    """
    if not _is_ascending(labels):
        return list(labels)
    # The length of the list in JSON: brackets, commas and digits.
    digits = sum(len(str(label)) for label in labels)
    list_characters = 1 + len(labels) + digits
    bitmap_bytes = labels[-1] // 8 + 1
    # Base64 has four characters for every three bytes, rounded up.
    base64_characters = -(-bitmap_bytes // 3) * 4
    # Quotes, prefix and base64 of the bytes.
    bitmap_characters = 2 + len(_PREFIX) + base64_characters
    if list_characters <= max(_READABLE, bitmap_characters):
        return list(labels)
    present = np.zeros(labels[-1] + 1, np.bool_)
    present[list(labels)] = True
    bits = np.packbits(present, bitorder="little")
    return _PREFIX + base64.b64encode(bits.tobytes()).decode()


def _is_ascending(labels: tuple[int, ...]) -> bool:
    if not labels or labels[0] < 0:
        return False
    return all(label < following for label, following in itertools.pairwise(labels))


def _read(value: Any) -> Any:
    """Return the labels of a bitmap; any other value is checked as a list."""
    if not isinstance(value, str):
        return value
    if not value.startswith(_PREFIX):
        raise ValueError(
            f"a set of labels must be a list of numbers, or a text that starts with {_PREFIX}"
        )
    try:
        data = base64.b64decode(value[len(_PREFIX) :], validate=True)
    except binascii.Error as error:
        raise ValueError(f"a bitmap of labels is not base64: {error}") from error
    # Checked before each bit becomes a number.
    if len(data) * 8 > _MOST:
        raise ValueError(f"a bitmap of {len(data) * 8} labels; at most {_MOST} are allowed")
    present = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return tuple(np.flatnonzero(present).tolist())


Labels = Annotated[
    tuple[int, ...],
    BeforeValidator(_read),
    PlainSerializer(_write, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer"}},
                {"type": "string", "pattern": f"^{_PREFIX}[A-Za-z0-9+/]*={{0,2}}$"},
            ],
            "description": "a list of labels; if many, the base64 of a bitmap, lowest bit first",
        }
    ),
]
"""Labels in messages: a tuple in Python, a list or a bitmap in JSON."""
