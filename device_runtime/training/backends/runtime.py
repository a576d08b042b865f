"""Opens onnxruntime sessions with settings that suit a board.

Importing onnxruntime costs 20 MB, so an idle agent does not do it.
"""

import contextlib
import ctypes
import functools
import itertools
import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fleet_protocol import onnx_runtime
from fleet_protocol.errors import BlobError
from fleet_protocol.graphs.check import check_graph
from fleet_protocol.manifest import GraphSpec

CPU = "CPU"
"""The provider that every runtime has."""

_PROVIDER = "ExecutionProvider"  # suffix of every provider's name
# float32 as in the graph, instead of ten bits of mantissa
_OPTIONS = MappingProxyType({"CUDA": {"use_tf32": "0"}})
_ARENA_BYTES = 64 * 1024 * 1024
_MADV_DONTNEED = 4  # from Linux' mman.h
_MAPPED = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) .* (/.+\.so[.\d]*)\n(?:[A-Z].*\n)*?Anonymous: +(\d+) kB$",
    re.MULTILINE,
)
# a block for a larger step is noticeable beside the memory of the arena
_PATTERN_BYTES = 8 * 1024 * 1024
# A free piece is split if it is larger than needed by more than this; onnxruntime's default is 128
# MB.
_DEAD_BYTES = 64 * 1024


def load_runtime() -> Any:
    """Import ``onnxruntime`` from whichever package provides it, without torch or onnx.

    Raises:
        ConfigError: no such package is installed, or two are.
    """
    forget_loading("before onnxruntime")  # which uses 25 MB itself
    return onnx_runtime.load_runtime(
        "no onnxruntime on this board: pip install 'shoal[device]' (or 'shoal[device-training]')"
    )


