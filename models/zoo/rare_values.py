"""Variants of a model on rare values, for which units may be treated differently.

Units that are equal for ordinary numbers may differ if activations are large, images are shifted,
or a token is a mask. So the layout is also proved with samples and parameters of other sizes, and
with samples that contain the numbers that the model compares with or looks up.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from models.architecture import Architecture
from models.inputs import Row
from models.zoo.proof import Variant
from models.zoo.randomized_model import RandomizedModel, Run, random_samples
from models.zoo.training_variant import check_buffers_unchanged, is_finite

# Scale and shift of samples, and the gain of parameters.
_SCALES = ((0.001, 0.0, 1.0), (1.0, 3.0, 1.0), (10.0, 0.0, 1.0), (1.0, 0.0, 10.0))
_SAMPLES = 4

_BOUNDS = frozenset({"lt", "le", "gt", "ge", "bucketize", "searchsorted"})
_COMPARISONS = _BOUNDS | {"eq", "ne", "isin", "sub", "remainder", "xor", "bitwise_xor"}
_LOOKUPS = ("getitem", "embedding")
_FEW = 16  # elements of a tensor that may hold constants, or kinds of rows in a table
_TABLE = 65_536  # elements; no larger table is searched for rare rows
_MOST_NUMBERS = 12
_LARGEST = 1e6  # larger numbers overflow, or show only rounding
_SEED = 11


def variants_with_rare_values(
    arch: Architecture, variant: Variant, row: Row, *, moves: bool
) -> Iterator[Variant]:
    """Yield variants of the same size with rare samples and parameters.

    Args:
        arch: architecture for messages.
        variant: variant of the size to use.
        row: what a sample is.
        moves: whether units will be moved; if not, one variant shows whether buffers change.

    Raises:
        ConfigError: if a buffer changes while the model runs.
    """
    module = variant.model.module
    runs = list(_rare_runs(variant.model, row))
    for samples, gain in runs if moves else runs[:1]:
        model, run = _run_scaled(variant.model, samples, gain)
        if run is not None and is_finite(run):
            yield replace(variant, model=model, before=run)
        check_buffers_unchanged(arch, module, dict(module.named_buffers()), model.buffers)


def _run_scaled(
    model: RandomizedModel, samples: Tensor, gain: float
) -> tuple[RandomizedModel, Run | None]:
    """Run a model on other samples, with larger parameters; None if it fails.

    Double precision has no rounding to speak of, but some models compute in single precision only.
    """
    scaled = model
    for dtype in (torch.float64, torch.float32):
        scaled = model.scaled(samples, gain, dtype)
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
            return scaled, scaled.run(gradients=False)
    return scaled, None


def _rare_runs(model: RandomizedModel, row: Row) -> Iterator[tuple[Tensor, float]]:
    """Yield samples and the gain of parameters for each variant."""
    for scale, shift, gain in _SCALES:
        # Tokens have no size; a part of the vocabulary and the gain are enough.
        if row.dtype == "float32" or (scale <= 1 and not shift):
            yield random_samples(model.module, row, _SAMPLES, scale, shift), gain
    for samples in _samples_with_rare_numbers(model, row):
        yield samples, 1.0


def _samples_with_rare_numbers(model: RandomizedModel, row: Row) -> Iterator[Tensor]:
    """Yield batches with one rare number each, in half of an input; runs the model to find them."""
    places = [slice(None)]
    if row.named:
        places = [place for _, place in row.places()]
    generator = torch.Generator().manual_seed(_SEED)
    for number in _rare_numbers(model, row)[:_MOST_NUMBERS]:
        for place in places:
            samples = random_samples(model.module, row, _SAMPLES)
            values = samples[:, place]
            is_rare = torch.rand(values.shape, generator=generator) < 1 / 2
            values[is_rare] = number
            yield samples


def _rare_numbers(model: RandomizedModel, row: Row) -> list[float]:
    """Return numbers that a model compares with and that its samples do not contain."""
    with (
        contextlib.suppress(Exception),
        torch.random.fork_rng(devices=[]),
        _ComparisonRecorder() as recorder,
    ):
        model.run(gradients=False)
    usual = set(model.samples.flatten().tolist())
    numbers: list[float] = []
    for number in {**recorder.constants, **recorder.elements}:
        if abs(number) > _LARGEST or number in usual:
            continue
        if row.dtype == "float32" or number == int(number):
            numbers.append(number)
    return numbers


class _ComparisonRecorder(TorchFunctionMode):
    """Records numbers that a model compares with, and places of rare rows in its tables.

    For bounds, it also records the neighbours. Dictionaries keep each number once, in order of
    occurrence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.constants = dict[float, None]()
        self.elements = dict[float, None]()  # of small tensors

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")  # operators have underscores around them
        if name in _COMPARISONS:
            sides = (-1, 0, 1) if name in _BOUNDS else (0,)
            for value in args:
                self._note_compared(value, sides)
        if name in _LOOKUPS and all(isinstance(value, Tensor) for value in args[:2]):
            self._note_rare_rows(args[1] if name == "embedding" else args[0])
        return func(*args, **(kwargs or {}))

    def _note_compared(self, value: Any, sides: tuple[int, ...]) -> None:
        if isinstance(value, Tensor):
            if value.dtype != torch.bool and value.numel() <= _FEW:
                for element in value.flatten().tolist():
                    for side in sides:
                        self.elements[element + side] = None
        elif type(value) in {int, float}:
            for side in sides:
                self.constants[value + side] = None

    def _note_rare_rows(self, table: Tensor) -> None:
        """Record the place of one row of each kind in a table of few kinds, rare kinds first."""
        if not table.dim() or not 0 < table.numel() <= _TABLE:
            return
        _, kinds, counts = torch.unique(table, dim=0, return_inverse=True, return_counts=True)
        if len(counts) <= _FEW:
            for kind in counts.argsort():
                self.constants[int((kinds == kind).nonzero()[0])] = None
