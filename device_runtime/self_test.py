"""Whether this board can train: a few steps of a small set, before the fleet is joined.

A package can be installed and not work: built for another processor (the process dies of an illegal
instruction), a library of the system missing, a file overwritten. In a process of its own that
cannot take the agent down, and an agent that waits for its first task does not carry the runtime's
20 MB.
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
"""File of the state folder: what passed, so that it is not repeated at every start."""

_SET = "--set"
_STEPS = 20
_SECONDS = 240.0
"""A Raspberry Pi with a cold card needs about ten; systemd waits 600 for the agent to start."""


def self_test(state_dir: Path, backend: str) -> str:
    """Train in a process of its own, unless this runtime has passed here before.

    Returns:
        Why this board cannot train; empty where it can.
    """
    runtime = installed_backends().get(backend, "")
    tested = f"{runtime}, Python {sys.version.split()[0]}, Shoal {runtime_version()}"
    # Another version of any of these may not work where this one does.
    passed = state_dir / _PASSED
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if passed.read_text(encoding="utf-8") == tested:
            return ""
    problem = _run_test(runtime, f"pip install --force-reinstall {runtime.partition(' ')[0]}")
    if not problem:
        # Of a full disk the server hears when there is an update to keep.
        with contextlib.suppress(StorageError):
            write_atomically(passed, tested.encode())
    return problem


def provider_test(name: str) -> str:
    """Return why an execution provider of the runtime cannot train; empty where it can."""
    return _run_test(name, "the CPU does its work", name)


def set_test(manifest: Path, blobs: Path, graphs: Sequence[str]) -> str:
    """Return why an artifact set cannot be trained here; empty where it can.

    Args:
        manifest: its file.
        blobs: folder of the blob store.
        graphs: keys of its graphs, of which the first is the step.
    """
    return _run_test(
        "the artifact set",
        "tasks go on with the one before",
        _SET,
        str(manifest),
        str(blobs),
        *graphs,
    )


def _run_test(subject: str, remedy: str, *arguments: str) -> str:
    """Run this module in another process; return why that failed, empty where it passed."""
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
            f"{subject} has computed nothing within {_SECONDS:.0f} s: "
            "free this board, then start the agent again"
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
    """Return the line of a traceback that says most: of a chain of errors the first, its cause."""
    lines = output.strip().splitlines() or ["it printed nothing"]
    return next((line for line in lines if re.match(r"[\w.]*Error: ", line)), lines[-1])


# What follows runs in the other process, and imports there what the agent does not.


def _train_set(path: Path, folder: Path, graphs: Sequence[str]) -> None:
    """Check the graphs of a set as a task does, and take one step."""
    from device_runtime.training.backends.session import TrainSession  # noqa: PLC0415
    from device_runtime.training.epochs import self_test as take_step  # noqa: PLC0415
    from device_runtime.training.task import base_tensors  # noqa: PLC0415
    from fleet_protocol.graphs.check import check_graph  # noqa: PLC0415
    from fleet_protocol.manifest import parse_manifest  # noqa: PLC0415

    manifest = parse_manifest(path.read_bytes())
    blobs = BlobStore(folder)
    for key in graphs:
        check_graph(blobs.read(manifest.graphs[key].digest), manifest.graphs.values())
    step_graph = blobs.path(manifest.graphs[graphs[0]].digest)
    session = TrainSession(manifest, step_graph, base=base_tensors(manifest, blobs))
    take_step(session, manifest)


def _train_small_set(provider: str | None) -> list[float]:
    """Train the set that every board has; return the loss of each step."""
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
    """Train in this process, by the way of a task.

    An error ends it with its message on standard error.
    """
    try:
        if arguments[:1] == [_SET]:
            _set, manifest, blobs, *graphs = arguments
            _train_set(Path(manifest), Path(blobs), graphs)
            return
        losses = _train_small_set(arguments[0] if arguments else None)
    except Exception as error:  # noqa: BLE001  (its errors have no base)
        cause: BaseException = error
        while isinstance(cause.__cause__, ImportError):  # what is missing, not what misses it
            cause = cause.__cause__
        sys.exit(f"{type(cause).__name__}: {cause}")
    first = losses[0]
    last = losses[-1]
    if not (abs(first - math.log(4)) < 1e-3 and last < first / 5):
        sys.exit(
            f"twenty training steps take the loss from {first} to {last} "
            "instead of from 1.386 to nearly nothing"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
