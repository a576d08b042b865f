"""How one device's part in a run is hidden: ``[privacy]`` and ``[secure_sum]``."""

from typing import Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages.values import SUM_LIMIT


class PrivacyConfig(FrozenModel):
    """Differential privacy: limits how much the run's output reveals about one device's samples.

    Attributes:
        where: where the noise is added. ``central``: the server bounds every update, adds noise to
            the sum of the updates, and publishes no result without noise. ``local``: every device
            bounds its update and adds noise to it before it sends the update.
        clip: maximum Euclidean norm of the difference between an update and the weights that were
            sent.
        noise_multiplier: standard deviation of the noise in every entry, as a multiple of ``clip``.
        delta: delta in the (epsilon, delta) guarantee that is reported after every round; delta
            should be less than 1 divided by the number of devices.
    """

    where: Literal["central", "local"] = "central"
    clip: float = Field(gt=0, le=1e15)
    noise_multiplier: float = Field(gt=0, le=1e6)
    delta: float = Field(default=1e-5, gt=0, lt=0.5)

    @property
    def mechanism_multiplier(self) -> float:
        """Return the multiplier of the Gaussian mechanism for one participation in a round.

        Two bounded updates may be twice the bound apart, and local noise must hide that.
        """
        return self.noise_multiplier / (2 if self.where == "local" else 1)


class SecureSumConfig(FrozenModel):
    """Secure aggregation: the server learns the sum of a tier's updates, but no single update.

    Attributes:
        clip: maximum Euclidean norm of the difference between an update and the weights that were
            sent; each entry is rounded to a multiple of about ``clip`` / 2^24.
        least: minimum number of updates in a sum; the devices enforce it.
    """

    clip: float = Field(gt=0, le=1e15)
    least: int = Field(default=3, ge=2, le=SUM_LIMIT)
