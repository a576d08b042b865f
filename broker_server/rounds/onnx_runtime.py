"""Opens graphs with onnxruntime, which is imported when the first graph runs.

A graph may come from an untrusted source, so it must pass the check that boards use before it is
opened, and each run of it has a deadline. Between two operators, and between two steps of a loop,
onnxruntime checks whether it should stop.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fleet_protocol.errors import BlobError, DataError, RefusedError
from fleet_protocol.graphs.check import read_checked_graph
from fleet_protocol.onnx_runtime import load_runtime

_MISSING = "evaluating needs onnxruntime: pip install 'shoal[server]' (or 'shoal[server-training]')"

RUN_SECONDS = 600.0
"""The most seconds that a graph may take for one batch."""


class GraphStopper:
    """Stops running graphs and prevents further runs; see `OpenGraph`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Any] = []
        self._stopped = False

    def stop(self) -> None:
        """Stop all runs soon; callable from any thread."""
        with self._lock:
            self._stopped = True
            for options in self._running:
                options.terminate = True

    @contextlib.contextmanager
    def watching(self, options: Any) -> Iterator[None]:
        """Register a run while it lasts."""
        with self._lock:
            options.terminate = self._stopped
            self._running.append(options)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(options)


class OpenGraph:
    """An open graph, and the `GraphStopper` that may stop it."""

    def __init__(self, session: Any, new_options: Callable[[], Any], halt: GraphStopper) -> None:
        self._session = session
        self._new_options = new_options
        self._halt = halt

    def run(self, names: Sequence[str] | None, inputs: Mapping[str, NDArray[Any]]) -> list[Any]:
        """Run the graph on a batch, for at most `RUN_SECONDS`.

        Errors of onnxruntime are not caught.
        """
        options = self._new_options()
        deadline = threading.Timer(RUN_SECONDS, _terminate, (options,))
        deadline.daemon = True
        with self._halt.watching(options):
            deadline.start()
            try:
                outputs: list[Any] = self._session.run(names, inputs, options)
            finally:
                deadline.cancel()
        return outputs


def _terminate(options: Any) -> None:
    options.terminate = True


def open_graph(path: Path, *, threads: int = 0, halt: GraphStopper | None = None) -> OpenGraph:
    """Check an ONNX graph as a board does, and open it; with 0 threads an operator uses every core.

    Runs of the graph stop with `halt`, if it is given.

    Raises:
        ConfigError: onnxruntime is not installed, or two packages of it are.
        BlobError: onnxruntime cannot run the graph, or it has parts that the exporter does not
            write.
    """
    runtime = load_runtime(_MISSING)
    try:
        data = read_checked_graph(path)
    except RefusedError as error:
        raise BlobError(f"{path}: {error}; export the architecture again") from error
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    # It would also print the errors of a graph, which are exceptions.
    options.log_severity_level = 4
    # Idle worker threads that spin would take the cores from devices on the same machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        # Otherwise it prints the error, with names of the graph, and tries the same again.
        session = runtime.InferenceSession(
            data,
            options,
            providers=["CPUExecutionProvider"],
            enable_fallback=0,
        )
    except Exception as error:  # onnxruntime's own exceptions share no public base class
        raise BlobError(f"onnxruntime cannot open {path}: {error}") from error
    return OpenGraph(session, runtime.RunOptions, halt or GraphStopper())


def run_graph(
    graph: OpenGraph,
    names: Sequence[str],
    inputs: Mapping[str, NDArray[Any]],
    source: str,
) -> list[Any]:
    """Run an opened graph.

    Args:
        graph: the graph.
        names: names of the outputs.
        inputs: the inputs by name.
        source: source of the samples, for messages.

    Raises:
        DataError: the graph does not run on the samples, for example because of a token beyond its
            table.
    """
    try:
        return graph.run(names, inputs)
    except Exception as error:  # onnxruntime, as above
        raise DataError(f"the graph does not run on samples of {source}: {error}") from error
