"""Sessions of onnxruntime with the settings that a board needs.

Importing it costs 20 MB, so an idle agent waits.
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

_PROVIDER = "ExecutionProvider"  # the end of every provider's name
# float32, as the graph says, not ten bits of it
_OPTIONS = MappingProxyType({"CUDA": {"use_tf32": "0"}})
_ARENA_BYTES = 64 * 1024 * 1024
_MADV_DONTNEED = 4  # from Linux' mman.h
_MAPPED = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) .* (/.+\.so[.\d]*)\n(?:[A-Z].*\n)*?Anonymous: +(\d+) kB$",
    re.MULTILINE,
)
_PATTERN_BYTES = 8 * 1024 * 1024  # a block for a larger step is felt beside what the arena holds
# A free piece that is larger than needed by more than this is cut; 128 MB is the default.
_DEAD_BYTES = 64 * 1024


def load_runtime() -> Any:
    """Import ``onnxruntime``, whichever package provides it, without torch or onnx.

    Raises:
        ConfigError: no such package is installed, or two.
    """
    forget_loading("before onnxruntime")  # which takes 25 MB itself
    return onnx_runtime.load_runtime(
        "no onnxruntime on this board: pip install 'shoal[device]' (or 'shoal[device-training]')"
    )


@functools.cache
def forget_loading(_moment: str) -> None:
    """Unmap, once at a moment, what of libraries was read to load them.

    What is used is mapped again by its first use. Only pages that are as in the file go, by what
    Linux says. A library that another thread loads just now stays: what is written of it is mapped
    last.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        madvise = ctypes.CDLL(None).madvise
        mappings = _MAPPED.findall(Path("/proc/self/smaps").read_bytes())
        for _library, mapped in itertools.groupby(mappings, lambda mapping: mapping[3]):
            *read, written = mapped
            if written[2] != b"rw-p":
                continue  # it is being loaded just now
            for start, end, rights, _file, own in read:
                if rights.startswith(b"r-") and own == b"0":
                    first = int(start, 16)
                    size = int(end, 16) - first
                    madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_DONTNEED)


@functools.cache
def _shared_arena() -> bool:
    """Register one arena for all sessions; return False where the runtime has no such thing.

    Its first region is large enough for the intermediate tensors of most tiers: they are then cut
    out of one piece, where regions that grow by doubling fragment. Only pages that are touched
    count as resident.
    """
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
                "initial_chunk_size_bytes": _ARENA_BYTES,
                "max_dead_bytes_per_chunk": _DEAD_BYTES,
            }
        )
        runtime.create_and_register_allocator(memory, arena)
    # Its errors have no base: an older runtime, or one that has an arena already.
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

    A device that trains ``conv`` at width 1, batch 32, peaks at 156 MB with them (onnxruntime
    1.31.1, x86-64), 8 MB higher with an arena per session, 50 MB higher with memory patterns, which
    only a step of a known and small peak has; without any arena it is 9 MB lower and two to three
    times slower.

    Args:
        graph: its file.
        specs: the graphs of the manifest, which it must be one of.
        threads: of an operator; with 0 it takes every core.
        leaves: whether its outputs leave the board; they must then tell nothing of single samples,
            see `check_graph`.
        as_written: run as the exporter wrote it. It opens in a third of the time: for a training
            step the runtime looks long, and finds nothing that is faster.
        peak_bytes: of its memory, None where it is not known.
        provider: of onnxruntime; the CPU computes what another one lacks.

    Returns:
        An ``onnxruntime.InferenceSession``.

    Raises:
        RefusedError: the graph is not what the manifest says, or not one that a board runs; see
            `fleet_protocol.graphs`.
        BlobError: the file cannot be read.
    """
    try:
        with (
            graph.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            check_graph(data, specs, leaves_board=leaves)
    except (OSError, ValueError) as error:  # a file of no bytes cannot be mapped
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
    """Return the settings of a session; arguments as of `open_session`."""
    runtime = load_runtime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if _shared_arena():
        options.add_session_config_entry("session.use_env_allocators", "1")
    # A pattern is one block for all intermediate tensors of a batch size, kept beside what the
    # arena already holds. A small step takes a tenth less with it, because the arena is asked once
    # instead of for every tensor.
    options.enable_mem_pattern = peak_bytes is not None and peak_bytes <= _PATTERN_BYTES
    # Planning which tensor may lie where another lay takes up to half of the opening, growing
    # faster than the graph. The arena gives out what was freed anyway: steps take as long, to the
    # same bits, and peaks are no higher.
    options.enable_mem_reuse = False
    # The order of the file, which the exporter chose for memory; the default order delays weight
    # gradients to the end.
    options.execution_order = runtime.ExecutionOrder.PRIORITY_BASED
    if as_written:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    # Idle worker threads that spin take the core from the rest of the board.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def offered() -> tuple[str, ...]:
    """Return the execution providers of the installed runtime, without the end of their names."""
    return tuple(name.removesuffix(_PROVIDER) for name in load_runtime().get_available_providers())


def make_session(graph: Path, options: Any, provider: str) -> Any:
    """Open an ``InferenceSession`` on a provider.

    Raises:
        Exception: of any kind, where that cannot be; left to itself the runtime takes the CPU then.
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
        raise RuntimeError("onnxruntime could not load it, and has said why on standard error")
    return session
