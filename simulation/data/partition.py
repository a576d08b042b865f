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
    # The remainder is not assigned, so that all parts are equal (specification 1.8).
    share = samples // devices
    if share == 0:
        raise ConfigError(
            f"{samples} samples cannot be divided among {devices} devices; use fewer devices"
        )
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
    """Divide every class among the devices by proportions drawn from Dirichlet(alpha).

    With a small concentration, each class is on few devices. The draw is repeated until every part
    has enough samples.

    Returns:
        One sorted array of indices per device; together they are the whole set.

    Raises:
        ConfigError: alpha is not positive, or no draw gives every device enough samples.
    """
    if alpha <= 0:
        raise ConfigError(f"the concentration of a Dirichlet split must be above 0, not {alpha}")
    rng = np.random.default_rng(seed)
    # The generator continues, so every try is another draw.
    for _ in range(_TRIES):
        by_device = _draw_dirichlet(rng, labels, devices, alpha)
        fewest = min(map(len, by_device))
        if fewest >= at_least:
            return by_device
    raise ConfigError(
        f"no Dirichlet({alpha}) split of {len(labels)} samples gives {devices} devices"
        f" {at_least} samples each; use a larger concentration or fewer devices"
    )


def _draw_dirichlet(
    rng: np.random.Generator,
    labels: Targets,
    devices: int,
    alpha: float,
) -> ByDevice:
    """Draw once; for each label in order, draw its samples and then the proportions."""
    by_label: list[ByDevice] = []
    # By label in ascending order, because the draws of a label follow those of the previous one.
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        shuffled = rng.permutation(members)
        proportions = rng.dirichlet(np.full(devices, alpha))
        # Rounded down, so that the last device gets the remainder.
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
    """Divide further samples so that a device gets the same share of each class.

    Samples with a label that no device holds are not assigned.

    Args:
        by_device: indices of each device's samples.
        labels: labels of the indexed samples, ``[n]``.
        further: labels of the further samples, ``[m]``.
        seed: seed of the draw.

    Returns:
        One sorted array of indices of the further samples per device.
    """
    rng = np.random.default_rng(seed)
    nothing = np.zeros(0, np.int64)
    # Devices get no test samples with labels that none of them holds.
    by_label: list[ByDevice] = [[nothing] * len(by_device)]
    for label in np.unique(labels):
        members = np.flatnonzero(further == label)
        shuffled = rng.permutation(members)
        counts = []
        for indices in by_device:
            # The share of a device among the test samples of a label is its share among the
            # training samples.
            counts.append(np.count_nonzero(labels[indices] == label))
        ends = np.cumsum(counts)
        shares = ends[:-1] / ends[-1]
        cuts = np.rint(shares * len(members)).astype(np.int64)
        by_label.append(np.split(shuffled, cuts))
    return _join_labels(by_label)


def _join_labels(by_label: Sequence[Sequence[Indices]]) -> ByDevice:
    """Return the samples of each device, sorted.

    Args:
        by_label: the share of every device, for each label.
    """
    by_device: ByDevice = []
    for shares in zip(*by_label, strict=True):
        by_device.append(np.sort(np.concatenate(shares)))
    return by_device


@dataclass(frozen=True)
class Shards:
    """The labels of each device, so that training and test sets can be split in the same way.

    Example:
        >>> dealt = deal_shards(classes=4, devices=6, per_device=2, seed=0)
        >>> train_parts, test_parts = dealt.split(train_y, seed=0), dealt.split(test_y, seed=0)
    """

    labels: tuple[tuple[int, ...], ...]  # the labels of each device, one per shard
    counts: tuple[int, ...]  # number of shards of each class

    def split(self, targets: Targets, seed: int, *, of: str = "training") -> ByDevice:
        """Split every class into shards, and assign each shard to a random device.

        Args:
            targets: the label of each sample.
            seed: seed of the draw.
            of: name of the samples in messages.

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
        # The shards of each label in the order of assignment, the last one first.
        stacks: list[list[Indices]] = []
        for label, count in enumerate(self.counts):
            members = np.flatnonzero(targets == label)
            if len(members) < count:
                raise ConfigError(
                    f"class {label} has {len(members)} {of} samples for {count} shards; use"
                    " fewer devices or shards"
                )
            shards = cut_shards(members, count)
            # Shards go to devices in random order, because consecutive samples may be alike.
            order = rng.permutation(count)
            stacks.append([shards[place] for place in order])
        by_device: ByDevice = []
        for labels in self.labels:
            dealt = [stacks[label].pop() for label in labels]
            by_device.append(np.sort(np.concatenate(dealt)))
        return by_device


def cut_shards(members: Indices, count: int) -> list[Indices]:
    """Split the samples of a class into equal consecutive shards.

    The remaining samples go to the first shards, one each.
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

    Every class is split into shards, and each device gets `per_device` shards. If the number of
    shards is not divisible by the classes, randomly chosen classes have one more.

    Args:
        classes: number of labels.
        devices: number of parts.
        per_device: shards of each device, which limit its number of labels.
        seed: seed of the draw.
        as_released: whether to follow the authors' code: a device that draws a label twice keeps it
            once and has one shard less, so some shards are not assigned.

    Raises:
        ConfigError: there are fewer shards than classes, or with `as_released` their number is not
            divisible by the classes.
    """
    total = devices * per_device
    least, remaining = divmod(total, classes)
    if per_device < 1 or least < 1:
        raise ConfigError(
            f"{devices} devices with {per_device} shards each cannot cover {classes} classes;"
            " use more shards"
        )
    if as_released and remaining:
        raise ConfigError(
            f"{total} shards are not a multiple of {classes} classes, which the released split"
            " needs; change the number of devices or shards, or turn as_released off"
        )
    rng = np.random.default_rng(seed)
    counts = np.full(classes, least, np.int64)
    favoured = rng.choice(classes, size=remaining, replace=False)
    counts[favoured] += 1
    stack = np.repeat(np.arange(classes), counts)
    # A row for each device.
    dealt = rng.permutation(stack).reshape(devices, per_device)
    labels: list[tuple[int, ...]] = []
    for row in dealt:
        # In the released code, a device has a label once, however often it draws it.
        held = np.unique(row) if as_released else np.sort(row)
        labels.append(tuple(held.tolist()))
    return Shards(tuple(labels), tuple(counts.tolist()))


def by_subject(groups: Indices | Sequence[int], devices: int | None = None) -> ByDevice:
    """Give every device the samples of one or several subjects.

    Args:
        groups: the subject of each sample, int64 [n].
        devices: number of parts; one per subject if omitted. With fewer, consecutive subjects share
            a device.

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
            f"{len(subjects)} subjects cannot be divided among {count} devices; use at most one"
            " device per subject"
        )
    by_device: ByDevice = []
    # Consecutive subjects share a device, in nearly equal numbers.
    for share in np.array_split(subjects, count):
        by_device.append(np.flatnonzero(np.isin(owners, share)))
    return by_device
