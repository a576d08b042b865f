"""The devices of a simulation: what each would tell about itself, and how long it would take."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from device_runtime.board import installed_backends, runtime_version
from fleet_protocol.messages import DeviceProfile, DeviceStatus, Profile
from models.layout import Layout
from simulation.board_times import BoardTimes
from simulation.clock import Clock
from simulation.tables import DevicesTable

_FLEET = "simulation"


@dataclass(frozen=True)
class VirtualBoard:
    """A virtual device.

    Attributes:
        id: its name.
        index: its place among all devices.
        examples: samples that it has.
        max_width: of the largest tier that it can train.
        max_depth: likewise; None for any.
        dropout: the chance that it leaves in the middle of a round.
    """

    id: str
    index: int
    examples: int
    max_width: float
    max_depth: int | None
    dropout: float = 0.0

    def leaves(self, seed: int, number: int) -> float | None:
        """Return after which share of its time it leaves a round, in [0, 1); None if it stays."""
        draw = random.Random(f"{seed}/drop-out/{self.id}/{number}")  # noqa: S311
        return draw.random() if draw.random() < self.dropout else None

    def status(self, *, online: bool = True) -> DeviceStatus:
        """Return what it would tell about what it does."""
        return DeviceStatus(fleet=_FLEET, device=self.id, online=online, state="idle")

    def profile(self) -> DeviceProfile:
        """Return what it would tell about itself."""
        profile = Profile(
            arch="virtual",
            system="simulation",
            cores=1,
            ram_bytes=0,
            free_ram_bytes=0,
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
        """Return the devices as configured.

        Args:
            table: the types of devices.
            examples: how many samples each device has.
            clock: how long types of boards take.
            layout: of the global model.
            seed: of what is drawn.

        Raises:
            ConfigError: the clock has no such type or link.
        """
        boards: list[VirtualBoard] = []
        for name, kind, count in zip(table.ids, table.kinds, examples, strict=True):
            index = len(boards)
            boards.append(
                VirtualBoard(name, index, count, kind.max_width, kind.max_depth, kind.dropout)
            )
        return cls(tuple(boards), BoardTimes(clock, table.kinds, layout, seed))
