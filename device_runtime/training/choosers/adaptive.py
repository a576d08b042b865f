"""Adaptive sizing: chooses the width of a sub-model from times and losses of the device itself.

The formulas of https://arxiv.org/abs/2405.00885, specification section 4; its equations 3 to 8 are
reconstructed.

At the start of a round, `choose` weighs the system efficiency SE (how fast link and processor are
now) against the training efficiency TE (whether the loss has stalled):

    SE = 1 / T_cm + 1 / T_cp                or  1 / (T_cm + T_cp)
    U  = SE * sign(TE) * |TE|^gamma         or  SE + sign(TE) * |TE|^gamma
    Un = U / Theta, kept in [0, 1]          width by the cuts 0.8, 0.6, 0.4, 0.2;
                                            never more than the device's maximum

After the round, `observe` uses its mean loss L: if L changed by at most delta since the previous
round, TE rises by beta while L >= alpha * target (training has stalled early: a larger model helps)
and falls by beta after.

The state between rounds is a frozen value with a JSON form, so that it survives a restart.
"""

import math
from collections.abc import Sequence

from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.sizing import Combination, Efficiency, SizingConstants

CUTS = ((0.8, 1.0), (0.6, 0.5), (0.4, 0.25), (0.2, 0.125))
"""Least normalised utility of each width; the lower bound is inclusive."""

_NARROWEST = 0.0625


class Progress(FrozenModel):
    """The state that the device carries from round to round.

    Attributes:
        rounds: number of rounds whose loss was observed.
        training_efficiency: TE of the next round.
        last_loss: mean loss of the last round; None before the first.
    """

    rounds: int = 0
    training_efficiency: float
    last_loss: float | None = None


class Choice(FrozenModel):
    """The device's decision for one round, and how it came about.

    Attributes:
        system_efficiency: SE.
        training_efficiency: TE.
        utility: U.
        normalised: Un, in [0, 1].
        wanted: width before the cap.
        width: after the cap.
    """

    system_efficiency: float
    training_efficiency: float
    utility: float
    normalised: float
    wanted: float
    width: float


def choose(
    state: Progress,
    settings: SizingConstants,
    *,
    transmit_seconds: float,
    compute_seconds: float,
    maximum: float,
) -> Choice:
    """Choose the width of a round.

    Args:
        state: after the earlier rounds.
        settings: constants of the method.
        transmit_seconds: T_cm, as measured now.
        compute_seconds: T_cp, as measured now.
        maximum: greatest width that the device may train.

    Raises:
        ConfigError: a time is not positive.
    """
    speed = system_efficiency(transmit_seconds, compute_seconds, settings.efficiency)
    if settings.arm == "training":
        speed = settings.fixed
    progress = settings.neutral if settings.arm == "system" else state.training_efficiency
    value = utility(speed, progress, settings.gamma, settings.combination)
    share = normalise(value, settings.theta)
    wanted = quantise(share)
    return Choice(
        system_efficiency=speed,
        training_efficiency=progress,
        utility=value,
        normalised=share,
        wanted=wanted,
        width=min(wanted, maximum),
    )


def observe(state: Progress, settings: SizingConstants, loss: float) -> Progress:
    """Return the state for the next round, from the mean loss over all steps of this one.

    The training efficiency changes from the second observed loss on; a loss that is not finite does
    not change it.
    """
    if not math.isfinite(loss):
        return state
    progress = state.training_efficiency
    if state.last_loss is not None and abs(loss - state.last_loss) <= settings.stall:
        far = loss >= settings.alpha * settings.target_loss
        progress += settings.step if far else -settings.step
    return Progress(
        rounds=state.rounds + 1,
        training_efficiency=progress,
        last_loss=loss,
    )


def system_efficiency(transmit_seconds: float, compute_seconds: float, form: Efficiency) -> float:
    """Return SE of T_cm and T_cp, equation 3; raise ConfigError if a time is not positive."""
    if not (transmit_seconds > 0 and compute_seconds > 0):
        raise ConfigError(
            f"adaptive sizing needs positive times, not {transmit_seconds} s to send "
            f"and {compute_seconds} s to compute"
        )
    if form == "sum_of_reciprocals":
        return 1 / transmit_seconds + 1 / compute_seconds
    return 1 / (transmit_seconds + compute_seconds)


def utility(
    system: float,
    training: float,
    gamma: float,
    combination: Combination,
) -> float:
    """Return U, equation 5; the power keeps the sign of the training efficiency."""
    progress = math.copysign(abs(training) ** gamma, training)
    return system * progress if combination == "multiplicative" else system + progress


def normalise(value: float, theta: float) -> float:
    """Return Un, equation 6: the utility as a share of theta, kept in [0, 1]."""
    if value <= 0:
        return 0.0
    return value / theta if value < theta else 1.0


def quantise(share: float) -> float:
    """Return the width for a normalised utility, equation 8."""
    return next((width for cut, width in CUTS if share >= cut), _NARROWEST)


def level(share: float, count: int) -> int:
    """Return the level of a normalised utility among equally many steps, from 0 for the smallest.

    With five levels the bounds are `CUTS`, those of equation 8.
    """
    return sum(share >= place / count for place in range(1, count))


def fit(width: float, offered: Sequence[float]) -> float:
    """Return the offered width nearest to the wanted one, preferably not above it."""
    narrower = [candidate for candidate in offered if candidate <= width]
    return max(narrower) if narrower else min(offered)
