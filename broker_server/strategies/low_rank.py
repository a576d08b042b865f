"""Merges low-rank adapters: pairs of matrices whose shared axis is the rank.

Tiers have unequal shares of the rank. An adapter is a module with two matrices besides frozen
parameters: ``up`` [out, rank] and ``down`` [rank, in]. It is recognised by its shape: no other
dimension of the two is cut, and both have the same axis. All other parameters are merged as in
HeteroFL.
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
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel
from models.layout import Layout
from models.parameters import Parameter
from models.slicing import Tensors

Terms = tuple[NDArray[np.float32], ...]
"""The arrays in which updates of one adapter are summed, with the same shapes for every rank."""

_UP_AXIS = 1
_DOWN_AXIS = 0
"""Which dimension of each matrix is the rank."""


@dataclass(frozen=True)
class Pair:
    """The matrices of an adapter, float32: `up` is [out, r], `down` [r, in]."""

    up: NDArray[np.float32]
    down: NDArray[np.float32]


@dataclass(frozen=True)
class Adapter:
    """The parameters of an adapter.

    Attributes:
        up: name of the matrix [out, rank].
        down: name of the matrix [rank, in].
        rank: the rank of the whole adapter.
    """

    up: str
    down: str
    rank: int

    def pair(self, weights: Tensors) -> Pair:
        """Return the adapter's matrices from the weights of a model."""
        return Pair(weights[self.up], weights[self.down])

    def is_whole_in(self, weights: Tensors) -> bool:
        """Return whether weights contain both matrices."""
        return self.up in weights and self.down in weights


@dataclass(frozen=True)
class AdapterMerge:
    """How the updates of one adapter are merged: by a weighted mean of terms made of each.

    Attributes:
        terms: the terms of an update of any rank, given the whole rank.
        weight: the weight of an update, which multiplies that of its device.
        finish: the merged adapter, from the mean of the terms and the adapter before.
    """

    terms: Callable[[Pair, int], Terms]
    weight: Callable[[Pair], float]
    finish: Callable[[Terms, Pair], Pair]


def adapters_of(layout: Layout) -> tuple[Adapter, ...]:
    """Return the adapters of a model, in the order of its parameters.

    Raises:
        PlanError: a module has several adapters of one axis.
    """
    # By module and axis, the matrices that the axis cuts, by the dimension of that axis.
    matrices: dict[tuple[str, str], dict[int, list[Parameter]]] = {}
    for parameter in layout.parameters:
        rank_dimension = _rank_dimension(layout, parameter)
        if rank_dimension is not None:
            module = parameter.name.rpartition(".")[0]
            axis = parameter.dims[rank_dimension].axis
            sides = matrices.setdefault((module, axis), {})
            sides.setdefault(rank_dimension, []).append(parameter)
    adapters = []
    for (module, _), sides in matrices.items():
        if len(sides) < 2:
            continue  # a matrix that is cut along one dimension, and has no partner
        ups = sides[_UP_AXIS]
        downs = sides[_DOWN_AXIS]
        if len(ups) + len(downs) > 2:
            several = ", ".join(parameter.name for parameter in (*ups, *downs))
            raise PlanError(
                f"it is ambiguous which of {several} are one adapter; give each a module "
                f"below {module}"
            )
        adapters.append(Adapter(ups[0].name, downs[0].name, downs[0].shape[0]))
    return tuple(adapters)


def _rank_dimension(layout: Layout, parameter: Parameter) -> int | None:
    """Return which dimension of a matrix a width cuts; None if it is not half of an adapter."""
    if len(parameter.dims) != 2:
        return None
    up_dim = parameter.dims[_UP_AXIS]
    down_dim = parameter.dims[_DOWN_AXIS]
    # Exactly one of the two is the rank.
    if layout.is_cut(up_dim) == layout.is_cut(down_dim):
        return None
    rank_dimension = _UP_AXIS if layout.is_cut(up_dim) else _DOWN_AXIS
    dim = parameter.dims[rank_dimension]
    # A rank is not a concatenation of axes, and each unit of it is one row or column.
    return rank_dimension if dim.is_plain and dim.inner == 1 else None


