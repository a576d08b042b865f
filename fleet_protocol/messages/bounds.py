"""Bounds of the values in messages, which may come from an untrusted source.

Values are checked where a message is parsed, so that the code that uses them need not check them.
"""

from typing import Annotated

from pydantic import AfterValidator, Field

from fleet_protocol.errors import single_line

_EXACT = 2**53  # every whole number up to here is exact as a float

LEAST_CHUNK_BYTES = 1024
MOST_CHUNK_BYTES = 16 * 1024 * 1024
DEFAULT_CHUNK_BYTES = 96 * 1024  # hosted brokers limit a packet to 128 kB
CHUNKS_LIMIT = 2**20  # of a blob: 96 GiB in chunks of the default size

Count = Annotated[int, Field(ge=0, le=_EXACT)]
"""Samples, steps, rounds or bytes of memory: a whole number that is exact as a float, too."""

Positive = Annotated[int, Field(ge=1, le=_EXACT)]
"""The same, at least one."""

SizeBytes = Annotated[int, Field(ge=1, le=2**40)]
"""Size of a blob; its number of chunks is bounded as well."""

Measure = Annotated[float, Field(ge=0, le=1e15)]
"""A time in seconds, or a speed."""

PositiveMeasure = Annotated[float, Field(gt=0, le=1e15)]
"""The same, above zero."""

Loss = Annotated[float, Field(ge=-1e30, le=1e30)]
"""A mean over samples; far below the largest float, so that sums over a fleet stay finite."""

Word = Annotated[str, Field(max_length=200), AfterValidator(single_line)]
"""An id, a version, a state."""

Text = Annotated[str, Field(max_length=8000), AfterValidator(single_line)]
"""A reason, as text for people."""


FINDING_CHARACTERS = 1000
MOST_FINDINGS = 8  # per board

Finding = Annotated[
    str, Field(min_length=1, max_length=FINDING_CHARACTERS), AfterValidator(single_line)
]
"""One data finding of a board, as a sentence."""


def _ascending(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Check that ranges name every chunk at most once, which bounds the work of reading them."""
    previous_stop = 0
    is_valid = True
    for start, stop in ranges:
        is_valid = is_valid and previous_stop <= start < stop
        previous_stop = stop
    if not is_valid:
        raise ValueError(
            "ranges of chunks are half-open, not empty, and ascend without overlapping"
        )
    return ranges


_Index = Annotated[int, Field(ge=0, le=CHUNKS_LIMIT)]

Ranges = Annotated[tuple[tuple[_Index, _Index], ...], AfterValidator(_ascending)]
"""Half-open ``[start, stop)`` ranges of chunk indices, ascending."""
