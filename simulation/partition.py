"""Who gets which samples: IID and Dirichlet splits of a data set among devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError

__all__ = ["dirichlet", "iid"]

_TRIES = 1000


def iid(samples: int, devices: int, seed: int) -> list[NDArray[np.int64]]:
    """Random equal disjoint parts, floor(samples / devices) each (METHODS 1.8).

    Args:
        samples: size of the set.
        devices: number of parts.
        seed: of the shuffle.

    Returns:
        One array of indices per device.

    Raises:
        ConfigError: there are fewer samples than devices.
    """
    share = samples // devices
    if share == 0:
        raise ConfigError(f"{samples} samples cannot be shared among {devices} devices")
    order = np.random.default_rng(seed).permutation(samples)
    return [np.sort(order[i * share : (i + 1) * share]) for i in range(devices)]


def dirichlet(
    labels: NDArray[np.int64], devices: int, alpha: float, seed: int, *, at_least: int = 10
) -> list[NDArray[np.int64]]:
    """Share every class among the devices by proportions drawn from Dirichlet(alpha).

    Args:
        labels: labels of the set, int64 [n].
        devices: number of parts.
        alpha: concentration; small means each class sits on few devices.
        seed: of the draw.
        at_least: smallest part allowed; the draw is repeated until every part has as many.

    Returns:
        One sorted array of indices per device; together they are the whole set.

    Raises:
        ConfigError: alpha is not positive, or no draw gives every device enough.
    """
    if alpha <= 0:
        raise ConfigError(f"the concentration of a Dirichlet split must be above 0, not {alpha}")
    rng = np.random.default_rng(seed)
    for _ in range(_TRIES):
        parts: list[list[NDArray[np.int64]]] = [[] for _ in range(devices)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            cuts = (np.cumsum(rng.dirichlet(np.full(devices, alpha)))[:-1] * len(members)).astype(np.int64)
            for part, piece in zip(parts, np.split(members, cuts), strict=True):
                part.append(piece)
        joined = [np.sort(np.concatenate(part)) for part in parts]
        if min(map(len, joined)) >= at_least:
            return joined
    raise ConfigError(
        f"no Dirichlet({alpha}) split of {len(labels)} samples gives {devices} devices {at_least} samples each; "
        "take a larger concentration or fewer devices"
    )
