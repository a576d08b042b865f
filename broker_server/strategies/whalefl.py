"""WHALE-FL: offers each device several widths, of which it picks one in every round.

Huai-an Su, Jiaxiang Geng, Liang Li, Xiaoqi Qin, Yanzhao Hou, Hao Wang, Xin Fu, Miao Pan: "WHALE-FL:
Wireless and Heterogeneity Aware Latency Efficient Federated Learning over Mobile Devices via
Adaptive Subnetwork Scheduling", 2024, https://arxiv.org/abs/2405.00885. Specification section 4,
whose equations 3 to 8 are reconstructed.

`device_runtime.training.choosers.adaptive` has the device's half, the utilities. A device is
offered every tier within its maximum, which is the cap of equation 7, and the server accepts an
update of any of them. Slices and the merge are HeteroFL's, including the label rule. The method
shortens a round, which takes as long as its slowest device.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from pydantic import Field, field_validator

from broker_server.strategies import heterofl
from broker_server.strategies.strategy import Basis, Method, Strategy
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import Chooser, Instructions
from fleet_protocol.sizing import Sizing, SizingConstants, SizingRules
from models.tier import Tier

_FLOAT_BYTES = 4
_MEDIAN_SHARE = 0.6  # as a share of Theta, the median device's utility at first: half the width
_UNREACHED = 1e300  # a utility that no device reaches, so that each takes its narrowest tier

Transmission = Literal["smallest", "full"]


class WhaleflSettings(SizingRules):
    """``[strategy.whalefl]`` (specification 4.2).

    Attributes:
        theta: utility at which a device chooses the full model. With ``auto``, every device trains
            its narrowest tier in the first round, and theta is then the median of the system
            efficiencies that the devices measured, divided by 0.6.
        transmission: model whose transfer time is T_cm: the ``smallest`` tier in use, as in the
            paper, or the ``full`` model, to which the released theta of 9 applies. None means
            ``smallest`` if theta is ``auto``, and ``full`` if theta is a number.
    """

    theta: Literal["auto"] | float = Field(default="auto")
    transmission: Transmission | None = None

    @field_validator("theta")
    @classmethod
    def _positive(cls, theta: str | float) -> str | float:
        if not isinstance(theta, str) and theta <= 0:
            raise ValueError("Input should be greater than 0")
        return theta

    @property
    def transmitted(self) -> Transmission:
        """The model whose transfer time is used."""
        if self.transmission is not None:
            return self.transmission
        return "smallest" if self.theta == "auto" else "full"

    def constants(self, theta: float) -> SizingConstants:
        """Return the constants for devices, with this Theta."""
        rules = self.model_dump(include=set(SizingRules.model_fields))
        return SizingConstants(**rules, theta=theta)


def theta_of(efficiencies: Sequence[float]) -> float:
    """Return the Theta at which the median device begins at half width (specification 4.6)."""
    return median(efficiencies) / _MEDIAN_SHARE


def choice_remedy(efficiencies: Sequence[float]) -> str:
    """Return what to set if all devices always choose alike."""
    fitting = ""
    if efficiencies:
        fitting = (
            f"; {theta_of(efficiencies):.4g} would fit the devices' measurements in these rounds"
        )
    return f'Set strategy.whalefl.theta = "auto" for the next run{fitting}.'


def build(basis: Basis[WhaleflSettings]) -> Strategy:
    """Build HeteroFL with the constants with which devices choose their widths.

    Raises:
        PlanError: plans other than leading units are configured.
    """
    if basis.plan != "static":
        raise PlanError(
            f"whalefl cuts leading units, as HeteroFL does; remove plan = {basis.plan!r}"
        )
    options = basis.options
    tier = basis.layout.tier(1.0) if options.transmitted == "full" else min(basis.tiers)
    transmitted_bytes = _FLOAT_BYTES * basis.layout.parameter_count(tier)

    def chooser(theta: float) -> Chooser:
        sizing = Sizing(constants=options.constants(theta), full_bytes=transmitted_bytes)
        return Chooser(rule="whalefl", settings=sizing.model_dump(mode="json", by_alias=True))

    def instruct(instructions: Instructions, _closed_rounds: int) -> Instructions:
        # Until theta is measured, every device takes its narrowest tier.
        theta = _UNREACHED if options.theta == "auto" else float(options.theta)
        return instructions.model_copy(update={"chooser": chooser(theta)})

    def adapt(instructions: Instructions, efficiencies: Sequence[float]) -> Instructions:
        # No device has reported yet.
        if not efficiencies:
            return instructions
        return instructions.model_copy(update={"chooser": chooser(theta_of(efficiencies))})

    selective = heterofl.build(basis)
    return replace(
        selective,
        name="whalefl",
        paper="https://arxiv.org/abs/2405.00885",
        offer=lambda largest: tiers_within(basis.tiers, largest),
        instruct=instruct,
        adapt=adapt if options.theta == "auto" else None,
        # A device's utilities follow from its losses.
        breaks=selective.breaks | {Trait.ASSIGNED_TIERS},
    )


def tiers_within(allowed: Sequence[Tier], maximum: Tier) -> tuple[Tier, ...]:
    """Return the allowed tiers of the maximum's depth that are no larger than it, widest first.

    A larger tier is wider, or trains a larger share of its blocks.

    A device that does not choose takes the first, which is HeteroFL's fixed assignment.

    Raises:
        PlanError: no such tier is in use.
    """
    within = []
    for tier in sorted(set(allowed), reverse=True):
        # Another depth is another model, whatever its width.
        is_larger = tier.width > maximum.width or tier.trained > maximum.trained
        if tier.depth == maximum.depth and not is_larger:
            within.append(tier)
    if not within:
        ids_in_use = ", ".join(tier.id for tier in sorted(set(allowed)))
        raise PlanError(
            f"no tier in use fits a device whose largest sub-model is {maximum.id}; the tiers in"
            f" use are {ids_in_use or 'none'}"
        )
    return tuple(within)


STRATEGIES = {"whalefl": Method(build, WhaleflSettings, choice_remedy=choice_remedy)}
