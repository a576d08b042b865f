"""How long each virtual device would take: the clocks of `simulation.clock` dealt to the devices of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleet_protocol.messages import TrainSettings
from models.layout import Layout
from models.tier import Tier
from simulation.clock import Clock, DeviceClock
from simulation.config import DeviceGroup

__all__ = ["BoardTimes"]


class BoardTimes:
    """The times of every device.

    Args:
        clock: types and links.
        kinds: kind of every device, in the order of their numbers.
        layout: the global model.

    Raises:
        ConfigError: the clock has no such type or link.
    """

    def __init__(self, clock: Clock, kinds: Sequence[DeviceGroup], layout: Layout) -> None:
        self._clock = clock
        whole = layout.tier(1.0)
        self._depth = whole.depth
        # What a device would send of the whole model, counted as the clock counts its updates.
        self._full_bits = (
            32 * layout.parameter_count(whole) if clock.config.upload == "bytes" else clock.config.full_bits
        )
        known: dict[tuple[str, str | float], DeviceClock] = {}
        for kind in kinds:
            if (kind.type, kind.link) not in known:
                known[kind.type, kind.link] = clock.device(kind.type, kind.link)
        self._devices = [known[kind.type, kind.link] for kind in kinds]

    def steps(self, examples: int, train: TrainSettings) -> int:
        """Steps of a round.

        Args:
            examples: training samples of the device.
            train: settings of the training.
        """
        return train.steps or train.epochs * math.ceil(examples / train.batch_size)

    def step_seconds(self, index: int, tier: Tier, train: TrainSettings) -> float:
        """Time of one training step.

        Args:
            index: number of the device.
            tier: what it trains.
            train: settings of the training.

        Raises:
            ConfigError: the clock's table does not reach this width.
        """
        return self._clock.compute_seconds(
            self._devices[index],
            tier.width,
            samples_per_step=train.batch_size,
            steps=1,
            depth_share=self._share(tier),
        )

    def full_upload_seconds(self, index: int) -> float:
        """Time of the whole model on a device's link.

        Args:
            index: number of the device.
        """
        return self._full_bits / (self._devices[index].mbps * 1e6)

    def round_seconds(
        self, index: int, tier: Tier, train: TrainSettings, *, examples: int, upload_bytes: int, download_bytes: int
    ) -> float:
        """Time of a device's part in a round.

        Args:
            index: number of the device.
            tier: what it trains.
            train: settings of the training.
            examples: training samples it has.
            upload_bytes: size of its update.
            download_bytes: size of the weights it was sent.

        Raises:
            ConfigError: the clock's table does not reach this width.
        """
        # In whole passes the last batch is short, so samples are counted and not steps.
        samples, times = (train.batch_size, train.steps) if train.steps else (examples, train.epochs)
        return self._clock.device_seconds(
            self._devices[index],
            tier.width,
            samples_per_step=samples,
            steps=times,
            depth_share=self._share(tier),
            upload_bytes=upload_bytes,
            download_bytes=download_bytes,
        )

    def _share(self, tier: Tier) -> float:
        return tier.depth / self._depth if self._depth else 1.0
