"""Survey the effect of each whole number in a constructor's arguments: shapes, blocks, or none."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from models.user_lines import first_line
from models.zoo.builds import SkippedInitialization, shapes_of
from models.zoo.growth import Shapes
from trainer_export.packages.package_model import PackageModel

_SAMPLE_WORDS = (
    "vocab",
    "position",
    "image",
    "img",
    "patch",
    "token",
    "seq_len",
    "kernel",
    "stride",
    "dilation",
    "padding",
    "window",
    "resolution",
    "spatial_dims",
    "_id",
    "id2label",
)
"""Parts of names of arguments that describe samples; a user may still pin them."""

_CHANNEL_WORDS = ("chans", "in_channels", "num_channels", "input_channels")
"""The same of a plain argument; within a list of stages they are the widths of a stage."""

_UNIT_DIMENSIONS = 2  # of a weight, which are followed by those of a kernel

LATE = "was not tried, because the time for discovery ran out; pin it with --axis"
"""Why arguments stay whole that there was no time for."""


OTHER_LAYERS = "other layers are built"
"""Why an argument takes no other number by itself, but with another one that it has to equal."""


class Effect(Enum):
    """The effect of another number for an argument."""

    WIDTH = "changes sizes of parameters"
    ROUNDED = "is rounded: only large changes move parameters"
    KERNEL = "changes the extent of kernels or of positions"
    BLOCKS = "changes the number of blocks"
    NONE = "moves no parameter"
    REFUSED = "accepts no other number on its own"
    SAMPLE = "describes samples"
    UNKNOWN = "may change anything"


@dataclass(frozen=True)
class Surveyed:
    """An argument, and what it changes."""

    place: str
    size: int
    effect: Effect
    reason: str = ""  # why the constructor refuses other numbers


def survey(
    prober: "ShapeProber",
    skipped: frozenset[str],
    deadline: float,
) -> tuple[Surveyed, ...]:
    """Try other numbers of every argument, one at a time.

    Args:
        prober: builds the model.
        skipped: places that are decided already.
        deadline: processor time after which no further ones are tried.
    """
    surveyed: list[Surveyed] = []
    for place, size in prober.model.sizes.items():
        if place in skipped:
            continue
        if _describes_samples(place):
            surveyed.append(Surveyed(place, size, Effect.SAMPLE))
        elif time.process_time() > deadline:
            surveyed.append(Surveyed(place, size, Effect.UNKNOWN, LATE))
        else:
            surveyed.append(_try_other_sizes(prober, place, size))
    return tuple(surveyed)


def with_effects(entries: Iterable[Surveyed], *effects: Effect) -> list[Surveyed]:
    """Return the arguments that have one of some effects."""
    chosen: list[Surveyed] = []
    for entry in entries:
        if entry.effect in effects:
            chosen.append(entry)
    return chosen


def _describes_samples(place: str) -> bool:
    if any(word in place for word in _SAMPLE_WORDS):
        return True
    return "." not in place and any(word in place for word in _CHANNEL_WORDS)


def _try_other_sizes(
    prober: "ShapeProber",
    place: str,
    size: int,
) -> Surveyed:
    """Build with one more, then with twice as many."""
    reason = ""
    for grown in (size + 1, 2 * size):
        try:
            shapes = prober.shapes({place: grown})
        except Exception as error:  # noqa: BLE001 - a package's constructor raises anything
            reason = reason or first_line(error)
            continue
        if shapes.keys() != prober.whole.keys():
            changed = _changes_common_shapes(prober.whole, shapes)
            # Layers that fit two sizes to one another are there only where these differ.
            reason = reason or OTHER_LAYERS
            return Surveyed(place, size, Effect.WIDTH if changed else Effect.BLOCKS, reason)
        if _changes_kernels_only(prober.whole, shapes):
            return Surveyed(place, size, Effect.KERNEL)
        if shapes != prober.whole:
            is_rounded = grown != size + 1 and not reason
            return Surveyed(place, size, Effect.ROUNDED if is_rounded else Effect.WIDTH, reason)
    return Surveyed(place, size, Effect.REFUSED if reason else Effect.NONE, reason)


def _changes_common_shapes(whole: Shapes, other: Shapes) -> bool:
    common = whole.keys() & other.keys()
    return any(whole[name] != other[name] for name in common)


def _changes_kernels_only(whole: Shapes, other: Shapes) -> bool:
    """Return whether parameters change, but in no dimension that has units of a layer."""
    changed = [name for name, shape in whole.items() if other[name] != shape]
    return bool(changed) and all(
        other[name][:_UNIT_DIMENSIONS] == whole[name][:_UNIT_DIMENSIONS] for name in changed
    )


@dataclass(frozen=True)
class ShapeProber:
    """Builds a model with other sizes and looks at the shapes of its parameters."""

    model: PackageModel
    on_meta: bool  # whether the constructor works without values
    whole: Shapes

    @classmethod
    def for_model(cls, model: PackageModel) -> "ShapeProber":
        """Build the whole model: without memory if its constructor computes nothing."""
        try:
            return cls(model, True, _shapes_on_meta(model, {}))
        except Exception:  # noqa: BLE001 - constructors that compute raise anything
            return cls(model, False, _shapes_on_cpu(model, {}))

    def shapes(self, sizes: Mapping[str, int]) -> Shapes:
        """Return the shapes of the parameters with some other sizes."""
        if self.on_meta:
            return _shapes_on_meta(self.model, sizes)
        return _shapes_on_cpu(self.model, sizes)

    def share(self, sizes: Mapping[str, int]) -> float:
        """Return the share of the parameters that are left with some other sizes.

        It is 1 if the constructor does not take them, or builds other layers.
        """
        try:
            shapes = self.shapes(sizes)
        except Exception:  # noqa: BLE001 - a package's constructor raises anything
            return 1.0
        if shapes.keys() != self.whole.keys():
            return 1.0
        return _count(shapes) / _count(self.whole)

    def changes(self, sizes: Mapping[str, int]) -> bool:
        """Return whether some other sizes change parameters; a constructor may refuse them."""
        try:
            return self.shapes(sizes) != self.whole
        except Exception:  # noqa: BLE001 - a package's constructor raises anything
            return True

    def can_build(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the constructor takes some other sizes."""
        try:
            self.shapes(sizes)
        except Exception:  # noqa: BLE001 - a package's constructor raises anything
            return False
        return True


def _count(shapes: Shapes) -> int:
    """Count the entries of all parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


def _shapes_on_meta(model: PackageModel, sizes: Mapping[str, int]) -> Shapes:
    with torch.device("meta"), SkippedInitialization():
        return shapes_of(model.build(sizes))


def _shapes_on_cpu(model: PackageModel, sizes: Mapping[str, int]) -> Shapes:
    with torch.random.fork_rng(devices=[]), SkippedInitialization():
        return shapes_of(model.build(sizes))
