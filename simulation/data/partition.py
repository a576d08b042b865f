"""Splits a data set among devices: IID, by Dirichlet, by shards, or by subject."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError
from fleet_protocol.targets import Targets

Indices = NDArray[np.int64]
ByDevice = list[Indices]
"""Indices of the samples of each device."""

_TRIES = 1000


def iid(samples: int, devices: int, seed: int) -> ByDevice:
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
    by_device: ByDevice = []
    for first in range(0, devices * share, share):
        drawn = order[first : first + share]
        by_device.append(np.sort(drawn))
    return by_device


def dirichlet(
    labels: Targets,
    devices: int,
    alpha: float,
    seed: int,
    *,
    at_least: int = 10,
) -> ByDevice:
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
        fewest = min(map(len, by_device))
        if fewest >= at_least:
            return by_device
    raise ConfigError(
        f"no Dirichlet({alpha}) split of {len(labels)} samples gives {devices} devices {at_least}"
        " samples each; take a larger concentration or fewer devices"
    )


def _draw_dirichlet(
    rng: np.random.Generator,
    labels: Targets,
    devices: int,
    alpha: float,
) -> ByDevice:
    """Draw once; the draws are, for each label in order, its samples and then the proportions."""
    by_label: list[ByDevice] = []
    # By label in ascending order; the draws of one follow those of the label before.
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        shuffled = rng.permutation(members)
        proportions = rng.dirichlet(np.full(devices, alpha))
        # Rounded down, so that the last device has what the roundings leave.
        ends = np.cumsum(proportions) * len(members)
        cuts = ends[:-1].astype(np.int64)
        by_label.append(np.split(shuffled, cuts))
    return _join_labels(by_label)


def in_proportion(
    by_device: Sequence[Indices],
    labels: Targets,
    further: Targets,
    seed: int,
) -> ByDevice:
    """Share further samples so that a device gets the share of each class that it holds.

    Samples whose label no device holds go to nobody.

    Args:
        by_device: indices of each device's samples.
        labels: of the samples that they index, ``[n]``.
        further: labels of the further samples, ``[m]``.
        seed: of the draw.

    Returns:
        One sorted array of indices of the further samples per device.
    """
    rng = np.random.default_rng(seed)
    nothing = np.zeros(0, np.int64)
    # Devices have nothing of a test set whose labels none of them holds.
    by_label: list[ByDevice] = [[nothing] * len(by_device)]
    for label in np.unique(labels):
        members = np.flatnonzero(further == label)
        shuffled = rng.permutation(members)
        counts = []
        for indices in by_device:
            counts.append(np.count_nonzero(labels[indices] == label))
        ends = np.cumsum(counts)
        shares = ends[:-1] / ends[-1]
        cuts = np.rint(shares * len(members)).astype(np.int64)
        by_label.append(np.split(shuffled, cuts))
    return _join_labels(by_label)


def _join_labels(by_label: Sequence[Sequence[Indices]]) -> ByDevice:
    """Return the samples of each device, sorted.

    Args:
        by_label: for each label the share of every device.
    """
    by_device: ByDevice = []
    for shares in zip(*by_label, strict=True):
        by_device.append(np.sort(np.concatenate(shares)))
    return by_device


@dataclass(frozen=True)
class Shards:
    """Which labels each device holds, so that training and test sets can be split alike.

    Example:
        >>> dealt = deal_shards(classes=4, devices=6, per_device=2, seed=0)
        >>> train_parts, test_parts = dealt.split(train_y, seed=0), dealt.split(test_y, seed=0)
    """

    labels: tuple[tuple[int, ...], ...]  # the labels of each device, one for each of its shards
    counts: tuple[int, ...]  # shards that each class is cut into

    def split(self, targets: Targets, seed: int, *, of: str = "training") -> ByDevice:
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
        classes = len(self.counts)
        if len(targets):
            least = targets.min()
            largest = targets.max()
            if least < 0 or largest >= classes:
                raise ConfigError(f"labels {least} to {largest} are outside the {classes} classes")
        rng = np.random.default_rng(seed)
        # The shards of each label in the order in which they are dealt, the last one first.
        stacks: list[list[Indices]] = []
        for label, count in enumerate(self.counts):
            members = np.flatnonzero(targets == label)
            if len(members) < count:
                raise ConfigError(
                    f"class {label} has {len(members)} {of} samples for {count} shards; take fewer"
                    " devices or shards"
                )
            shards = cut_shards(members, count)
            order = rng.permutation(count)
            stacks.append([shards[place] for place in order])
        by_device: ByDevice = []
        for labels in self.labels:
            dealt = [stacks[label].pop() for label in labels]
            by_device.append(np.sort(np.concatenate(dealt)))
        return by_device


def cut_shards(members: Indices, count: int) -> list[Indices]:
    """Cut the samples of a class into equal consecutive shards.

    What remains goes one each to the first shards.
    """
    return np.array_split(members, count)


def deal_shards(
    classes: int,
    devices: int,
    per_device: int,
    seed: int,
    *,
    as_released: bool = False,
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
    least, remaining = divmod(total, classes)
    if per_device < 1 or least < 1:
        raise ConfigError(
            f"{devices} devices with {per_device} shards each cannot cover {classes} classes; take"
            " more shards"
        )
    if as_released and remaining:
        raise ConfigError(
            f"{total} shards are no multiple of {classes} classes, as the released split needs;"
            " change the devices or shards, or leave as_released off"
        )
    rng = np.random.default_rng(seed)
    counts = np.full(classes, least, np.int64)
    favoured = rng.choice(classes, size=remaining, replace=False)
    counts[favoured] += 1
    stack = np.repeat(np.arange(classes), counts)
    dealt = rng.permutation(stack).reshape(devices, per_device)
    labels: list[tuple[int, ...]] = []
    for row in dealt:
        # As released, a device has a label once, however often it draws it.
        held = np.unique(row) if as_released else np.sort(row)
        labels.append(tuple(held.tolist()))
    return Shards(tuple(labels), tuple(counts.tolist()))


def by_subject(groups: Indices | Sequence[int], devices: int | None = None) -> ByDevice:
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
    by_device: ByDevice = []
    for share in np.array_split(subjects, count):
        by_device.append(np.flatnonzero(np.isin(owners, share)))
    return by_device
