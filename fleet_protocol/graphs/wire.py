"""Reads protocol buffers field by field within bounds, for files that a stranger may have written.

Nothing is copied or allocated by a declared size, nothing recurses, and whatever two readers could
take differently is refused: groups, numbers longer than their type, a single field that is given
twice, a field that is not expected.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fleet_protocol.errors import RefusalReason, RefusedError

NUMBER, BYTES, FLOAT = 0, 2, 5  # wire types
_LONGEST_NUMBER = 10
_FLOAT = struct.Struct("<f")


@dataclass(frozen=True)
class Field:
    """What a message may carry under one number."""

    name: str  # key in the message that is read
    wire: int  # `NUMBER`, `BYTES` or `FLOAT`
    many: bool = False  # whether it may be given more than once
    packed: bool = False  # whether several numbers may also come in one piece


Raw = int | memoryview
Message = dict[str, list[Raw]]


def _bad(what: str) -> RefusedError:
    return RefusedError(
        RefusalReason.UNSAFE_GRAPH,
        f"the graph is not a file that the exporter writes: {what}",
    )


def _number(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for i in range(_LONGEST_NUMBER):
        if at + i >= len(data):
            raise _bad("it ends inside a number")
        byte = data[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, at + i + 1
    raise _bad("a number is longer than 64 bits")


def read(data: memoryview, fields: Mapping[int, Field], what: str) -> Message:
    """Read one message and the fields it may carry, by number; `what` it is goes into an error.

    What it contains stays.

    Values are by name in the order they came: numbers as they stand in the file, pieces as views of
    ``data``. What is cut off, or carries something else, is a RefusedError, here and below.
    """
    found: Message = {field.name: [] for field in fields.values()}
    at = 0
    while at < len(data):
        tag, at = _number(data, at)
        field = fields.get(tag >> 3)
        wire = tag & 7
        if field is None:
            raise _bad(f"{what} has field {tag >> 3}")
        values = found[field.name]
        if wire != field.wire and not (wire == BYTES and field.packed):
            raise _bad(f"{field.name} of {what} has wire type {wire}")
        if values and not field.many:
            raise _bad(f"{what} has two of {field.name}")
        value: Raw
        if wire == NUMBER:
            value, at = _number(data, at)
        else:
            size = 4
            if wire == BYTES:
                size, at = _number(data, at)
            if size > len(data) - at:
                raise _bad(f"{field.name} of {what} is longer than the file")
            value = data[at : at + size]
            at = at + size
        values.append(value)
    return found


def numbers(values: list[Raw]) -> Iterator[int]:
    """Signed numbers of a repeated field, packed or not."""
    for value in values:
        if isinstance(value, int):
            yield _signed(value)
            continue
        at = 0
        while at < len(value):
            number, at = _number(value, at)
            yield _signed(number)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def floats(values: list[Raw]) -> Iterator[float]:
    """Numbers of a repeated float field, packed or not."""
    for value in values:
        if isinstance(value, int) or len(value) % _FLOAT.size:
            raise _bad("a list of floats is cut off")
        yield from (number for (number,) in _FLOAT.iter_unpack(value))


def text(values: list[Raw], default: str = "") -> str:
    """The text of a single field, in UTF-8."""
    if not values:
        return default
    try:
        return str(memoryview(values[0]), "utf-8")  # type: ignore[arg-type]
    except (UnicodeDecodeError, TypeError) as error:
        raise _bad("a name is not UTF-8") from error
