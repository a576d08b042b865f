"""The devices of a simulation: their descriptions and their times."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from device_runtime.board import installed_backends, runtime_version
from fleet_protocol.messages import DeviceProfile, DeviceStatus, Profile
from models.layout import Layout
from simulation.board_times import BoardTimes
from simulation.clock import Clock
from simulation.device_tables import DevicesTable

_FLEET = "simulation"


@dataclass(frozen=True)
class VirtualBoard:
    """A virtual device.

    Attributes:
        id: its id.
        index: its place among all devices.
        examples: number of its samples.
        max_width: width of the largest tier that it can train.
        max_depth: depth of the largest tier that it can train; None for any.
        dropout: probability that it leaves during a round.
        free_bytes: its free memory; 0 for no limit.
    """

    id: str
    index: int
    examples: int
    max_width: float
    max_depth: int | None
    dropout: float = 0.0
    free_bytes: int = 0

    def leaving_share(self, seed: int, number: int) -> float | None:
        """Return the share of its time until it leaves a round, in [0, 1); None if it stays."""
        draw = random.Random(f"{seed}/drop-out/{self.id}/{number}")  # noqa: S311
        return draw.random() if draw.random() < self.dropout else None

    def status(self, *, online: bool = True) -> DeviceStatus:
        """Return its state message."""
        return DeviceStatus(fleet=_FLEET, device=self.id, online=online, state="idle")

    def profile(self) -> DeviceProfile:
        """Return its description."""
        profile = Profile(
            arch="virtual",
            system="simulation",
            cores=1,
            ram_bytes=self.free_bytes,
            free_ram_bytes=self.free_bytes,
            backends={"onnx": installed_backends().get("onnx", "simulated")},
            runtime_version=runtime_version(),
            python="",
            max_width=self.max_width,
            max_depth=self.max_depth,
            examples=self.examples,
        )
        return DeviceProfile(fleet=_FLEET, device=self.id, profile=profile)


@dataclass(frozen=True)
class VirtualFleet:
    """All devices in the order of their ids, and their clocks."""

    boards: tuple[VirtualBoard, ...]
    times: BoardTimes

    @classmethod
    def from_table(
        cls,
        table: DevicesTable,
        examples: Sequence[int],
        clock: Clock,
        layout: Layout,
        *,
        seed: int,
    ) -> "VirtualFleet":
        """Return the configured devices.

        Args:
            table: the types of devices.
            examples: number of samples of each device.
            clock: times of the types of boards.
            layout: layout of the global model.
            seed: seed of random draws.

        Raises:
            ConfigError: the clock has no such type or link.
        """
        boards: list[VirtualBoard] = []
        for name, kind, count in zip(table.ids, table.kinds, examples, strict=True):
            index = len(boards)
            boards.append(
                VirtualBoard(
                    name,
                    index,
                    count,
                    kind.max_width,
                    kind.max_depth,
                    kind.dropout,
                    kind.memory,
                )
            )
        return cls(tuple(boards), BoardTimes(clock, table.kinds, layout, seed))
