"""Merges of low-rank adapters: pairs of matrices whose shared axis is the rank, which tiers have
unequally much of.

An adapter is a module with two matrices beside whatever is frozen: ``up`` [out, rank] and ``down``
[rank, in]. It is known by its shape: no other dimension of the two is cut, and both have the same
axis. All other parameters are merged as in HeteroFL.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies import heterofl
from broker_server.strategies.strategy import (
    Basis,
    Contribution,
    GlobalModel,
    Merge,
    Strategy,
    Weights,
    average_and_step,
)
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel
from models.layout import Layout, Parameter
from models.slicing import Tensors


@dataclass(frozen=True)
class Pair:
    """The matrices of an adapter, float32: `up` is [out, r], `down` [r, in]."""

    up: NDArray[np.float32]
    down: NDArray[np.float32]


Pieces = tuple[NDArray[np.float32], ...]
"""What updates of one adapter add up as: arrays of the same shapes from every rank."""


@dataclass(frozen=True)
class Adapter:
    """Where an adapter is among the parameters."""

    up: str  # name of the matrix [out, rank]
    down: str  # name of the matrix [rank, in]
    rank: int  # of the whole adapter

    def of(self, weights: Tensors) -> Pair:
        """Take the adapter out of some weights."""
        return Pair(weights[self.up], weights[self.down])


@dataclass(frozen=True)
class Folding:
    """How the updates of one adapter become one: a weighted mean of something, and what is made of
    it.
    """

    pieces: Callable[[Pair, int], Pieces]  # of an update of any rank, given the whole rank
    weight: Callable[[Pair], float]  # of an update beside that of its device
    finish: Callable[
        [Pieces, Pair], Pair
    ]  # the merged adapter, from the mean of the pieces and the adapter before


def adapters_of(layout: Layout) -> tuple[Adapter, ...]:
    """The adapters of a model, in the order of its parameters.

    A PlanError where a module has several of one axis.
    """
    sides: dict[tuple[str, str], dict[int, list[Parameter]]] = {}
    for item in layout.parameters:
        cut = [at for at, dim in enumerate(item.dims) if layout.is_cut(dim)]
        if (
            len(item.dims) == 2
            and len(cut) == 1
            and item.dims[cut[0]].is_plain
            and item.dims[cut[0]].inner == 1
        ):
            place = item.name.rpartition(".")[0], item.dims[cut[0]].axis
            sides.setdefault(place, {}).setdefault(cut[0], []).append(item)
    pairs = {place: (found[1], found[0]) for place, found in sides.items() if len(found) == 2}
    for (module, _), (ups, downs) in pairs.items():
        if len(ups) + len(downs) > 2:
            several = ", ".join(item.name for item in (*ups, *downs))
            raise PlanError(
                f"which of {several} are one adapter cannot be told; give each a module below {module}"
            )
    return tuple(Adapter(up.name, down.name, down.shape[0]) for (up,), (down,) in pairs.values())


@dataclass
class _Sums:
    """The running state of a merge: HeteroFL's for what is no adapter, a sum and its total weight
    for each adapter.
    """

    others: Any
    pieces: dict[Adapter, Pieces] = field(default_factory=dict)
    totals: dict[Adapter, float] = field(default_factory=dict)


def merge_adapters(folding: Folding, basis: Basis[FrozenModel | None]) -> Strategy:
    """HeteroFL with another merge of adapters; ``weighting`` is uniform by default.

    Raises:
        PlanError: the model has no adapters, or the plan is not static: narrow tiers have the
            leading units of a rank.
    """
    adapters = adapters_of(basis.layout)
    if not adapters:
        raise PlanError(
            f"{basis.name} merges low-rank adapters, and {basis.layout.arch} has none (two matrices of one module that"
            " a width cuts along their shared axis alone, see models.zoo.adapters); take heterofl"
        )
    if basis.plan != "static":
        raise PlanError(
            f'{basis.name} sends the leading units of each rank; remove plan = "{basis.plan}"'
        )
    built = heterofl.build(replace(basis, average="mean", optimizer=None))
    by_samples = basis.weighting == "samples"

    def fold(sums: _Sums, update: Contribution) -> None:
        built.merge.fold(sums.others, update)
        for adapter in adapters:
            if adapter.up not in update.weights:  # of a block that a shallow tier lacks
                continue
            pair = adapter.of(update.weights)
            weight = folding.weight(pair) * (update.metrics.examples if by_samples else 1)
            terms = tuple(
                piece * np.float32(weight) for piece in folding.pieces(pair, adapter.rank)
            )
            known = sums.pieces.get(adapter)
            sums.pieces[adapter] = terms if known is None else tuple(map(np.add, known, terms))
            sums.totals[adapter] = sums.totals.get(adapter, 0.0) + weight

    def average(sums: _Sums, old: Tensors) -> Weights:
        merged = dict(built.merge.finish(sums.others, GlobalModel(old, {})).weights)
        for adapter in adapters:
            total = sums.totals.get(adapter, 0.0)
            pair = adapter.of(old)
            if total > 0:
                pair = folding.finish(
                    tuple(piece / np.float32(total) for piece in sums.pieces[adapter]),
                    pair,
                )
            merged[adapter.up], merged[adapter.down] = pair.up, pair.down
        return merged

    merge: Merge[Any] = Merge(
        lambda: _Sums(built.merge.start()), fold, average_and_step(average, basis.optimizer)
    )
    return replace(built, name=basis.name, merge=merge)
