"""Tests whether this board can train, with a few steps of a small set, before it joins the fleet.

A package can be installed but not work: it may be built for another processor (the process dies of
an illegal instruction), lack a system library, or have an overwritten file. The test runs in
another process, which cannot take the agent down. An agent that waits for its first task also does
not carry the runtime's 20 MB.
"""

import contextlib
import math
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from device_runtime.board import installed_backends, runtime_version
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.child_process import python_module
from fleet_protocol.errors import StorageError

_PASSED = "self-test"
"""File in the state folder; records what passed, to avoid a test at every start."""

_SET = "--set"
_STEPS = 20
_SECONDS = 240.0
"""Time limit.

A Raspberry Pi with a cold card needs about ten seconds; systemd waits 600 for the agent to start.
"""


def self_test(state_dir: Path, backend: str) -> str:
    """Train in another process, unless this runtime has passed here before.

    Returns:
        Why this board cannot train; empty if it can.
    """
    runtime = installed_backends().get(backend, "")
    tested = f"{runtime}, Python {sys.version.split()[0]}, Shoal {runtime_version()}"
    # Another version of any of these may not work even if this one does.
    passed = state_dir / _PASSED
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if passed.read_text(encoding="utf-8") == tested:
            return ""
    problem = _run_test(runtime, f"pip install --force-reinstall {runtime.partition(' ')[0]}")
    if not problem:
        # The server is informed of a full disk when there is an update to save.
        with contextlib.suppress(StorageError):
            write_atomically(passed, tested.encode())
    return problem


def provider_test(name: str) -> str:
    """Return why an execution provider of the runtime cannot train; empty if it can."""
    return _run_test(name, "the CPU is used instead", name)


def set_test(manifest: Path, blobs: Path, graphs: Sequence[str]) -> str:
    """Return why an artifact set cannot be trained here; empty if it can.

    Args:
        manifest: its file.
        blobs: folder of the blob store.
        graphs: keys of its graphs; the first is the step.
    """
    return _run_test(
        "the artifact set",
        "tasks keep using the previous one",
        _SET,
        str(manifest),
        str(blobs),
        *graphs,
    )


def _run_test(subject: str, remedy: str, *arguments: str) -> str:
    """Run this module in another process; return why that failed, empty if it passed."""
    command = [*python_module("device_runtime.self_test"), *arguments]
    try:
        done = subprocess.run(  # noqa: S603  (this interpreter, these arguments)
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (
            f"{subject} has computed nothing within {_SECONDS:.0f} s: stop other programs on "
            "this board, then restart the agent"
        )
    except OSError as error:
        return f"the self-test of {subject} did not start: {error}"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        why = f"it died of {name}: is it built for this processor?"
    else:
        why = _cause(done.stderr)
    return f"{subject} does not work on this board: {why} ({remedy})"


def _cause(output: str) -> str:
    """Return the most informative line of a traceback: in a chain of errors, the first error."""
    lines = output.strip().splitlines() or ["it printed nothing"]
    return next((line for line in lines if re.match(r"[\w.]*Error: ", line)), lines[-1])


# The functions below run in the other process, which imports modules that the agent does not.


def _train_set(path: Path, folder: Path, graphs: Sequence[str]) -> None:
    """Check the graphs of a set as a task does, and take one step."""
    from device_runtime.training.backends.lower_part import LowerGraph  # noqa: PLC0415
    from device_runtime.training.backends.session import TrainSession  # noqa: PLC0415
    from device_runtime.training.epochs import self_test as take_step  # noqa: PLC0415
    from device_runtime.training.task import base_tensors  # noqa: PLC0415
    from fleet_protocol.graph_parts import BELOW, stays_on_board  # noqa: PLC0415
    from fleet_protocol.graphs.check import check_graph  # noqa: PLC0415
    from fleet_protocol.manifest import parse_manifest  # noqa: PLC0415

    manifest = parse_manifest(path.read_bytes())
    blobs = BlobStore(folder)
    for key in graphs:
        graph = blobs.read(manifest.graphs[key].digest)
        check_graph(graph, manifest.graphs.values(), leaves_board=not stays_on_board(key))
    step_graph = blobs.path(manifest.graphs[graphs[0]].digest)
    lower = None
    if BELOW in graphs:
        lower = LowerGraph(blobs.path(manifest.graphs[BELOW].digest), None, "")
    base = base_tensors(manifest, blobs)
    session = TrainSession(manifest, step_graph, base=base, lower=lower)
    take_step(session, manifest)


def _train_small_set(provider: str | None) -> list[float]:
    """Train the set that is installed on every board; return the loss of each step."""
    import numpy as np  # noqa: PLC0415

    from device_runtime.training.backends.runtime import CPU  # noqa: PLC0415
    from device_runtime.training.backends.session import TrainSession  # noqa: PLC0415
    from fleet_protocol.manifest import Manifest  # noqa: PLC0415

    folder = Path(__file__).parent / "self_test_set"
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    session = TrainSession(manifest, folder / "train.onnx", provider=provider or CPU)
    session.load({spec.name: np.zeros(spec.shape, np.float32) for spec in manifest.parameters})
    x = np.eye(4, 12, dtype=np.float32).reshape(4, 3, 4)
    labels = np.arange(4)
    mask = np.ones(4, np.float32)
    return [session.step(x, labels, mask, 0.1) for _ in range(_STEPS)]


def main(arguments: Sequence[str]) -> None:
    """Train in this process, with the code of a task.

    An error ends the process with its message on standard error.
    """
    try:
        if arguments[:1] == [_SET]:
            _set, manifest, blobs, *graphs = arguments
            _train_set(Path(manifest), Path(blobs), graphs)
            return
        losses = _train_small_set(arguments[0] if arguments else None)
    except Exception as error:  # noqa: BLE001  (its errors have no base)
        cause: BaseException = error
        # the library that is missing, not the module that imports it
        while isinstance(cause.__cause__, ImportError):
            cause = cause.__cause__
        sys.exit(f"{type(cause).__name__}: {cause}")
    first = losses[0]
    last = losses[-1]
    if not (abs(first - math.log(4)) < 1e-3 and last < first / 5):
        sys.exit(
            f"twenty training steps change the loss from {first} to {last}; it should fall "
            "from 1.386 to nearly 0"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
