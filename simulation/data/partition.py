"""Splits a data set among devices: IID, by Dirichlet, by shards, or by subject."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError
from fleet_protocol.targets import Targets

_TRIES = 1000


def iid(samples: int, devices: int, seed: int) -> list[NDArray[np.int64]]:
    """Draw equal disjoint parts (specification 1.8).

    Returns:
        One sorted array of indices per device, of floor(samples / devices) each.

    Raises:
        ConfigError: there are fewer samples than devices.
    """
    share = samples // devices
    if share == 0:
        raise ConfigError(f"{samples} samples cannot be shared among {devices} devices")
    order = np.random.default_rng(seed).permutation(samples)
    by_device: list[NDArray[np.int64]] = []
    for device in range(devices):
        first = device * share
        by_device.append(np.sort(order[first : first + share]))
    return by_device


def dirichlet(
    labels: Targets, devices: int, alpha: float, seed: int, *, at_least: int = 10
) -> list[NDArray[np.int64]]:
    """Share every class among the devices by proportions drawn from Dirichlet(alpha).

    A small concentration means that each class sits on few devices. The draw is repeated until
    every part has enough.

    Returns:
        One sorted array of indices per device; together they are the whole set.

    Raises:
        ConfigError: alpha is not positive, or no draw gives every device enough.
    """
    if alpha <= 0:
        raise ConfigError(f"the concentration of a Dirichlet split must be above 0, not {alpha}")
    rng = np.random.default_rng(seed)
    for _ in range(_TRIES):
        by_device = _draw_dirichlet(rng, labels, devices, alpha)
        if min(map(len, by_device)) >= at_least:
            return by_device
    raise ConfigError(
        f"no Dirichlet({alpha}) split of {len(labels)} samples gives {devices} devices {at_least}"
        " samples each; take a larger concentration or fewer devices"
    )


def _draw_dirichlet(
    rng: np.random.Generator, labels: Targets, devices: int, alpha: float
) -> list[NDArray[np.int64]]:
    shares: list[list[NDArray[np.int64]]] = [[] for _ in range(devices)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        proportions = rng.dirichlet(np.full(devices, alpha))
        cuts = (np.cumsum(proportions)[:-1] * len(members)).astype(np.int64)
        for share, piece in zip(shares, np.split(members, cuts), strict=True):
            share.append(piece)
    return _sorted_parts(shares)


def in_proportion(
    parts: Sequence[NDArray[np.int64]], labels: Targets, others: Targets, seed: int
) -> list[NDArray[np.int64]]:
    """Share further samples so that a device gets the share of each class that its part holds.

    Samples whose label no device holds go to nobody.

    Args:
        parts: indices of each device's samples.
        labels: of the samples that the parts index, ``[n]``.
        others: labels of the further samples, ``[m]``.
        seed: of the draw.

    Returns:
        One sorted array of indices of the further samples per device.
    """
    rng = np.random.default_rng(seed)
    dealt: list[list[NDArray[np.int64]]] = [[np.zeros(0, np.int64)] for _ in parts]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(others == label))
        held = np.cumsum([np.count_nonzero(labels[part] == label) for part in parts])
        cuts = np.rint(held[:-1] / held[-1] * len(members)).astype(np.int64)
        for share, piece in zip(dealt, np.split(members, cuts), strict=True):
            share.append(piece)
    return _sorted_parts(dealt)


def _sorted_parts(shares: Sequence[Sequence[NDArray[np.int64]]]) -> list[NDArray[np.int64]]:
    """Return the indices of each device, sorted."""
    return [np.sort(np.concatenate(share)) for share in shares]


@dataclass(frozen=True)
class Shards:
    """Which labels each device holds, so that training and test sets can be split alike.

    Example:
        >>> dealt = deal_shards(classes=4, devices=6, per_device=2, seed=0)
        >>> train_parts, test_parts = dealt.split(train_y, seed=0), dealt.split(test_y, seed=0)
    """

    labels: tuple[tuple[int, ...], ...]  # the labels of each device, one for each of its shards
    counts: tuple[int, ...]  # shards that each class is cut into

    def split(
        self, targets: Targets, seed: int, *, of: str = "training"
    ) -> list[NDArray[np.int64]]:
        """Cut every class into shards and deal them at random, each to one device.

        Args:
            targets: the label of each sample.
            seed: of the draw.
            of: names the samples in messages.

        Returns:
            One sorted array of indices per device.

        Raises:
            ConfigError: a label is outside the classes, or a class has fewer samples than shards.
        """
        if len(targets) and not 0 <= targets.min() <= targets.max() < len(self.counts):
            raise ConfigError(
                f"labels {targets.min()} to {targets.max()} are outside the {len(self.counts)}"
                " classes"
            )
        rng = np.random.default_rng(seed)
        stacks: list[list[NDArray[np.int64]]] = []
        for label, count in enumerate(self.counts):
            members = np.flatnonzero(targets == label)
            if len(members) < count:
                raise ConfigError(
                    f"class {label} has {len(members)} {of} samples for {count} shards; take fewer"
                    " devices or shards"
                )
            pieces = cut_shards(members, count)
            stacks.append([pieces[place] for place in rng.permutation(count)])
        dealt: list[list[NDArray[np.int64]]] = []
        for held in self.labels:
            dealt.append([stacks[label].pop() for label in held])
        return _sorted_parts(dealt)


def cut_shards(members: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Cut the samples of a class into equal consecutive shards.

    What remains goes one each to the first shards.
    """
    return np.array_split(members, count)


