"""Reads the files of a board's samples again between tasks, when they have changed."""

from dataclasses import replace

from device_runtime.agent.journal import Journal
from device_runtime.training.task import DeviceSetup
from fleet_protocol.data import DataConfig, PythonData, load_data
from fleet_protocol.data.stamps import Stamps
from fleet_protocol.errors import ShoalError


class SampleFiles:
    """The files from which a board's samples are read."""

    def __init__(self, config: DataConfig, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        # State of the files when reading them again failed; None if it succeeded.
        self._unreadable: Stamps | None = None

    def refresh(self, setup: DeviceSetup) -> DeviceSetup:
        """Read files that have changed since the last attempt.

        The user's own function is always called, because it is unknown what it reads.

        Returns:
            A setup with the new samples; the given one if nothing has changed, or if the files
            cannot be read.
        """
        stamps = self._unreadable or setup.data.stamps
        if stamps is None:
            return setup
        current = stamps.current()
        if not stamps.changes(current) and not isinstance(self._config, PythonData):
            return setup
        try:
            data = load_data(self._config)
        except (ShoalError, OSError) as error:  # a file may be half written
            self._unreadable = current
            self._journal.warning(f"still using the samples read before: {error}")
            return setup
        self._unreadable = None
        return replace(setup, data=data)
