"""Runs boards on this machine beside a run, each in its own process."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_protocol.child_process import ChildProcess, child_module, end_children
from fleet_protocol.errors import ConfigError, StorageError, TransportError
from shoal.extras import needs

if TYPE_CHECKING:
    from device_runtime.settings import DeviceConfig

_LOG_LINES = 3
"""Number of last lines of a board's log in an error."""


def read_boards(files: Sequence[Path]) -> list["DeviceConfig"]:
    """Read the configurations of boards, in order.

    Raises:
        ConfigError: a configuration cannot be read or is invalid.
    """
    if not files:
        return []
    with needs("device"):
        from device_runtime.settings import load_device_config  # noqa: PLC0415
    return [load_device_config(file) for file in files]


class LocalBoards:
    """Agents that run while `running` is open.

    Each writes its log beside its configuration: ``attic.log`` beside ``attic.toml``.
    """

    def __init__(self, files: Sequence[Path], fleet: str) -> None:
        """Read the configurations.

        Args:
            files: the boards' configurations.
            fleet: name of the fleet that they must name.

        Raises:
            ConfigError: a configuration is invalid, or two boards have the same name.
        """
        self.logs: dict[str, Path] = {}
        self._files: dict[str, Path] = {}
        self._failed: dict[str, int] = {}
        self._ending = threading.Event()
        for file, config in zip(files, read_boards(files), strict=True):
            if config.fleet != fleet:
                raise ConfigError(f'{file} is of the fleet "{config.fleet}", not of "{fleet}"')
            if config.device in self._files:
                other = self._files[config.device]
                raise ConfigError(f'{other} and {file} are both of the device "{config.device}"')
            self._files[config.device] = file
            self.logs[config.device] = file.with_suffix(".log")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the agents; interrupt this process, as Ctrl-C does, if one of them exits.

        Raises:
            StorageError: a log cannot be written.
            TransportError: an agent exited; the message has the end of its log.
        """
        processes: list[ChildProcess] = []
        watchers: list[threading.Thread] = []
        try:
            for device, file in self._files.items():
                process = self._started(device, file)
                processes.append(process)
                watcher = threading.Thread(target=self._watch, args=(device, process), daemon=True)
                watcher.start()
                watchers.append(watcher)
            try:
                yield
            finally:
                # A board that cannot train is the reason why the run was interrupted.
                self._check()
        finally:
            self._ending.set()
            end_children(processes)
            for watcher in watchers:
                watcher.join()

    def _started(self, device: str, file: Path) -> ChildProcess:
        command = child_module("device_runtime", "--config", str(file.resolve()))
        path = self.logs[device]
        try:
            with path.open("wb") as log:
                return ChildProcess(command, output=log, errors=log)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error

    def _watch(self, device: str, process: ChildProcess) -> None:
        code = process.wait()
        if not self._ending.is_set():
            self._failed[device] = code
            os.kill(os.getpid(), signal.SIGINT)

    def _check(self) -> None:
        for device, code in self._failed.items():
            log = self.logs[device]
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            tail = "\n  ".join(lines[-_LOG_LINES:])
            raise TransportError(
                f"the board {device} exited with code {code}; the end of {log}:\n  {tail}"
            )