@dataclass
class _Sums:
    """The running state of a merge.

    Attributes:
        selective: HeteroFL's state, for all parameters that belong to no adapter.
        terms: the weighted sum of its terms, for each adapter.
        weights: the total weight of its updates, for each adapter.
    """

    selective: Any
    terms: dict[Adapter, Terms] = field(default_factory=dict)
    weights: dict[Adapter, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _AdapterRounds:
    """HeteroFL's merge with a different merge of adapters."""

    adapters: tuple[Adapter, ...]
    adapter_merge: AdapterMerge
    selective: Merge[Any]
    by_samples: bool

    def start(self) -> _Sums:
        return _Sums(self.selective.start())

    def fold(
        self,
        sums: _Sums,
        update: Contribution,
    ) -> None:
        # HeteroFL sums the adapters too, and `average` overwrites them.
        self.selective.fold(sums.selective, update)
        for adapter in self.adapters:
            # A shallow tier lacks the adapters of deeper blocks. If one matrix stays on the
            # devices, the other is averaged as HeteroFL averages it.
            if adapter.is_whole_in(update.weights):
                self._fold_adapter(sums, adapter, update)

    def _fold_adapter(
        self,
        sums: _Sums,
        adapter: Adapter,
        update: Contribution,
    ) -> None:
        pair = adapter.pair(update.weights)
        device_weight = update.metrics.weight if self.by_samples else 1
        weight = self.adapter_merge.weight(pair) * device_weight
        terms = self.adapter_merge.terms(pair, adapter.rank)
        weighted = tuple(term * np.float32(weight) for term in terms)
        before = sums.terms.get(adapter)
        sums.terms[adapter] = weighted if before is None else tuple(map(np.add, before, weighted))
        sums.weights[adapter] = sums.weights.get(adapter, 0.0) + weight

    def average(
        self,
        sums: _Sums,
        old: Tensors,
    ) -> Weights:
        merged = dict(self.selective.finish(sums.selective, GlobalModel(old, {})).weights)
        # HeteroFL's average keeps an adapter that no update contains.
        for adapter, terms in sums.terms.items():
            weight = sums.weights[adapter]
            pair = adapter.pair(old)
            # An adapter whose updates all have norm 0 does not change.
            if weight > 0:
                mean = tuple(term / np.float32(weight) for term in terms)
                pair = self.adapter_merge.finish(mean, pair)
            merged[adapter.up] = pair.up
            merged[adapter.down] = pair.down
        return merged


def merge_adapters(adapter_merge: AdapterMerge, basis: Basis[FrozenModel | None]) -> Strategy:
    """Build HeteroFL with a different merge of adapters; ``weighting`` is uniform by default.

    Raises:
        PlanError: the model has no adapters, or the plan is not static: narrow tiers have the
            leading units of a rank.
    """
    adapters = adapters_of(basis.layout)
    if not adapters:
        raise PlanError(
            f"{basis.name} merges low-rank adapters, but {basis.layout.arch} has none (two "
            "matrices of one module that a width cuts only along their shared axis, see "
            "models.zoo.adapters); use heterofl"
        )
    if basis.plan != "static":
        raise PlanError(
            f'{basis.name} sends the leading units of each rank; remove plan = "{basis.plan}"'
        )
    selective = heterofl.build(replace(basis, average="mean", optimizer=None))
    by_samples = basis.weighting == "samples"
    rounds = _AdapterRounds(
        adapters,
        adapter_merge,
        selective.merge,
        by_samples,
    )
    finish = average_and_step(rounds.average, basis.optimizer)
    merge: Merge[Any] = Merge(rounds.start, rounds.fold, finish)
    # The merge combines products of two factors, or parts of them by their norms.
    breaks = selective.breaks | {Trait.MEAN_OF_CHANGES}
    return replace(selective, name=basis.name, merge=merge, breaks=breaks)
