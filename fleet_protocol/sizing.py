"""The constants of adaptive sizing, which a server sets and devices use (specification 4.4)."""

from typing import Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel

Efficiency = Literal["sum_of_reciprocals", "reciprocal_of_sum"]
Combination = Literal["multiplicative", "additive"]
Arm = Literal["full", "system", "training"]


class SizingRules(FrozenModel):
    """The constants of the method, without the utility at which the full model is chosen.

    The defaults are the released ones for the CNN on MNIST (specification 4.4).

    Attributes:
        alpha: smallest ratio of the loss to the target loss at which training counts as far from
            its target.
        target_loss: target for the training loss.
        stall: delta, the largest change in the loss at which training counts as stalled.
        step: beta, the amount by which a stalled round changes the training efficiency.
        gamma: weight of the training efficiency relative to the system efficiency.
        efficiency: formula of the system efficiency.
        combination: formula of the utility.
        arm: ``full`` for the whole method, or an ablation: ``system`` holds the training efficiency
            (TE) at its neutral value, and ``training`` holds the system efficiency (SE) at
            ``fixed``.
        fixed: value of the system efficiency in the ``training`` arm.
    """

    alpha: float = Field(default=5.0, ge=1)
    target_loss: float = Field(default=0.0001, gt=0)
    stall: float = Field(default=0.5, ge=0)
    step: float = Field(default=0.2, gt=0)
    gamma: float = Field(default=2.5, gt=0)
    efficiency: Efficiency = "sum_of_reciprocals"
    combination: Combination = "multiplicative"
    arm: Arm = "full"
    fixed: float = Field(default=1.0, gt=0)

    @property
    def neutral(self) -> float:
        """The training efficiency at which the system efficiency does not change."""
        return 1.0 if self.combination == "multiplicative" else 0.0


class SizingConstants(SizingRules):
    """The constants of the method, as a device needs them.

    Attributes:
        theta: the utility at which the full model is chosen. 9 belongs to seconds, to the
            processing time of the smallest model and to the transmission time of the FULL one.
    """

    theta: float = Field(default=9.0, gt=0)


class Sizing(FrozenModel):
    """The settings of the chooser that selects the tier by its utility (specification 4.2).

    Attributes:
        constants: constants of the method.
        transmitted_bytes: size of the model whose transfer time is T_cm. Messages call it
            ``full_bytes``, because it was once always that of the whole model.
    """

    constants: SizingConstants
    transmitted_bytes: int = Field(ge=1, alias="full_bytes")
