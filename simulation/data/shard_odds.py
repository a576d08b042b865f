"""What to expect of the released shard split: how many devices end up with a single label (specification 1.8).

Where a device's draws coincide, the released code keeps the label once: the device has one class and less data. The
share of such devices belongs in the description of an experiment that uses the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod

from fleet_protocol.errors import ConfigError

__all__ = ["single_label_probability"]


def single_label_probability(counts: Sequence[int], per_device: int) -> float:
    """Probability that all shards dealt to a device carry the same label.

    Args:
        counts: shards of each class, all of which are shuffled and dealt.
        per_device: shards dealt to a device, at least 1.

    Returns:
        The probability: 19/199 for 10 classes of 20 shards and 2 shards per device.

    Raises:
        ConfigError: a device cannot be dealt so many shards.
    """
    total = sum(counts)
    if not 1 <= per_device <= total:
        raise ConfigError(f"{per_device} of {total} shards cannot be dealt to a device")
    ways = sum(_ordered(count, per_device) for count in counts)
    return float(Fraction(ways, _ordered(total, per_device)))


def _ordered(shards: int, drawn: int) -> int:
    """Number of ways to draw so many shards one after another."""
    return prod(shards - taken for taken in range(drawn))
