"""Schedules of the learning rate: a warm-up, then constant, cosine, linear or steps.

The position is counted in rounds: 2.5 is the middle of the third. A server knows it at the
beginning of a round, a board at every step, so one formula serves both.
"""

import math
from typing import Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel


class RateSchedule(FrozenModel):
    """``[train.rate]``: the multiplier of the learning rate.

    Attributes:
        kind: how the rate changes after the warm-up: ``constant``, ``cosine`` (Loshchilov, Hutter:
            "SGDR", ICLR 2017, without restarts), ``linear``, or ``step``.
        warmup: number of rounds, possibly fractional, over which the rate grows linearly to its
            full value.
        final: rate at the end of ``cosine`` and ``linear``, as a share of the full rate.
        every: for ``step``: number of rounds between two reductions of the rate.
        factor: for ``step``: factor by which each reduction multiplies the rate.
        per: how often the rate changes: every ``round``, or every training ``step`` of a device.
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
            position: number of finished rounds, including the finished part of this one.
            rounds: number of rounds of the whole run.
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
            # The margin includes a step that floating-point error places just before its round.
            return warm * self.factor ** math.floor(over / self.every + 1e-9)
        return warm