def deal_shards(
    classes: int, devices: int, per_device: int, seed: int, *, as_released: bool = False
) -> Shards:
    """Deal shards of single classes to devices, the non-IID split of HeteroFL (specification 1.8).

    Every class is cut into as many shards as there are, and each device gets `per_device` shards.
    Where the shards cannot be equally many for all classes, some classes that are drawn have one
    more.

    Args:
        classes: number of labels.
        devices: number of parts.
        per_device: shards of each device, at most so many labels.
        seed: of the draw.
        as_released: whether to follow the authors' code, where a device that draws a label twice
            keeps it once, and has one shard less; some shards then belong to nobody.

    Raises:
        ConfigError: there are fewer shards than classes, or, as released, no whole number for each
            class.
    """
    total = devices * per_device
    least, more = divmod(total, classes)
    if per_device < 1 or least < 1:
        raise ConfigError(
            f"{devices} devices with {per_device} shards each cannot cover {classes} classes; take"
            " more shards"
        )
    if as_released and more:
        raise ConfigError(
            f"{total} shards are no multiple of {classes} classes, as the released split needs;"
            " change the devices or shards, or leave as_released off"
        )
    rng = np.random.default_rng(seed)
    counts = np.full(classes, least, np.int64)
    counts[rng.choice(classes, size=more, replace=False)] += 1
    dealt = rng.permutation(np.repeat(np.arange(classes), counts)).reshape(devices, per_device)
    labels: list[tuple[int, ...]] = []
    for row in dealt:
        held = np.unique(row) if as_released else np.sort(row)
        labels.append(tuple(held.tolist()))
    return Shards(tuple(labels), tuple(counts.tolist()))


def by_subject(
    groups: NDArray[np.int64] | Sequence[int], devices: int | None = None
) -> list[NDArray[np.int64]]:
    """Give every device the samples of one subject, or of a few.

    Args:
        groups: the subject of each sample, int64 [n].
        devices: number of parts; one for each subject if omitted. With fewer, neighbours in number
            share a device.

    Returns:
        One sorted array of indices per device; together they are the whole set.

    Raises:
        ConfigError: there are more devices than subjects.
    """
    owners = np.asarray(groups)
    subjects = np.unique(owners)
    count = len(subjects) if devices is None else devices
    if not 1 <= count <= len(subjects):
        raise ConfigError(
            f"{len(subjects)} subjects cannot be shared among {count} devices; take at most one for"
            " each"
        )
    by_device: list[NDArray[np.int64]] = []
    for share in np.array_split(subjects, count):
        by_device.append(np.flatnonzero(np.isin(owners, share)))
    return by_device
