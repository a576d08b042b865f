"""Controls when memory is freed: the heaps of glibc, and Python's collection of cycles."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# For a server, which allocates and frees large memory for updates all the time.
_SERVER_MMAP_BYTES = 1 << 20
_SERVER_KEPT_BYTES = 1 << 24
# A round creates many objects that live until its end, and hardly any cycles.
_SERVER_GC_THRESHOLDS = (20_000, 20, 10)
# Smaller than a chunk, so that chunks in the inbox leave no gaps in the heap.
_BOARD_BYTES = 64 * 1024


def settle_allocator(mmap_bytes: int = _BOARD_BYTES, kept_bytes: int = _BOARD_BYTES) -> None:
    """Limit the allocator to one heap, if it is glibc's.

    Otherwise every thread may grow a separate heap, and after the first large buffer is freed glibc
    keeps buffers of that size in the heap, where they fragment.

    Args:
        mmap_bytes: buffers of at least this size are mapped outside the heap.
        kept_bytes: free memory at the end of the heap that is not returned to the system.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, mmap_bytes)
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)


@contextlib.contextmanager
def server_memory() -> Iterator[None]:
    """Set the allocator up for many updates, and collect cycles of objects less often."""
    settle_allocator(_SERVER_MMAP_BYTES, _SERVER_KEPT_BYTES)
    before = gc.get_threshold()
    gc.set_threshold(*_SERVER_GC_THRESHOLDS)
    # Imported modules live as long as the server, and are most of what a collection would visit.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def release_freed_memory() -> None:
    """Return freed memory to the system, which glibc would keep in its heap."""
    with contextlib.suppress(OSError, AttributeError):  # the C library of another system
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def lasting_objects() -> Iterator[None]:
    """Pause the collection of cycles while modules are imported, and skip their objects later.

    Each collection would visit all of them, which takes a fifth of a second with PyTorch. Whatever
    is alive at the end counts as lasting, so only a process that ends with its command may use
    this.
    """
    with _paused_collection():
        yield
        gc.collect()
        gc.freeze()


@contextlib.contextmanager
def passing_objects() -> Iterator[None]:
    """Pause the collection of cycles while millions of objects are made that end together."""
    # The collection at the end skips older objects.
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    try:
        with _paused_collection():
            yield
        gc.collect()
    finally:
        if freezes:
            gc.unfreeze()


@contextlib.contextmanager
def _paused_collection() -> Iterator[None]:
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
