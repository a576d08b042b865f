"""Whether this board can train: a few steps of a small set in a process of its own, before the
fleet is joined.

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
_SECONDS = 240.0
"""A Raspberry Pi with a cold card needs about ten; systemd waits 600 for the agent to start."""


def self_test(state_dir: Path, backend: str) -> str:
    """Train in a process of its own, unless this runtime has passed here before.

    Why this board cannot, if so.
    """
    runtime = installed_backends().get(backend, "")
    tested = f"{runtime}, Python {sys.version.split()[0]}, Shoal {runtime_version()}"
    passed = state_dir / _PASSED
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if passed.read_text(encoding="utf-8") == tested:
            return ""
    found = _tried(runtime, f"pip install --force-reinstall {runtime.partition(' ')[0]}")
    if not found:
        with contextlib.suppress(
            StorageError
        ):  # a full disk is told when there is something to keep
            write_atomically(passed, tested.encode())
    return found


def provider_test(name: str) -> str:
    """Why an execution provider of the runtime cannot train; empty where it can."""
    return _tried(name, "the CPU does its work", name)


def set_test(manifest: Path, blobs: Path, graphs: Sequence[str]) -> str:
    """Why an artifact set cannot be trained here; of its graphs by key, the first is the step."""
    return _tried(
        "the artifact set",
        "tasks go on with the one before",
        _SET,
        str(manifest),
        str(blobs),
        *graphs,
    )


def _tried(runtime: str, remedy: str, *arguments: str) -> str:
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
        return f"{runtime} has computed nothing within {_SECONDS:.0f} s: free this board, then start the agent again"
    except OSError as error:
        return f"the self-test of {runtime} did not start: {error}"
    if not done.returncode:
        return ""
    if done.returncode < 0:
        why = f"it died of {signal.Signals(-done.returncode).name}: is it built for this processor?"
    else:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        why = next(
            (line for line in lines if re.match(r"[\w.]*Error: ", line)), lines[-1]
        )  # of a chain, the cause
    return f"{runtime} does not work on this board: {why} ({remedy})"


def _step_of_set(path: Path, folder: Path, graphs: Sequence[str]) -> None:
    """Look at the graphs of a set as a task does, and take one step."""
    from device_runtime.training.backends.session import TrainSession  # noqa: PLC0415  (as in main)
    from device_runtime.training.epochs import self_test as step  # noqa: PLC0415
    from device_runtime.training.task import base_tensors  # noqa: PLC0415
    from fleet_protocol.graphs.check import check_graph  # noqa: PLC0415
    from fleet_protocol.manifest import parse_manifest  # noqa: PLC0415

    manifest = parse_manifest(path.read_bytes())
    blobs = BlobStore(folder)
    for key in graphs:
        check_graph(blobs.read(manifest.graphs[key].digest), manifest.graphs.values())
    train = blobs.path(manifest.graphs[graphs[0]].digest)
    step(TrainSession(manifest, train, base=base_tensors(manifest, blobs)), manifest)


def main() -> None:
    """Train in this process, by the way of a task.

    An error ends it with its message on standard error.
    """
    import numpy as np  # noqa: PLC0415  (the agent imports this module, not what the test needs)

    from device_runtime.training.backends.runtime import CPU  # noqa: PLC0415
    from device_runtime.training.backends.session import TrainSession  # noqa: PLC0415
    from fleet_protocol.manifest import Manifest  # noqa: PLC0415

    folder = Path(__file__).parent / "self_test_set"
    try:
        if sys.argv[1:2] == [_SET]:
            _step_of_set(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
            return
        manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
        session = TrainSession(manifest, folder / "train.onnx", provider=(*sys.argv[1:], CPU)[0])
        session.load({each.name: np.zeros(each.shape, np.float32) for each in manifest.parameters})
        x, mask = (
            np.eye(4, 12, dtype=np.float32).reshape(4, 3, 4),
            np.ones(4, np.float32),
        )
        first, *_, last = (session.step(x, np.arange(4), mask, 0.1) for _ in range(20))
    except Exception as error:  # noqa: BLE001  (its errors have no base)
        cause: BaseException = error
        while isinstance(cause.__cause__, ImportError):  # what lacks, and not whom it lacks to
            cause = cause.__cause__
        sys.exit(f"{type(cause).__name__}: {cause}")
    if not (abs(first - math.log(4)) < 1e-3 and last < first / 5):
        sys.exit(
            f"twenty training steps take the loss from {first} to {last} instead of from 1.386 to nearly nothing"
        )


if __name__ == "__main__":
    main()
