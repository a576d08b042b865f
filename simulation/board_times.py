"""Assigns the clocks of `simulation.clock` to the devices of a simulation.

Times depend on the round, because load and link may change from round to round
(`simulation.dynamics`).
"""

from collections.abc import Sequence
from dataclasses import replace

from broker_server.settings.fleet import TrainConfig
from broker_server.store import TaskRecord
from fleet_protocol.messages import TrainSettings
from models.layout import Layout
from models.shares import counted_blocks
from models.tier import Tier
from simulation.clock import Clock, Load
from simulation.device_tables import DeviceGroup
from simulation.dynamics import Conditions

_FLOAT_BYTES = 4


def training_load(
    width: float,
    examples: int,
    train: TrainSettings | TrainConfig,
    size: int,
) -> Load:
    """Return the work of a device in a round.

    In full passes the last batch is smaller, so the number of samples is used, not of steps.

    Args:
        width: share of the global width.
        examples: samples that the device trains on.
        train: training settings of the round.
        size: size of the weights and of the update in bytes.
    """
    if train.steps:
        samples = min(train.batch_size, examples)
        steps = train.steps
    else:
        samples = examples
        steps = train.epochs
    return Load(width, samples, steps, upload_bytes=size, download_bytes=size)


class BoardTimes:
    """The times of every device.

    Args:
        clock: clock of the simulation.
        kinds: the kind of each device, in the order of their numbers.
        layout: layout of the whole model.
        seed: seed of the run.

    Raises:
        ConfigError: the clock has no such type or link.
    """

    def __init__(
        self,
        clock: Clock,
        kinds: Sequence[DeviceGroup],
        layout: Layout,
        seed: int,
    ) -> None:
        self._clock = clock
        whole = layout.tier(1.0)
        self._layout = layout
        self._depth = whole.depth
        self._full_bytes = _FLOAT_BYTES * layout.parameter_count(whole)
        # The update size of the whole model, computed as the clock does.
        # The clock counts the bits of the whole model in one of two ways.
        if clock.config.upload == "bytes":
            self._full_bits = 8 * self._full_bytes
        else:
            self._full_bits = clock.config.full_bits
        devices = [clock.device(kind.type, kind.link) for kind in kinds]
        self._conditions = Conditions(clock, devices, seed)

    def step_seconds(
        self,
        index: int,
        number: int,
        tier: Tier,
        train: TrainSettings,
    ) -> float:
        """Return the time of one training step of a device in a round.

        Raises:
            ConfigError: the clock's table does not reach this width.
        """
        load = Load(
            tier.width,
            train.batch_size,
            1,
            depth_share=self._depth_share(tier),
            trained_share=tier.trained,
            passed_share=self._passed_share(tier),
        )
        return self._clock.compute_seconds(self._conditions.clock_of(index, number), load)

    def bytes_per_second(self, index: int, number: int) -> float:
        """Return the speed of a device's link in a round, by the time of the whole model."""
        bits_per_second = self._conditions.clock_of(index, number).mbps * 1e6
        full_seconds = self._full_bits / bits_per_second
        return self._full_bytes / full_seconds

    def round_seconds(
        self,
        index: int,
        task: TaskRecord,
        train: TrainSettings | TrainConfig,
        examples: int = 0,
    ) -> float:
        """Return the time of a device's part in a round.

        Args:
            index: number of the device.
            task: its task.
            train: training settings of the round.
            examples: its number of samples, for a task that does not record how many it trained on.

        Raises:
            ConfigError: the clock's table does not reach this width.
        """
        # A device may train on fewer samples than it has, and reports the number.
        if task.metrics is not None and task.metrics.examples is not None:
            examples = task.metrics.examples
        tier = Tier.parse(task.tier)
        # The size of a task without an update is that of its weights, which an update equals
        # without an encoding.
        size = task.weights.size if task.update_size is None else task.update_size
        load = replace(
            training_load(tier.width, examples, train, size),
            depth_share=self._depth_share(tier),
            trained_share=tier.trained,
            passed_share=self._passed_share(tier),
            download_bytes=task.weights.size,
        )
        return self._clock.device_seconds(self._conditions.clock_of(index, task.round), load)

    def _passed_share(self, tier: Tier) -> float:
        """Return the share of a tier's blocks that are above those that it trains."""
        if not tier.place:
            return 0.0
        return tier.place / len(counted_blocks(self._layout, tier))

    def _depth_share(self, tier: Tier) -> float:
        """Return the share of the model's blocks that a tier has."""
        # A model without a depth has one depth for all tiers.
        return tier.depth / self._depth if self._depth else 1.0
