"""What an agent has measured of its board, its link and its training, and the profile that it tells the fleet."""

from dataclasses import dataclass, replace
from pathlib import Path

from device_runtime.board import Board, on_battery, runtime_version, temperature
from device_runtime.settings import DeviceConfig
from fleet_protocol.messages import Profile


@dataclass
class Measured:
    """Measurements; each is None until it is known.

    Attributes:
        board: from probing on.
        step_seconds: mean time of a training step in the last task.
        link_bytes_per_second: of the last download.
        unable: why the board cannot train; empty where it can.
        paused: why it shall not train now; empty where it may.
    """

    board: Board | None = None
    step_seconds: float | None = None
    link_bytes_per_second: float | None = None
    unable: str = ""
    paused: str = ""

    def look(self, sysfs: Path) -> None:
        """Read again what changes while a board runs; `sysfs` as of `probe`."""
        if self.board is not None:
            self.board = replace(self.board, temperature_celsius=temperature(sysfs), on_battery=on_battery(sysfs))

    def profile(self, config: DeviceConfig, examples: int) -> Profile | None:
        """What the device with so many training samples says about itself; None before the board is measured."""
        board = self.board
        if board is None:
            return None
        return Profile(
            arch=board.arch,
            system=board.system,
            cores=board.cores,
            ram_bytes=board.ram_bytes,
            free_ram_bytes=board.free_ram_bytes,
            backends=dict(board.backends),
            runtime_version=runtime_version(),
            python=board.python,
            max_width=config.max_width,
            max_depth=config.max_depth,
            examples=examples,
            step_seconds=self.step_seconds,
            link_bytes_per_second=self.link_bytes_per_second,
            temperature_celsius=board.temperature_celsius,
            on_battery=board.on_battery,
            unable=self.unable or self.paused,
        )
