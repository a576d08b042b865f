"""What hides one device's part in a run: ``[privacy]`` and ``[secure_sum]``."""

from typing import Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages.values import SUM_LIMIT


class PrivacyConfig(FrozenModel):
    """Differential privacy: how much one device's samples may show in what the run lets out.

    Attributes:
        where: ``central``: the server bounds every update, adds noise to their sum, and lets out
            nothing else; ``local``: every device bounds its update and adds the noise before it is
            sent.
        clip: the largest Euclidean norm of an update's difference to what was sent.
        noise_multiplier: standard deviation of the noise in every entry, as a multiple of ``clip``.
        delta: of the (epsilon, delta) that is told after every round; less than one over the number
            of devices.
    """

    where: Literal["central", "local"] = "central"
    clip: float = Field(gt=0, le=1e15)
    noise_multiplier: float = Field(gt=0, le=1e6)
    delta: float = Field(default=1e-5, gt=0, lt=0.5)

    @property
    def mechanism_multiplier(self) -> float:
        """Return the multiplier of the Gaussian mechanism that one part in a round is.

        Two bounded updates may be twice the bound apart, which is what local noise has to hide.
        """
        return self.noise_multiplier / (2 if self.where == "local" else 1)


class SecureSumConfig(FrozenModel):
    """Secure aggregation: the server learns the sum of a tier's updates, and none of them.

    Attributes:
        clip: the largest Euclidean norm of an update's difference to what was sent, counted in 2^24
            steps.
        least: updates that a sum must have; the devices see to it.
    """

    clip: float = Field(gt=0, le=1e15)
    least: int = Field(default=3, ge=2, le=SUM_LIMIT)
