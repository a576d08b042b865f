"""What glibc does with memory that was freed: how many heaps there are, and what goes back to the
system.
"""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from glibc's malloc.h
_APART_BYTES, _KEPT_BYTES = (
    1 << 20,
    1 << 24,
)  # of a server: so much comes and goes with updates all the time
_COLLECTING = (
    20_000,
    20,
    10,
)  # a round makes many objects that stay to its end, and hardly any circles
_BOARD_BYTES = (
    64 * 1024
)  # below a chunk on the wire, so that chunks in the inbox leave nothing behind


def settle_allocator(apart_bytes: int = _BOARD_BYTES, kept_bytes: int = _BOARD_BYTES) -> None:
    """Keep one heap, larger buffers apart from it, and of what is freed at its end so much.

    Only glibc knows how.

    Without it every thread may grow a heap of its own, and the first large buffer that is freed
    teaches glibc to keep buffers of that size in the heap, where they fragment.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, apart_bytes)
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)


@contextlib.contextmanager
def server_memory() -> Iterator[None]:
    """Settle the allocator for many updates, and look for circles of objects less often meanwhile."""
    settle_allocator(_APART_BYTES, _KEPT_BYTES)
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECTING)
    try:
        yield
    finally:
        gc.set_threshold(*before)
