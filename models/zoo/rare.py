"""Rare samples: numbers that a model compares with, or looks up, are put where chance does not put
them.

A mask in the middle of a vocabulary, or a number that stands for a missing one, may be treated
unlike all others.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from models.inputs import Row
from models.zoo.exchange import Subject, samples

_SIDES = {"lt", "le", "gt", "ge", "bucketize", "searchsorted"}
_COMPARED = {"eq", "ne", "isin", "sub", "remainder", "xor", "bitwise_xor", *_SIDES}
_FEW = 16
_MOST = 12
_TABLE = 65_536
_LARGEST = 1e6  # larger ones overflow, or show rounding alone
_SAMPLES = 4
_SEED = 11


class _Compared(TorchFunctionMode):
    """Notes what a model compares something with, for bounds also the neighbours, and rare places
    of a table.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = dict[float, None]()
        self.others = dict[float, None]()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")  # operators have some around them
        for value in args if name in _COMPARED else ():
            is_small = (
                isinstance(value, Tensor) and value.dtype != torch.bool and value.numel() <= _FEW
            )
            found = (
                value.flatten().tolist()
                if is_small
                else [value]
                if type(value) in (int, float)
                else []
            )
            sides = (-1, 0, 1) if name in _SIDES else (0,)
            (self.others if is_small else self.numbers).update(
                {one + side: None for one in found for side in sides}
            )
        if name in ("getitem", "embedding") and all(
            isinstance(value, Tensor) for value in args[:2]
        ):
            table = args[name == "embedding"]
            if table.dim() and 0 < table.numel() <= _TABLE:
                _, kinds, counts = table.unique(dim=0, return_inverse=True, return_counts=True)
                rare = counts.argsort() if len(counts) <= _FEW else ()
                self.numbers.update({int((kinds == kind).nonzero()[0]): None for kind in rare})
        return func(*args, **(kwargs or {}))


def rare_samples(subject: Subject, row: Row) -> Iterator[Tensor]:
    """Batches of samples with one such number each in half of an input.

    The model is run once to find them.
    """
    with (
        contextlib.suppress(Exception),
        torch.random.fork_rng(devices=[]),
        _Compared() as compared,
    ):
        subject.run(gradients=False)
    usual = {*subject.x.flatten().tolist()}
    found = {**compared.numbers, **compared.others}
    whole = row.dtype == "int64"
    kept = [
        one
        for one in found
        if abs(one) <= _LARGEST and one not in usual and (not whole or one == int(one))
    ]
    generator = torch.Generator().manual_seed(_SEED)
    for number in kept[:_MOST]:
        for _, place in row.places() if row.named else [("", slice(None))]:
            x = samples(subject.module, row, _SAMPLES)
            x[:, place][torch.rand(x[:, place].shape, generator=generator) < 1 / 2] = number
            yield x
