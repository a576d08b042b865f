"""Rows of a simulation's history: a closed round, and the part of a device in it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundRow:
    """One closed round.

    Attributes:
        round: its number, from 1; abandoned rounds count.
        version: its global version.
        accuracy: accuracy of that version on the server's test set, if evaluated.
        loss: the same for the loss.
        train_loss: mean over the devices that took part; None if none reported it.
        devices: number of participating devices.
        tiers: number of devices by trained tier.
        simulated_seconds: emulated time of this round, and of the abandoned ones before it.
        simulated_total: emulated time since the start of the run, to the end of this round.
        seconds: real time of this round.
        payload_bytes: bytes of weights and updates in both directions, including abandoned rounds
            before it.
        local_accuracy: mean over the devices' own held-out samples, weighted by their number.
        matthews: correlation of its predictions with two labels, if it was requested.
        perplexity: perplexity of that version on the server's test set, if it was requested.
        epsilon: epsilon of a device's part in the run so far; None without noise.
        metrics: metrics of that version on the server's test set, by name, as the recipe asks for
            them; None if it was not evaluated.
        clipped: updates that were scaled down to the bound on their norm.
        too_far: updates that were refused because of that bound.
        tier_metrics: accuracy and metrics of further tiers of that version, by names such as
            ``w1.00-d2 accuracy``; None if none were evaluated.
        local_worst_tenth: mean of the tenth of the devices with the lowest accuracy on their own
            held-out samples; the newest accuracy of each device counts.
    """

    round: int
    version: int
    accuracy: float | None
    loss: float | None
    train_loss: float | None
    devices: int
    tiers: Mapping[str, int]
    simulated_seconds: float
    simulated_total: float
    seconds: float
    payload_bytes: int
    local_accuracy: float | None
    matthews: float | None = None
    perplexity: float | None = None
    epsilon: float | None = None
    metrics: Mapping[str, float] | None = None
    clipped: int = 0
    too_far: int = 0
    tier_metrics: Mapping[str, float] | None = None
    local_worst_tenth: float | None = None


@dataclass(frozen=True)
class DeviceRow:
    """The part of one device in a closed round.

    Attributes:
        examples: number of its training samples.
        train_loss: its reported training loss.
        local_accuracy: accuracy of the trained sub-model on its held-out samples, if any.
        simulated_seconds: emulated time of its work.
        seconds: real time of its training.
        payload_bytes: size of its update.
    """

    round: int
    device: str
    tier: str
    examples: int
    train_loss: float | None
    local_accuracy: float | None
    simulated_seconds: float
    seconds: float
    payload_bytes: int


def first_reaching(rows: Iterable[RoundRow], target: float) -> RoundRow | None:
    """Return the first round whose model reaches an accuracy, whether or not it stays there.

    None if no evaluated round does.
    """
    for row in rows:
        if row.accuracy is not None and row.accuracy >= target:
            return row
    return None
