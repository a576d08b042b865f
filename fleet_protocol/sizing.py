"""The constants of adaptive sizing, which a server sets and devices use (specification 4.4)."""

from typing import Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel

Efficiency = Literal["sum_of_reciprocals", "reciprocal_of_sum"]
Combination = Literal["multiplicative", "additive"]
Arm = Literal["full", "system", "training"]


class SizingConstants(FrozenModel):
    """The constants of the method.

    The defaults are the released ones for the CNN on MNIST (specification 4.4).

    Attributes:
        alpha: training counts as far from its target while the loss is at least this many times the
            target.
        target_loss: the target.
        stall: delta, the largest change of the loss that counts as stalled.
        step: beta, what a stalled round adds to or takes from the training efficiency.
        gamma: how much training efficiency counts against system efficiency.
        theta: the utility from which on the full model is chosen. 9 belongs to seconds, to the
            processing time of the smallest model and to the transmission time of the FULL one.
        efficiency: form of the system efficiency.
        combination: form of the utility.
        arm: ``full``, or an ablation: ``system`` holds TE at its neutral value, ``training`` holds
            SE at `fixed`.
        fixed: the system efficiency of the ``training`` arm.
    """

    alpha: float = Field(default=5.0, ge=1)
    target_loss: float = Field(default=0.0001, gt=0)
    stall: float = Field(default=0.5, ge=0)
    step: float = Field(default=0.2, gt=0)
    gamma: float = Field(default=2.5, gt=0)
    theta: float = Field(default=9.0, gt=0)
    efficiency: Efficiency = "sum_of_reciprocals"
    combination: Combination = "multiplicative"
    arm: Arm = "full"
    fixed: float = Field(default=1.0, gt=0)

    @property
    def neutral(self) -> float:
        """The training efficiency that leaves the system efficiency as it is."""
        return 1.0 if self.combination == "multiplicative" else 0.0


class Sizing(FrozenModel):
    """The settings of the chooser that takes the tier by its utility (specification 4.2)."""

    constants: SizingConstants  # of the method
    full_bytes: int = Field(ge=1)  # size of the whole model, whose time on the link T_cm is
