"""What a run does about updates that are unlike the others: ``[robust]``."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from fleet_protocol.frozen import STORED, FrozenModel

_MOST_BOUND = 1e100  # times a norm, which is 1e30 at most


class RobustConfig(FrozenModel):
    """How much one device may move the global model.

    Attributes:
        norm_bound: an update may differ from the weights its device was sent by so many times the
            median of its tier; 0 for any difference. The default is 0 where updates are not seen
            by themselves, or noise is added to their sum: there another bound holds for each.
        beyond_norm: what happens to one that differs more: it is refused, or scaled down to the
            bound.
        weight_bound: a device counts with at most so many times the median number of samples, and
            never with more than it has announced; 0 for as many as it has announced.
        beyond_weight: what happens to an update that says more: it counts with as many, or is
            refused.
        merge: how the updates that are left become one: the strategy's own ``mean``, entry by entry
            the ``median`` or the ``trimmed_mean``, or the mean of those that ``krum`` chooses in
            every tier.
        faulty: share of the devices that may be bad: so many are trimmed at either end, or left out
            by Krum, rounded up.
        quarantine_after: so many refused updates of a device, with none between that was taken, and
            it is not asked any more; 0 for never.
        quarantine_rounds: for so many rounds.
    """

    norm_bound: float = Field(default=5.0, ge=0)
    beyond_norm: Literal["refuse", "clip"] = "refuse"
    weight_bound: float = Field(default=10.0, ge=0)
    beyond_weight: Literal["clip", "refuse"] = "clip"
    merge: Literal["mean", "median", "trimmed_mean", "krum"] = "mean"
    faulty: Annotated[float, Field(gt=0, lt=0.5)] = 0.2
    quarantine_after: int = Field(default=3, ge=0)
    quarantine_rounds: int = Field(default=10, ge=1)

    @model_validator(mode="after")
    def _has_effect(self, info: ValidationInfo) -> "RobustConfig":
        if max(self.norm_bound, self.weight_bound) > _MOST_BOUND and info.context != STORED:
            raise ValueError(
                f"norm_bound and weight_bound are {_MOST_BOUND:g} at most; 0 is for none"
            )
        trims = self.merge in {"trimmed_mean", "krum"}
        where = f'on merge = "{self.merge}"'
        instead = 'merge = "trimmed_mean" or "krum"'
        self.refuse_idle(info, "faulty", trims, where=where, instead=instead)
        bounds = self.norm_bound > 0
        isolates = self.quarantine_after > 0
        self.refuse_idle(
            info, "beyond_norm", bounds, where="on norm_bound = 0", instead="norm_bound"
        )
        self.refuse_idle(
            info,
            "quarantine_rounds",
            isolates,
            where="on quarantine_after = 0",
            instead="quarantine_after",
        )
        return self
