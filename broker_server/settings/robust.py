"""How a run treats updates that are unlike the others: ``[robust]``."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from fleet_protocol.frozen import STORED, FrozenModel

_MOST_BOUND = 1e100  # as a multiple of a norm, which is at most 1e30
_AUTO_FACTOR = 5.0
_AUTO_DEVICES = 5  # with fewer updates, the largest honest one is often five times the median


class RobustConfig(FrozenModel):
    """Limits how much one device may move the global model.

    Attributes:
        norm_bound: maximum norm of the difference between an update and the weights that were sent
            to its device, as a multiple of the median norm in the tier; 0 for no limit. ``auto`` is
            5 for a tier in which at least five devices have sent updates, and 0 for any other tier.
            The bound is off if the server cannot see individual updates, or if noise is added to
            their sum, because another bound then applies to each update. It is also off if every
            update must count equally, as the strategy or ``strategy.weighting = "uniform"`` may
            require.
        beyond_norm: what the server does with an update beyond the norm bound: refuse it, or scale
            it down to the bound (``clip``).
        weight_bound: maximum weight of a device, as a multiple of the median number of samples. The
            weight is never more than the number of samples that the device announced; with 0, only
            this second limit applies.
        beyond_weight: what the server does with an update that reports more samples than the
            maximum weight: count it with the maximum weight (``clip``), or refuse it.
        merge: how the remaining updates are merged: by the strategy's own ``mean``, by the
            ``median`` or the ``trimmed_mean`` of each entry, or by the mean of the updates that
            ``krum`` chooses in every tier.
        faulty: share of the devices that may be faulty. The trimmed mean trims this share, rounded
            up, at each end; Krum excludes this share.
        quarantine_after: number of consecutive refused updates after which a device is quarantined
            and not selected; 0 for no quarantine.
        quarantine_rounds: length of the quarantine, in rounds.
    """

    norm_bound: Literal["auto"] | Annotated[float, Field(ge=0)] = "auto"
    beyond_norm: Literal["refuse", "clip"] = "refuse"
    weight_bound: float = Field(default=10.0, ge=0)
    beyond_weight: Literal["clip", "refuse"] = "clip"
    merge: Literal["mean", "median", "trimmed_mean", "krum"] = "mean"
    faulty: Annotated[float, Field(gt=0, lt=0.5)] = 0.2
    quarantine_after: int = Field(default=3, ge=0)
    quarantine_rounds: int = Field(default=10, ge=1)

    @property
    def norm_factor(self) -> float:
        """The bound on an update as a multiple of the median of its tier; 0 for no bound."""
        return _AUTO_FACTOR if self.norm_bound == "auto" else self.norm_bound

    @property
    def bounded_devices(self) -> int:
        """How many devices of a tier must have sent updates for its bound to apply."""
        return _AUTO_DEVICES if self.norm_bound == "auto" else 1

    @model_validator(mode="after")
    def _has_effect(self, info: ValidationInfo) -> "RobustConfig":
        if max(self.norm_factor, self.weight_bound) > _MOST_BOUND and info.context != STORED:
            raise ValueError(
                f"norm_bound and weight_bound must be at most {_MOST_BOUND:g}; 0 means no bound"
            )
        trims = self.merge in {"trimmed_mean", "krum"}
        where = f'on merge = "{self.merge}"'
        instead = 'merge = "trimmed_mean" or "krum"'
        self.refuse_idle(info, "faulty", trims, where=where, instead=instead)
        bounds = self.norm_factor > 0
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
