"""Device agents as separate processes on this machine, for the demo and for trying a fleet before buying boards."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.child_process import python_module
from fleet_protocol.errors import TransportError

_STOP_SECONDS = 10.0
_LOG_LINES = 5


@dataclass(frozen=True)
class LocalDevice:
    """One agent to start."""

    name: str
    data: Path  # npz file with `x` and `y`
    max_width: float  # widest sub-model it may be given
    max_depth: int | None = None  # deepest sub-model it may be given; None for no limit
    own_model: Path | None = None  # folder of the pair with a model of its own, if it has one
    state_dir: Path | None = None  # where it keeps its task and blobs; by default below the fleet's folder
    enrolment: Path | None = None  # its file in an enrolled fleet


def _toml(fleet: str, broker: str, folder: Path, device: LocalDevice, holdout: float) -> str:
    depth = "" if device.max_depth is None else f"max_depth = {device.max_depth}\n"
    own = "" if device.own_model is None else f'[own_model]\nset = "{device.own_model.as_posix()}"\n'
    identity = "" if device.enrolment is None else f'[identity]\nfile = "{device.enrolment.as_posix()}"\n'
    return (
        f'fleet = "{fleet}"\ndevice = "{device.name}"\nbroker = "{broker}"\n'
        f'state_dir = "{(device.state_dir or folder / device.name).as_posix()}"\nmax_width = {device.max_width}\n'
        f"{depth}holdout = {holdout}\nthreads = 1\n\n"
        f'[data]\nkind = "npz"\npath = "{device.data.as_posix()}"\n{own}{identity}'
    )


class LocalFleet:
    """Agents of one thread that run while the context is open; each writes ``<folder>/<name>.log``."""

    def __init__(
        self, folder: Path, *, fleet: str, broker: str, devices: Sequence[LocalDevice], holdout: float = 0.0
    ) -> None:
        self._folder = folder.resolve()
        self._configs = {device.name: _toml(fleet, broker, self._folder, device, holdout) for device in devices}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def processes(self) -> Mapping[str, subprocess.Popen[bytes]]:
        """The running agents by device."""
        return self._processes

    def __enter__(self) -> Self:
        for name, text in self._configs.items():
            write_atomically(self._config(name), text.encode())
            self.start(name)
        return self

    def _config(self, name: str) -> Path:
        return self._folder / f"{name}.toml"

    def start(self, name: str) -> None:
        """Start an agent, the first time or again."""
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(  # noqa: S603  (our own module, arguments are ours)
                python_module("device_runtime", "--config", str(self._config(name))),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def check(self) -> None:
        """See that every agent still runs; a TransportError shows the end of the log of one that has ended."""
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None:
                log = self._folder / f"{name}.log"
                tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
                raise TransportError(f"device {name} ended with exit code {code}; the end of {log}:\n  {tail}")

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_SECONDS)
