"""How long each virtual device would take, by the clocks of `simulation.clock`.

Every time is that of a certain round, because load and link may change from round to round
(`simulation.dynamics`).
"""

from collections.abc import Sequence
from dataclasses import replace

from broker_server.settings.fleet import TrainConfig
from broker_server.store import TaskRecord
from fleet_protocol.messages import TrainSettings
from models.layout import Layout
from models.tier import Tier
from simulation.clock import Clock, Load
from simulation.dynamics import Conditions
from simulation.tables import DeviceGroup

_FLOAT_BYTES = 4


def training_load(
    width: float, examples: int, train: TrainSettings | TrainConfig, size: int
) -> Load:
    """What a device does in a round.

    In whole passes the last batch is short, so samples count and not steps.
    """
    batch = min(train.batch_size, examples)
    samples, times = (batch, train.steps) if train.steps else (examples, train.epochs)
    return Load(width, samples, times, upload_bytes=size, download_bytes=size)


class BoardTimes:
    """The times of every device, whose kinds stand in the order of their numbers.

    Raises:
        ConfigError: the clock has no such type or link.
    """

    def __init__(
        self, clock: Clock, kinds: Sequence[DeviceGroup], layout: Layout, seed: int
    ) -> None:
        self._clock = clock
        whole = layout.tier(1.0)
        self._depth = whole.depth
        self._full_bytes = _FLOAT_BYTES * layout.parameter_count(whole)
        # What a device would send of the whole model, counted as the clock counts its updates.
        self._full_bits = (
            32 * layout.parameter_count(whole)
            if clock.config.upload == "bytes"
            else clock.config.full_bits
        )
        self._conditions = Conditions(
            clock, [clock.device(kind.type, kind.link) for kind in kinds], seed
        )

    def step_seconds(self, index: int, number: int, tier: Tier, train: TrainSettings) -> float:
        """Time of one training step.

        A ConfigError where the clock's table does not reach this width.
        """
        return self._clock.compute_seconds(
            self._conditions.of(index, number),
            Load(tier.width, train.batch_size, 1, depth_share=self._share(tier)),
        )

    def bytes_per_second(self, index: int, number: int) -> float:
        """Speed of a device's link, as the time of the whole model tells."""
        return self._full_bytes / (
            self._full_bits / (self._conditions.of(index, number).mbps * 1e6)
        )

    def round_seconds(
        self,
        index: int,
        task: TaskRecord,
        train: TrainSettings | TrainConfig,
        examples: int = 0,
    ) -> float:
        """Time of a device's part in a round.

        Its samples count where the task does not say how many it has trained on.

        Raises:
            ConfigError: the clock's table does not reach this width.
        """
        tier = Tier.parse(task.tier)
        examples = task.metrics.examples if task.metrics is not None else examples
        size = task.update_size if task.update_size is not None else task.weights.size
        load = training_load(tier.width, examples, train, size)
        whole = replace(load, depth_share=self._share(tier), download_bytes=task.weights.size)
        return self._clock.device_seconds(self._conditions.of(index, task.round), whole)

    def _share(self, tier: Tier) -> float:
        return tier.depth / self._depth if self._depth else 1.0
