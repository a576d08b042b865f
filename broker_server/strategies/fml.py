"""FML: devices keep a personal model of any shape and teach it through copies of the global one.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu, Chao Wu:
"Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765. Specification section 5.

The server's half: only the copies of the global model (the memes) come back, and their mean is
plain, without weights by samples. The global model may be a trunk: then the rest, each device's
adaptor and head, stays on its device, may have another shape there, and is neither merged nor
evaluated here. The losses and the mutual step are `trainer_export.routines.mutual`, the device's
half is `device_runtime.training.routines.mutual`.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from broker_server.strategies import fedavg
from broker_server.strategies.accumulator import Accumulator, finish, fold, start
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.strategy import (
    Basis,
    Contribution,
    GlobalModel,
    Merge,
    Method,
    Strategy,
    average_and_step,
)
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Instructions
from models.layout import Layout, Parameter
from models.parts import in_parts, parameters_in
from models.plan import compile_plan, make_plan

# How alpha and beta move with each decay, and where alpha stops (specification 5.5).
_ALPHA_STEP = 0.2
_ALPHA_FLOOR = 0.5
_BETA_STEP = 0.4


class FmlSettings(FrozenModel):
    """``[strategy.fml]`` (specification 5).

    Attributes:
        alpha: how much a personal model trusts the labels; the rest is trust in the meme.
        beta: how much the meme does; the rest is trust in the personal model.
        decays: closed rounds after which alpha falls and beta rises; usually those of the learning
            rate.
        shared: parts of the global model that are averaged, blocks (``stem``, ``block1`` ...,
            ``head``) or modules by path (``trunk``, ``fc1``); None for all. The rest is every
            device's own, and may have another shape there.
    """

    alpha: float = Field(default=0.5, ge=0, le=1)
    beta: float = Field(default=0.5, ge=0, le=1)
    decays: tuple[Annotated[int, Field(ge=1)], ...] = ()
    shared: tuple[str, ...] | None = Field(default=None, min_length=1)

    def trust_after(self, closed_rounds: int) -> dict[str, float]:
        """Return alpha and beta after some rounds.

        With each decay alpha falls by 0.2 to 0.5, and beta rises by 0.4 to 1. An alpha that begins
        below 0.5 stays.
        """
        decays = sum(closed_rounds >= decay for decay in self.decays)
        floor = min(self.alpha, _ALPHA_FLOOR)
        return {
            "alpha": max(self.alpha - _ALPHA_STEP * decays, floor),
            "beta": min(self.beta + _BETA_STEP * decays, 1.0),
        }


def build(basis: Basis[FmlSettings]) -> Strategy:
    """Build the strategy from its settings.

    Raises:
        PlanError: weights by samples are configured, which specification 5.2 leaves out for the
            devices' privacy; or the model lacks a part that is to be shared.
    """
    if basis.weighting == "samples":
        raise PlanError("fml takes the plain mean of the memes; remove weighting")
    options = basis.options
    layout = basis.layout
    shared_layout = layout if options.shared is None else trunk(layout, options.shared)
    shared_names = _names_of(shared_layout)

    def instruct(instructions: Instructions, closed_rounds: int) -> Instructions:
        trust = options.trust_after(closed_rounds)
        return instructions.model_copy(update={"routine": "mutual", "settings": trust})

    return replace(
        fedavg.build(replace(basis, weighting="uniform")),
        name="fml",
        paper="https://arxiv.org/abs/2006.16765",
        merge=_mean_of_memes(shared_layout, basis.optimizer),
        instruct=instruct,
        stays=tuple(name for name in _names_of(layout) if name not in shared_names),
    )


def _mean_of_memes(shared: Layout, optimizer: OptimizerSettings | None) -> Merge[Accumulator]:
    """Return the plain mean of the shared parameters; the others of the global model stay."""
    plan = compile_plan(shared, make_plan(shared, shared.tier(1.0)))
    names = _names_of(shared)
    average = average_and_step(finish, optimizer)

    def add(sums: Accumulator, update: Contribution) -> None:
        fold(
            sums,
            update.key,
            plan,
            update.weights,
        )

    def merge_shared(sums: Accumulator, old: GlobalModel) -> GlobalModel:
        old_shared = {name: old.weights[name] for name in names}
        new = average(sums, GlobalModel(old_shared, old.state))
        return GlobalModel({**old.weights, **new.weights}, new.state)

    return Merge(lambda: start(shared), add, merge_shared)


def trunk(layout: Layout, shared: Iterable[str]) -> Layout:
    """Return the layout of the part of the global model that devices share.

    Args:
        layout: the global model.
        shared: blocks or modules by path, as in `FmlSettings.shared`.

    Raises:
        PlanError: a part has no parameter, or nothing is left to share.
    """
    parts = set(shared)
    names = parameters_in(layout, parts)
    if not names:
        raise PlanError(f"{layout.arch} would share nothing; name the parts that devices share")
    parameters = tuple(parameter for parameter in layout.parameters if parameter.name in names)
    statistics = tuple(statistic for statistic in layout.statistics if in_parts(statistic, parts))
    # A trunk without the head has no rows that belong to labels.
    used_axes = _axes_of(parameters)
    label_axes = tuple(axis for axis in layout.label_axes if axis in used_axes)
    return replace(
        layout,
        parameters=parameters,
        statistics=statistics,
        label_axes=label_axes,
    )


def _names_of(layout: Layout) -> list[str]:
    return [parameter.name for parameter in layout.parameters]


def _axes_of(parameters: Sequence[Parameter]) -> Collection[str]:
    axes: set[str] = set()
    for parameter in parameters:
        for dim in parameter.dims:
            axes.add(dim.axis)
    return axes


STRATEGIES = {"fml": Method(build, FmlSettings)}
