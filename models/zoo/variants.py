"""The variants of a model for the proof of its layout: the whole model, and a narrower one."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from fleet_protocol.errors import ConfigError, ModelError
from fleet_protocol.python_files import refusing_exits
from models.axes import Axis, AxisKind
from models.cut import Cut
from models.inputs import Row, small_pictures
from models.user_lines import at_line_of
from models.zoo.builds import CheapInitialization, ModelBuilder, shapes_of
from models.zoo.growth import Growth
from models.zoo.layers import StaticBatchNorm
from models.zoo.proof import Variant, movable_axes
from models.zoo.randomized_model import RandomizedModel, random_samples, randomize

_NARROW = (0.7, 0.5, 0.75, 0.3)  # odd sizes first, because they distinguish most orders

# Number of parameters. For a larger model, gradients are compared only on a narrower variant, at a
# tenth of the cost.
_LARGE = 1_000_000


@dataclass(frozen=True)
class SizedVariants:
    """The variants of a model that differ in its size, or in that of its samples."""

    whole: Variant  # on samples of their own size
    small: Variant  # the whole model on small pictures; the same as `whole` if it takes no others
    narrower: Variant | None  # None if it can tell nothing more

    def proving(self) -> tuple[Variant, ...]:
        """Return those that a layout is proved on, the whole model first."""
        variants = [self.whole]
        # Without gradients, small pictures tell nothing that larger ones do not.
        if self.small is not self.whole and self.small.before.gradients:
            variants.append(self.small)
        if self.narrower is not None:
            variants.append(self.narrower)
        return tuple(variants)


def variants_of_size(
    builder: ModelBuilder, module: nn.Module, axes: Mapping[str, Axis], growth: Growth
) -> SizedVariants:
    """Return the whole model, and a narrower one where that can tell more.

    A narrower one reveals more if units have many entries or are grouped.

    Args:
        builder: builds other sizes.
        module: the whole model on the meta device.
        axes: its axes.
        growth: what they move.
    """
    is_large = sum(value.numel() for value in module.parameters()) > _LARGE
    # Where no unit moves, no gradient is compared.
    gradients = bool(movable_axes(axes)) and not is_large
    small_rows = _small_rows(builder.row)
    whole_model = _SizedModel(builder, module, axes, Cut, builder.row)
    # Gradients are compared on small pictures, if the model runs on them.
    whole = whole_model.run(gradients=gradients and not small_rows)
    small = _on_first_samples(whole, small_rows, gradients=gradients)
    if small is None:
        if small_rows and gradients:
            whole = _with_gradients(whole)
        small = whole
    row = builder.row
    if small is not whole:
        row = row.with_shape(tuple(small.model.samples.shape[1:]))
    narrower = None
    if _narrower_tells_more(axes, growth, is_large=is_large):
        narrower = _run_narrower(builder, axes, row, is_large=is_large)
    return SizedVariants(whole, small, narrower)


def _narrower_tells_more(axes: Mapping[str, Axis], growth: Growth, *, is_large: bool) -> bool:
    # Without a width, no model is narrower.
    if all(axis.kind is not AxisKind.WIDTH for axis in axes.values()):
        return False
    # With one entry for each unit and no groups, there is only one order.
    has_groups = any(axis.groups > 1 for axis in axes.values())
    has_many_entries = any([*entries.values()] != [1] for entries in growth.values())
    return has_groups or has_many_entries or is_large


def _run_narrower(
    builder: ModelBuilder, axes: Mapping[str, Axis], row: Row, *, is_large: bool
) -> Variant | None:
    # Some builders do not accept every size, so several are tried.
    for rate, enlarge in _narrower_sizes(axes, is_large=is_large):
        with contextlib.suppress(ConfigError):
            return _narrower(builder, axes, rate, enlarge, row).run(gradients=True)
    return None


def _small_rows(row: Row) -> list[Row]:
    """Return the samples of smaller pictures; of any other sample there are none."""
    if row.named or row.dtype != "float32":
        return []
    return [row.with_shape(shape) for shape in small_pictures(row.shape)]


def _on_first_samples(whole: Variant, rows: Iterable[Row], *, gradients: bool) -> Variant | None:
    """Return a variant on the first samples that the model runs on; None if it runs on none."""
    for row in rows:
        variant = _on_other_samples(whole, row, gradients=gradients)
        if variant is not None:
            return variant
    return None


def _on_other_samples(whole: Variant, row: Row, *, gradients: bool) -> Variant | None:
    """Return a variant on samples of another size; None if the model does not run on them."""
    model = whole.model
    # A model may take pictures of one size only, and says so by any error.
    with contextlib.suppress(Exception), refusing_exits(), torch.random.fork_rng(devices=[]):
        model = replace(model, samples=random_samples(model.module, row))
        return replace(whole, model=model, before=model.run(gradients=gradients))
    return None


def _with_gradients(variant: Variant) -> Variant:
    return replace(variant, before=variant.model.run(gradients=True))


def _narrower_sizes(
    axes: Mapping[str, Axis], *, is_large: bool
) -> Iterator[tuple[float, dict[str, int]]]:
    """Yield rates and the units to add, those first that leave no axis whole or with one unit."""
    rates = (_NARROW[-1], *_NARROW) if is_large else _NARROW
    for rate in rates:
        yield rate, _units_to_add(axes, rate)
    for rate in rates:
        yield rate, {}


def _units_to_add(axes: Mapping[str, Axis], rate: float) -> dict[str, int]:
    """Return the units to add in each group of small axes, by name.

    A narrower model that has all of their units, or one in each group, would prove nothing.
    """
    added: dict[str, int] = {}
    for name, axis in axes.items():
        if axis.kind is not AxisKind.WIDTH or axis.group_size == 1:
            continue
        kept = axis.kept(rate) // axis.groups
        if not 1 < kept < axis.group_size:
            added[name] = axis.group_size + 1 - kept
    return added


@dataclass(frozen=True)
class _SizedModel:
    """A model on the meta device, and how it was built."""

    builder: ModelBuilder
    module: nn.Module
    axes: Mapping[str, Axis]
    cut: Callable[[], Cut]  # makes the cut to build it once more
    row: Row  # a sample that it runs on

    def run(self, *, gradients: bool) -> Variant:
        """Run the model with random parameters, without initial weights if it runs without them."""
        variant = self._run_without_initial_weights(gradients=gradients)
        if variant is not None:
            return variant
        # The same random weights for every caller, without a change to the caller's state.
        with torch.random.fork_rng(devices=[]), CheapInitialization():
            torch.manual_seed(0)
            module = self.builder.build(self.cut())
        model = self._randomize(module)
        title = self.builder.arch.name
        try:
            with refusing_exits():
                return self._variant(model, gradients=gradients)
        except ConfigError as error:
            raise ModelError(f"{title}: {error}") from error
        except Exception as error:
            shape = list(self.row.shape)
            raise ModelError(
                f"{title}: the model fails{at_line_of(error)} on a batch of samples of shape "
                f"{shape}: {error!r}; its forward must take one tensor [batch, *input_shape], or "
                "those that input_shape = {'name': shape, ...} names, compute in float32, and know "
                "every whole number below the rows of its smallest embedding"
            ) from error

    def _run_without_initial_weights(self, *, gradients: bool) -> Variant | None:
        if self._needs_initial_values():
            return None
        model = self._randomize(self.module)
        # Anything may fail without initial weights; the model then runs with them.
        with contextlib.suppress(Exception), _MetaTensorsRefused():
            variant = self._variant(model, gradients=gradients)
            # Without initial values a model may compute NaN, which says nothing about its layout.
            if all(bool(value.isfinite().all()) for value in variant.before.outputs):
                return variant
        return None

    def _needs_initial_values(self) -> bool:
        """Return whether parameters are shared, or there are buffers other than norm statistics."""
        # Shared parameters have two names, and random values for each would differ.
        named = list(self.module.named_parameters(remove_duplicate=False))
        if len(list(self.module.parameters())) < len(named):
            return True
        norms: list[str] = []
        for path, layer in self.module.named_modules():
            if isinstance(layer, StaticBatchNorm):
                norms.append(f"{path}.")
        # Other buffers, such as tables of positions, need their values.
        return not all(name.startswith(tuple(norms)) for name, _ in self.module.named_buffers())

    def _randomize(self, module: nn.Module) -> RandomizedModel:
        samples = random_samples(module, self.row)
        return randomize(module, samples, self.builder.until)

    def _variant(self, model: RandomizedModel, *, gradients: bool) -> Variant:
        before = model.run(gradients=gradients)
        return Variant(model, shapes_of(self.module), self.axes, before)


def _narrower(
    builder: ModelBuilder,
    axes: Mapping[str, Axis],
    rate: float,
    enlarge: Mapping[str, int],
    row: Row,
) -> _SizedModel:
    cut = partial(Cut, rate, enlarge=enlarge)
    smaller: dict[str, Axis] = {}
    for name, axis in axes.items():
        size = axis.kept(rate) + axis.groups * enlarge.get(name, 0)
        smaller[name] = replace(axis, size=size)
    return _SizedModel(builder, builder.build_on_meta(cut()), smaller, cut, row)


class _MetaTensorsRefused(TorchFunctionMode):
    """Refuses tensors without memory, because computing would read arbitrary values.

    A builder may make others than parameters and buffers: attributes, or what a function of the
    model holds.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.is_meta:
                raise ModelError(
                    "a tensor that is neither a parameter nor a buffer needs the device of the"
                    " builder"
                )
        return func(*args, **(kwargs or {}))
