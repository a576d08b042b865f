"""Adaptive sizing: how wide a sub-model to train, from times and losses of the device itself.

The formulas of https://arxiv.org/abs/2405.00885, specification section 4; its equations 3 to 8 are
reconstructed.

At the start of a round, `choose` weighs the system efficiency SE (how fast link and processor are
now) with the training efficiency TE (whether the loss has stalled):

    SE = 1 / T_cm + 1 / T_cp                or  1 / (T_cm + T_cp)
    U  = SE * sign(TE) * |TE|^gamma         or  SE + sign(TE) * |TE|^gamma
    Un = U / Theta, kept in [0, 1]          width by the cuts 0.8, 0.6, 0.4, 0.2;
                                            never more than the device's maximum

After the round, `observe` takes its mean loss L into account: if it changed by at most delta since
the round before, TE rises by beta while L >= alpha * target (training has stalled early: a larger
model helps) and falls by beta after.

The progress between rounds is a frozen value with a JSON form, so that it survives a restart.
"""

import math
from collections.abc import Sequence

from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.sizing import Combination, Efficiency, SizingConstants

CUTS = ((0.8, 1.0), (0.6, 0.5), (0.4, 0.25), (0.2, 0.125))
"""Least normalised utility of each width; the lower edge belongs to the width."""

_NARROWEST = 0.0625


class Progress(FrozenModel):
    """What the device carries from round to round.

    Attributes:
        rounds: number of rounds whose loss was observed.
        training_efficiency: TE of the next round.
        last_loss: mean loss of the last round; None before the first.
    """

    rounds: int = 0
    training_efficiency: float
    last_loss: float | None = None


class Choice(FrozenModel):
    """What the device decided for one round, and why.

    Attributes:
        system_efficiency: SE.
        training_efficiency: TE.
        utility: U.
        normalised: Un, in [0, 1].
        wanted: width before the cap.
        width: after it.
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
        state: what earlier rounds have shown.
        settings: constants of the method.
        transmit_seconds: T_cm, as measured now.
        compute_seconds: T_cp, as measured now.
        maximum: widest that the device may train.

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
    """Return the record for the next round, from the mean loss of all steps of a finished one.

    The training efficiency changes from the second observed loss on; one that is not finite leaves
    it as it was.
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
    """Return SE of T_cm and T_cp, equation 3; a time that is not positive is a ConfigError."""
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
    """Return the width that a normalised utility stands for, equation 8."""
    return next((width for cut, width in CUTS if share >= cut), _NARROWEST)


def fit(width: float, offered: Sequence[float]) -> float:
    """Return the offered width nearest to the wanted one, from below where there is one."""
    narrower = [candidate for candidate in offered if candidate <= width]
    return max(narrower) if narrower else min(offered)
