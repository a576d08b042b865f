"""Survey the effect of each whole number in a constructor's arguments: shapes, blocks, or none."""

import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch

from models.user_lines import first_line
from models.zoo.builds import SkippedInitialization, shapes_of
from models.zoo.conversion import convert
from models.zoo.growth import Shapes
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.scaled_layers import LAYER_PARTS

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
_BLOCK_WORDS = ("depth", "layer", "block", "stage", "repeat")
"""Parts of names of arguments that count blocks."""
_MOST_STACKS = 6  # a model with more has an argument for each of its layers
_SHARE = 1 / 3  # of the time, if the layers can be cut together, which needs the rest

ENOUGH = "was not tried, because the layers are cut together"
"""Why arguments stay whole of which there are too many."""

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
    skipped: Container[str],
    deadline: float,
    is_enough: Callable[[Sequence[Surveyed]], bool] = lambda _: False,
) -> tuple[Surveyed, ...]:
    """Try other numbers of every argument, one at a time.

    Args:
        prober: builds the model.
        skipped: places that are decided already.
        deadline: processor time after which no further ones are tried.
        is_enough: whether further arguments, except numbers of blocks, need not be tried.
    """
    surveyed: list[Surveyed] = []
    ends = False
    cuts_layers = LAYER_PARTS in prober.model.sizes
    if cuts_layers:
        begun = time.process_time()
        deadline = begun + _SHARE * (deadline - begun)
    for place, size in prober.model.sizes.items():
        if place in skipped:
            continue
        ends = ends or is_enough(surveyed)
        skips = ends and not any(word in place for word in _BLOCK_WORDS)
        if skips or (cuts_layers and _has_too_many_stacks(surveyed)):
            surveyed.append(Surveyed(place, size, Effect.UNKNOWN, ENOUGH))
        elif _describes_samples(place):
            surveyed.append(Surveyed(place, size, Effect.SAMPLE))
        elif time.process_time() > deadline:
            surveyed.append(Surveyed(place, size, Effect.UNKNOWN, LATE))
        else:
            surveyed.append(_try_other_sizes(prober, place, size))
    return tuple(surveyed)


def _has_too_many_stacks(surveyed: Sequence[Surveyed]) -> bool:
    """Return whether the depths found so far are rather the branches of single layers.

    To try each as the depth would leave no time for the widths.
    """
    return len(with_effects(surveyed, Effect.BLOCKS)) >= _MOST_STACKS


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
    changed: list[str] = []
    for name, shape in whole.items():
        if other[name] != shape:
            changed.append(name)
    for name in changed:
        if other[name][:_UNIT_DIMENSIONS] != whole[name][:_UNIT_DIMENSIONS]:
            return False
    return bool(changed)


@dataclass(frozen=True)
class ShapeProber:
    """Builds a model with other sizes and looks at the shapes of its parameters.

    It builds each model once, and keeps its shapes.
    """

    model: PackageModel
    converts: bool  # whether a conversion of the layers changes the shapes, which are then its
    on_meta: bool  # whether the constructor works without values
    whole: Shapes
    _known: dict[frozenset[tuple[str, int]], Shapes | Exception] = field(default_factory=dict)

    @classmethod
    def for_model(cls, model: PackageModel, *, converts: bool = False) -> "ShapeProber":
        """Build the whole model: without memory if its constructor computes nothing.

        Args:
            model: the model.
            converts: whether the shapes are those of models with their layers converted.
        """
        try:
            return cls._for_model(model, converts=converts, on_meta=True)
        except Exception:  # noqa: BLE001 - constructors that compute raise anything
            return cls._for_model(model, converts=converts, on_meta=False)

    @classmethod
    def _for_model(cls, model: PackageModel, *, converts: bool, on_meta: bool) -> "ShapeProber":
        with _without_values(on_meta=on_meta):
            module = model.build({})
            whole = shapes_of(module)
            if not converts:
                return cls(model, converts=False, on_meta=on_meta, whole=whole)
            converted = shapes_of(convert(module, records_origin=False)[0])
        # Most conversions leave all parameters as they are, and take as long as a build.
        is_changed = [*converted.items()] != [*whole.items()]
        return cls(model, converts=is_changed, on_meta=on_meta, whole=converted)

    def shapes(self, sizes: Mapping[str, int]) -> Shapes:
        """Return the shapes of the parameters with some other sizes; raises anything."""
        own = self.model.sizes.items()
        changed = frozenset(sizes.items() - own)
        if not changed:
            return self.whole
        if changed not in self._known:
            self._known[changed] = self._build(dict(changed))
        known = self._known[changed]
        if isinstance(known, Exception):
            raise known.with_traceback(None)
        return known

    def _build(self, sizes: Mapping[str, int]) -> Shapes | Exception:
        """Return the shapes, or the error of the constructor."""
        try:
            with _without_values(on_meta=self.on_meta):
                module = self.model.build(sizes)
                if self.converts:
                    module = convert(module, records_origin=False)[0]
        except Exception as error:  # noqa: BLE001 - a package's constructor raises anything
            return error
        return shapes_of(module)

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


@contextmanager
def _without_values(*, on_meta: bool) -> Iterator[None]:
    """Build models whose values do not matter, without memory if their constructor allows that."""
    with ExitStack() as stack:
        if on_meta:
            stack.enter_context(torch.device("meta"))
        else:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(SkippedInitialization())
        yield