@functools.cache
def forget_loading(_moment: str) -> None:
    """Unmap parts of libraries that were read only to load them; one thread at a time.

    Parts in use are mapped again at their next use. Only pages that equal the file are unmapped,
    according to Linux. A library that another thread is loading is skipped: its writable part is
    mapped last.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        madvise = ctypes.CDLL(None).madvise
        mappings = _MAPPED.findall(Path("/proc/self/smaps").read_bytes())
        for _library, mapped in itertools.groupby(mappings, lambda mapping: mapping[3]):
            *read, written = mapped
            if written[2] != b"rw-p":
                continue  # another thread is loading it
            for start, end, rights, _file, own in read:
                if rights.startswith(b"r-") and own == b"0":
                    first = int(start, 16)
                    size = int(end, 16) - first
                    madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_DONTNEED)


class Arena:
    """One arena for all sessions of this process, made for the first of them."""

    def __init__(self) -> None:
        self._is_shared: bool | None = None

    def share(self, peak_bytes: int) -> bool:
        """Register the arena at the first call; return False if the runtime does not support that.

        Its first region holds the intermediate tensors of the first graph: they are then allocated
        in one piece, whereas regions that grow by doubling fragment. Only pages that were touched
        count as resident.

        Args:
            peak_bytes: peak memory of the graph; 0 if it is unknown.
        """
        if self._is_shared is None:
            self._is_shared = _register_arena(max(_ARENA_BYTES, peak_bytes))
        return self._is_shared


_ARENA = Arena()


def _register_arena(first_bytes: int) -> bool:
    runtime = load_runtime()
    try:
        memory = runtime.OrtMemoryInfo(
            "Cpu",
            runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR,
            0,
            runtime.OrtMemType.DEFAULT,
        )
        arena = runtime.OrtArenaCfg(
            {
                "arena_extend_strategy": 0,
                "initial_chunk_size_bytes": first_bytes,
                "max_dead_bytes_per_chunk": _DEAD_BYTES,
            }
        )
        runtime.create_and_register_allocator(memory, arena)
    # Its errors have no common base class: an older runtime, or one that has an arena already.
    except Exception:  # noqa: BLE001
        return False
    return True


def open_session(  # noqa: PLR0913  (options by keyword)
    graph: Path,
    specs: Iterable[GraphSpec],
    *,
    threads: int = 1,
    leaves: bool = True,
    as_written: bool = False,
    peak_bytes: int | None = None,
    provider: str = CPU,
) -> Any:
    """Check a graph, and open it with the settings that need the least memory at full speed.

    With these settings a device that trains ``conv`` at width 1, batch 32, peaks at 156 MB
    (onnxruntime 1.31.1, x86-64). It peaks 8 MB higher with one arena per session, and 50 MB higher
    with memory patterns, which are used only for steps with a known small peak. Without an arena it
    peaks 9 MB lower and is two to three times slower.

    Args:
        graph: its file.
        specs: the graphs of the manifest; the file must be one of them.
        threads: threads of an operator; 0 uses every core.
        leaves: whether its outputs leave the board; they must then reveal nothing about single
            samples, see `check_graph`.
        as_written: run the graph as the exporter wrote it. It then opens in a third of the time:
            for a training step the runtime searches long for optimizations and finds none that is
            faster.
        peak_bytes: peak memory of the graph; None if it is unknown.
        provider: provider of onnxruntime; the CPU runs operators that the provider lacks.

    Returns:
        An ``onnxruntime.InferenceSession``.

    Raises:
        RefusedError: the graph differs from the manifest, or a board must not run it; see
            `fleet_protocol.graphs`.
        BlobError: the file cannot be read.
    """
    try:
        with (
            graph.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            check_graph(data, specs, leaves_board=leaves)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise BlobError(f"cannot read graph {graph}: {error}") from error
    options = _session_options(
        threads,
        as_written=as_written,
        peak_bytes=peak_bytes,
    )
    session = make_session(graph, options, provider)
    forget_loading("after the first session")
    return session


def _session_options(threads: int, *, as_written: bool, peak_bytes: int | None) -> Any:
    """Return the settings of a session; arguments as in `open_session`."""
    runtime = load_runtime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if _ARENA.share(peak_bytes or 0):
        options.add_session_config_entry("session.use_env_allocators", "1")
    # A pattern is one block for all intermediate tensors of a batch size, kept beside the arena's
    # memory. A small step takes a tenth less time with it, because it allocates from the arena once
    # instead of for every tensor.
    options.enable_mem_pattern = peak_bytes is not None and peak_bytes <= _PATTERN_BYTES
    # Planning the reuse of tensors' memory takes up to half of the opening time, and grows faster
    # than the graph. The arena reuses freed memory anyway: steps take as long, give the same bits,
    # and peak no higher.
    options.enable_mem_reuse = False
    # The order of the file, which the exporter chose to save memory; the default order delays
    # weight gradients to the end.
    options.execution_order = runtime.ExecutionOrder.PRIORITY_BASED
    if as_written:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # It would also print the errors of a graph, which are exceptions.
    options.log_severity_level = 4
    # Idle worker threads that spin take the core from other programs on the board.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def offered() -> tuple[str, ...]:
    """Return the execution providers of the installed runtime, without their suffix."""
    return tuple(name.removesuffix(_PROVIDER) for name in load_runtime().get_available_providers())


def make_session(graph: Path, options: Any, provider: str) -> Any:
    """Open an ``InferenceSession`` on a provider.

    Raises:
        Exception: of any kind, if that fails; by default the runtime would silently use the CPU.
    """
    names = dict.fromkeys((provider, CPU))  # each once
    chosen = [(name + _PROVIDER, _OPTIONS.get(name, {})) for name in names]
    session = load_runtime().InferenceSession(
        str(graph),
        options,
        providers=chosen,
        enable_fallback=0,
    )
    if provider + _PROVIDER not in session.get_providers():
        raise RuntimeError("onnxruntime could not load it; the reason is on standard error")
    return session
