"""What an agent has measured of its board, its link and its training, and the profile that it tells the fleet."""

from dataclasses import dataclass, replace
from pathlib import Path

from device_runtime.agent.memory import Memory
from device_runtime.agent.releases import Releases
from device_runtime.board import Board, on_battery, runtime_version, temperature
from device_runtime.settings import DeviceConfig
from fleet_protocol.messages import Profile


@dataclass
class Measured:
    """Measurements; each is None until it is known."""

    board: Board | None = None  # from probing on
    step_seconds: float | None = None  # mean time of a training step in the last task
    link_bytes_per_second: float | None = None  # of the last download
    # what computed the training steps of the last task, and why that; empty where there is no choice
    provider: str = ""
    unable: str = ""  # why the board cannot train; empty where it can
    paused: str = ""  # why it shall not train now; empty where it may

    def look(self, sysfs: Path) -> None:
        """Read again what changes while a board runs; `sysfs` as of `probe`."""
        if self.board is not None:
            self.board = replace(self.board, temperature_celsius=temperature(sysfs), on_battery=on_battery(sysfs))

    def profile(self, config: DeviceConfig, examples: int, memory: Memory, releases: Releases) -> Profile | None:
        """What the device with so many training samples says about itself; None before the board is measured."""
        board, large = self.board, memory.too_large
        if board is None:
            return None
        return Profile(
            **vars(board),
            runtime_version=runtime_version(),
            max_width=config.max_width,
            max_depth=config.max_depth,
            examples=examples,
            step_seconds=self.step_seconds,
            link_bytes_per_second=self.link_bytes_per_second,
            provider=self.provider,
            unable=self.unable or self.paused or ("it fetches a release" if releases.wanted else ""),
            memory_below=large.peak if large else None,
            lowered=large.said if large else None,
            release=releases.record,
            sets=releases.sets,
        )
