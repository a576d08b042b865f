"""Runs the agents of a small fleet on this machine, for the demo and for tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from typing_extensions import Self

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.child_process import ChildProcess, child_module, end_children
from fleet_protocol.errors import TransportError

_LOG_LINES = 5
"""Number of last lines of an agent's log in an error."""


@dataclass(frozen=True)
class LocalDevice:
    """An agent to start.

    Attributes:
        name: the device's id.
        data: npz file with its samples, ``x`` and ``y``.
        max_width: width of its largest sub-model.
        max_depth: depth of its largest sub-model, in blocks; None for no limit.
        own_model: folder of the artifact set of its personal model, if it has one.
        state_dir: folder of its task and blobs; None: one below the fleet's folder.
        enrolment: its enrolment file, in a fleet with identities.
        cache: bytes of the outputs of frozen layers that it may keep; 0 keeps none.
    """

    name: str
    data: Path
    max_width: float
    max_depth: int | None = None
    own_model: Path | None = None
    state_dir: Path | None = None
    enrolment: Path | None = None
    cache: int = 0

    def configuration(self, fleet: str, broker: str, folder: Path, holdout: float) -> str:
        """Return the text of its device.toml."""
        state_dir = self.state_dir or folder / self.name
        document: dict[str, Any] = {
            "fleet": fleet,
            "device": self.name,
            "broker": broker,
            "state_dir": state_dir.as_posix(),
            "max_width": self.max_width,
            "holdout": holdout,
            # One thread for each agent, because all share this machine.
            "threads": 1,
            "data": {"kind": "npz", "path": self.data.as_posix()},
        }
        if self.cache:
            document["cache"] = self.cache
        if self.max_depth is not None:
            document["max_depth"] = self.max_depth
        if self.own_model is not None:
            document["own_model"] = {"set": self.own_model.as_posix()}
        if self.enrolment is not None:
            document["identity"] = {"file": self.enrolment.as_posix()}
        return tomli_w.dumps(document)


class LocalFleet:
    """Agents, one thread each, that run while the context is open.

    Each writes ``<folder>/<name>.log``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fleet: str,
        broker: str,
        devices: Sequence[LocalDevice],
        holdout: float = 0.0,
    ) -> None:
        self._folder = folder.resolve()
        self._configs = {
            device.name: device.configuration(fleet, broker, self._folder, holdout)
            for device in devices
        }
        self._processes: dict[str, ChildProcess] = {}

    @property
    def processes(self) -> Mapping[str, ChildProcess]:
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
        """Start an agent, for the first time or again."""
        previous = self._processes.get(name)
        # Two agents must not share the folder of a device.
        if previous is not None:
            previous.end()
        # Appended, so that the log of an agent that was started again stays.
        with (self._folder / f"{name}.log").open("ab") as log:
            command = child_module("device_runtime", "--config", str(self._config(name)))
            self._processes[name] = ChildProcess(command, output=log, errors=log)

    def check(self) -> None:
        """Check that every agent still runs.

        Raises:
            TransportError: an agent has exited; the message contains the end of its log.
        """
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None:
                log = self._folder / f"{name}.log"
                tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
                raise TransportError(
                    f"the agent of device {name} exited with code {code}; the end of"
                    f" {log}:\n  {tail}"
                )

    def __exit__(self, *_: object) -> None:
        end_children(self._processes.values())
