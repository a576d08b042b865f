"""Schedules of the learning rate: a warm-up, then constant, cosine, linear or steps.

The position is counted in rounds: 2.5 is the middle of the third. A server knows it at the
beginning of a round, a board at every step, so one formula serves both.
"""

import math
from typing import Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel


class RateSchedule(FrozenModel):
    """``[train.rate]``: what the learning rate is multiplied with.

    Attributes:
        kind: ``constant``, ``cosine`` (Loshchilov, Hutter: "SGDR", ICLR 2017, without restarts),
            ``linear``, or ``step``, all after the warm-up.
        warmup: rounds in which the rate grows evenly to its full size; may be a part of one.
        final: share of the rate that cosine and linear end with.
        every: rounds between the steps of ``step``.
        factor: of each such step.
        per: whether it changes with every ``round``, or with every ``step`` of a device.
    """

    kind: Literal["constant", "cosine", "linear", "step"] = "constant"
    warmup: float = Field(default=0.0, ge=0, le=1e6)
    final: float = Field(default=0.0, ge=0, le=1)
    every: float = Field(default=10.0, gt=0, le=1e6)
    factor: float = Field(default=0.1, gt=0, le=1)
    per: Literal["round", "step"] = "round"

    def multiplier(
        self,
        position: float,
        rounds: float,
        tick: float = 1.0,
    ) -> float:
        """Return the multiplier of one round or step.

        Args:
            position: rounds that are over, with the part of this one that is.
            rounds: of the whole run.
            tick: part of a round for which the multiplier holds.
        """
        warm = min(1.0, (position + tick) / self.warmup) if self.warmup else 1.0
        over = max(0.0, position - self.warmup)
        share = min(1.0, over / max(rounds - self.warmup, tick))
        if self.kind == "cosine":
            return warm * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * share)))
        if self.kind == "linear":
            return warm * (1 - (1 - self.final) * share)
        if self.kind == "step":
            # The margin counts a step that floats place just before its round.
            return warm * self.factor ** math.floor(over / self.every + 1e-9)
        return warm
