"""Reads protocol buffers field by field within bounds, for files from untrusted sources.

Nothing is copied or allocated by a declared size, and nothing recurses. Everything that two readers
could interpret differently is refused: groups, numbers longer than their type, a single field that
occurs twice, an unexpected field.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.foreign_files import is_seen, quoted

NUMBER = 0
BYTES = 2
FLOAT = 5
"""Wire types."""

_LONGEST_NUMBER = 10  # bytes
_FLOAT = struct.Struct("<f")

Raw = int | memoryview
"""A number as written in the file, or a view of the bytes of anything else."""

Message = dict[str, list[Raw]]
"""The values of each field, in the order of the file."""


@dataclass(frozen=True)
class Field:
    """The allowed content of a message under one number."""

    name: str  # key of the field in the result
    wire: int  # `NUMBER`, `BYTES` or `FLOAT`
    many: bool = False  # whether it may occur more than once
    packed: bool = False  # whether several numbers may also be in one sequence of bytes


def read(
    data: memoryview,
    fields: Mapping[int, Field],
    what: str,
) -> Message:
    """Read one message; messages inside it stay bytes.

    Args:
        data: the message.
        fields: allowed fields, by number.
        what: name of the message in an error.

    Returns:
        Values of every field by its name; bytes are views of `data`.

    Raises:
        RefusedError: it is truncated, or contains anything else; here and below.
    """
    message: Message = {field.name: [] for field in fields.values()}
    position = 0
    while position < len(data):
        tag, position = _read_number(data, position)
        number = tag >> 3
        wire = tag & 7
        field = fields.get(number)
        if field is None:
            raise _malformed(f"{what} has field {number}")
        if wire != field.wire and not (wire == BYTES and field.packed):
            raise _malformed(f"{field.name} of {what} has wire type {wire}")
        values = message[field.name]
        if values and not field.many:
            raise _malformed(f"{what} has two of {field.name}")
        value: Raw
        if wire == NUMBER:
            value, position = _read_number(data, position)
        else:
            size = _FLOAT.size
            if wire == BYTES:
                size, position = _read_number(data, position)
            if size > len(data) - position:
                raise _malformed(f"{field.name} of {what} is longer than the file")
            value = data[position : position + size]
            position += size
        values.append(value)
    return message


def numbers(values: list[Raw]) -> Iterator[int]:
    """Yield the signed numbers of a repeated field, packed or not."""
    for value in values:
        if isinstance(value, int):
            yield _signed(value)
            continue
        position = 0
        while position < len(value):
            number, position = _read_number(value, position)
            yield _signed(number)


def floats(values: list[Raw]) -> Iterator[float]:
    """Yield the numbers of a repeated float field, packed or not."""
    for value in values:
        if isinstance(value, int) or len(value) % _FLOAT.size:
            raise _malformed("a list of floats is truncated")
        for (number,) in _FLOAT.iter_unpack(value):
            yield number


def text(values: list[Raw], default: str = "") -> str:
    """Return the UTF-8 text of a single field, without control characters.

    onnxruntime writes the names of a graph to standard error, where they could move the cursor.
    """
    if not values:
        return default
    try:
        value = str(memoryview(values[0]), "utf-8")  # type: ignore[arg-type]
    except (UnicodeDecodeError, TypeError) as error:
        raise _malformed("a name is not UTF-8") from error
    if not is_seen(value):
        raise _malformed(f"the name {quoted(value)} has control characters")
    return value


def _malformed(what: str) -> RefusedError:
    return RefusedError(
        RefusalReason.UNSAFE_GRAPH,
        f"the graph is not a file that the exporter writes: {what}",
    )


def _read_number(data: memoryview, start: int) -> tuple[int, int]:
    """Return an unsigned number in base 128, lowest digit first, and the position after it."""
    value = 0
    for digit in range(_LONGEST_NUMBER):
        position = start + digit
        if position >= len(data):
            raise _malformed("it ends inside a number")
        byte = data[position]
        value |= (byte & 0x7F) << (7 * digit)
        is_last = byte < 0x80
        if is_last and value < 2**64:
            return value, position + 1
        if is_last:
            break
    raise _malformed("a number is longer than 64 bits")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
