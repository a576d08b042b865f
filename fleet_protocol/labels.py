"""Sets of labels in messages: a list of numbers, or a bitmap where the list would be longer.

A language model has a label for each word of its vocabulary. All 30,522 of MiniLM's are 172 kB as a list, more than the
128 kB that hosted brokers let through; as a bitmap they are 5 kB. Sets of up to about 270 labels stay lists.

The bitmap is the text ``bitmap:`` and base64 of bytes, in which label ``l`` is bit ``l % 8`` (the lowest is bit 0) of
byte ``l // 8``. A reader takes both forms of any set.
"""

import base64
import binascii
import itertools
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_PREFIX = "bitmap:"
_MOST = 2**18  # labels of a bitmap, all of the largest vocabularies: each of its bits may become a number
_READABLE = 1000  # characters; shorter lists stay lists, which people and earlier versions read


def _write(labels: tuple[int, ...]) -> list[int] | str:
    """A list if it is short enough, or shorter; only an ascending set of labels can be a bitmap."""
    ascending = bool(labels) and labels[0] >= 0 and all(a < b for a, b in itertools.pairwise(labels))
    listed = 1 + len(labels) + sum(len(str(label)) for label in labels)
    if not ascending or listed <= max(_READABLE, 2 + len(_PREFIX) + -(-(labels[-1] // 8 + 1) // 3) * 4):
        return list(labels)
    present = np.zeros(labels[-1] + 1, np.bool_)
    present[list(labels)] = True
    return _PREFIX + base64.b64encode(np.packbits(present, bitorder="little").tobytes()).decode()


def _read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value.startswith(_PREFIX):
        raise ValueError(f"a set of labels is a list of numbers, or a text that starts with {_PREFIX}")
    try:
        data = base64.b64decode(value[len(_PREFIX) :], validate=True)
    except binascii.Error as error:
        raise ValueError(f"a bitmap of labels is not base64: {error}") from error
    if len(data) * 8 > _MOST:
        raise ValueError(f"a bitmap of {len(data) * 8} labels; {_MOST} are the most")
    return tuple(np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")).tolist())


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
            "description": "a list of labels, or of many the base64 of a bitmap, lowest bit first",
        }
    ),
]
"""Labels in messages: a tuple in Python, a list or a bitmap in JSON."""
