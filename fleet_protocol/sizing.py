"""The constants of adaptive sizing, which the server configures and the device computes with: specification 4.4."""

from typing import Literal

from pydantic import Field

from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel

Efficiency = Literal["sum_of_reciprocals", "reciprocal_of_sum"]
Combination = Literal["multiplicative", "additive"]
Arm = Literal["full", "system", "training"]


class SizingConstants(FrozenModel):
    """The constants of the method; the defaults are the released ones for the CNN on MNIST (specification 4.4).

    Attributes:
        alpha: training counts as far from its target while the loss is at least this many times the target, >= 1.
        target_loss: the target, > 0.
        stall: delta, the largest change of the loss that counts as stalled, >= 0.
        step: beta, what a stalled round adds to or takes from the training efficiency, > 0.
        gamma: how much training efficiency counts against system efficiency, > 0.
        theta: the utility from which on the full model is chosen, > 0. 9 belongs to seconds, to the processing time of
            the smallest model and to the transmission time of the FULL one.
        efficiency: form of the system efficiency.
        combination: form of the utility.
        arm: ``full``, or an ablation: ``system`` holds TE at its neutral value, ``training`` holds SE at `fixed`.
        fixed: the system efficiency of the ``training`` arm, > 0.
    """

    alpha: float = 5.0
    target_loss: float = 0.0001
    stall: float = 0.5
    step: float = 0.2
    gamma: float = 2.5
    theta: float = 9.0
    efficiency: Efficiency = "sum_of_reciprocals"
    combination: Combination = "multiplicative"
    arm: Arm = "full"
    fixed: float = 1.0

    def model_post_init(self, _context: object) -> None:
        """Refuse constants out of range.

        Raises:
            ConfigError: a constant is out of range.
        """
        for name in ("target_loss", "step", "gamma", "theta", "fixed"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"adaptive sizing: {name} must be positive, not {getattr(self, name)}")
        if self.alpha < 1 or self.stall < 0:
            raise ConfigError(f"adaptive sizing: alpha must be at least 1 ({self.alpha}) and stall not negative")

    @property
    def neutral(self) -> float:
        """The training efficiency that leaves the system efficiency as it is."""
        return 1.0 if self.combination == "multiplicative" else 0.0


class Sizing(FrozenModel):
    """What a device needs to choose its tier by its utility: the settings of that chooser (specification 4.2).

    Attributes:
        constants: of the method.
        full_bytes: size of the whole model, whose time on the link T_cm is.
    """

    constants: SizingConstants
    full_bytes: int = Field(ge=1)
