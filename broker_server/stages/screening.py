"""The record of how the screens treated one update, which the store keeps with the task."""

from fleet_protocol.frozen import FrozenModel


class Screening(FrozenModel):
    """How an update counts in its round.

    Attributes:
        norm: Euclidean norm of the difference between the update and the weights that were sent to
            the device.
        bound: largest norm that was allowed in the update's tier; None for no limit.
        scale: factor by which the difference was scaled, below 1 if it was clipped to the bound.
        samples: number of samples with which the update counted.
        declared: number of samples that the device reported.
        round: number of the round whose version contains the update, which need not be the round
            that requested it.
        weight: weight of the update, below 1 if it was trained from an earlier version.
    """

    norm: float
    bound: float | None = None
    scale: float = 1.0
    samples: int
    declared: int
    round: int | None = None
    weight: float = 1.0
