"""WHALE-FL: each device picks its own width every round; the server offers the widths and honours the choice.

Huai-an Su, Jiaxiang Geng, Liang Li, Xiaoqi Qin, Yanzhao Hou, Hao Wang, Xin Fu, Miao Pan: "WHALE-FL: Wireless and
Heterogeneity Aware Latency Efficient Federated Learning over Mobile Devices via Adaptive Subnetwork Scheduling", 2024,
https://arxiv.org/abs/2405.00885. METHODS section 4, whose equations 3 to 8 are reconstructed.

The device's half, the utilities, is `device_runtime.adaptive`. It is offered every tier within its maximum, which is
the cap of equation 7, and the server takes an update of any of them. Slices and the merge are HeteroFL's, the label
rule included. What the method improves is the time of a round, which is that of its slowest device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from broker_server.config import StrategyConfig
from broker_server.strategies import heterofl
from broker_server.strategies.strategy import Strategy
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.messages import Sizing, TrainSettings
from models.layout import Layout
from models.tier import Tier

__all__ = ["build", "compute_seconds", "device_seconds", "offered", "round_seconds", "upload_seconds"]

_FLOAT_BYTES = 4


def build(config: StrategyConfig) -> Strategy:
    """The strategy as configured.

    Args:
        config: ``whalefl``, the constants that devices choose with; the rest as for HeteroFL.

    Raises:
        PlanError: plans other than leading units are configured.
    """
    if config.plan != "static":
        raise PlanError(f"whalefl cuts leading units, as HeteroFL does; remove plan = {config.plan!r}")

    def train(settings: TrainSettings, layout: Layout, _closed_rounds: int) -> TrainSettings:
        full_bytes = _FLOAT_BYTES * layout.parameter_count(layout.tier(1.0))
        return settings.model_copy(update={"sizing": Sizing(settings=config.whalefl, full_bytes=full_bytes)})

    return replace(
        heterofl.build(config),
        name="whalefl",
        paper="https://arxiv.org/abs/2405.00885",
        offer=lambda _layout, tiers, largest: offered(tiers, largest),
        train=train,
    )


def offered(allowed: Sequence[Tier], maximum: Tier) -> tuple[Tier, ...]:
    """The tiers a device may choose from, widest first.

    A device that does not size itself takes the first, which is HeteroFL's fixed assignment.

    Args:
        allowed: tiers in use.
        maximum: the largest the device can train.

    Returns:
        The allowed tiers of the maximum's depth that are no wider than it.

    Raises:
        PlanError: there is none.
    """
    fitting = sorted(
        (tier for tier in set(allowed) if tier.depth == maximum.depth and tier.width <= maximum.width), reverse=True
    )
    if not fitting:
        raise PlanError(
            f"no tier in use fits a device whose largest is {maximum.id}; there are"
            f" {', '.join(tier.id for tier in sorted(set(allowed))) or 'none'}"
        )
    return tuple(fitting)


def compute_seconds(sample_seconds: float, batch_size: int, steps: int) -> float:
    """Time of a round's local iterations.

    Args:
        sample_seconds: time of one step for one sample, at the width in use.
        batch_size: samples of a step.
        steps: local iterations, K of METHODS 4.
    """
    return sample_seconds * batch_size * steps


def upload_seconds(full_seconds: float, width: float) -> float:
    """Time to send a sub-model, whose size goes with the square of its width.

    Args:
        full_seconds: time to send the whole model over the same link.
        width: share of the global width.
    """
    return full_seconds * width**2


def device_seconds(
    sample_seconds: Mapping[float, float], full_upload_seconds: float, width: float, *, batch_size: int, steps: int
) -> float:
    """Time of one device's round: computing, then sending.

    Args:
        sample_seconds: time of one step for one sample, at each width.
        full_upload_seconds: time to send the whole model.
        width: the width in use.
        batch_size: samples of a step.
        steps: local iterations.

    Raises:
        ConfigError: no time is known for this width.
    """
    if width not in sample_seconds:
        raise ConfigError(f"no step time is known for width {width}; there are {', '.join(map(str, sample_seconds))}")
    return compute_seconds(sample_seconds[width], batch_size, steps) + upload_seconds(full_upload_seconds, width)


def round_seconds(device_times: Iterable[float]) -> float:
    """Time of a round: that of the slowest device.

    Args:
        device_times: time of each device that took part, seconds; at least one.
    """
    return max(device_times)
