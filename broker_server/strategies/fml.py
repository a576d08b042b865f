"""FML: devices keep a personal model of any shape and teach each other through copies of the global
one.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu, Chao Wu:
"Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765. Specification section 5.

The server's half: only the copies of the global model (the memes) come back, and their mean is
plain, without weights by samples. The global model may be a trunk: then the rest, each device's
adaptor and head, stays on its device, may have another shape there, and is neither merged nor
evaluated here. The losses and the mutual step are `trainer_export.routines.mutual`, the device's
half is `device_runtime.training.routines.mutual`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from broker_server.strategies import fedavg
from broker_server.strategies.accumulator import Accumulator, finish, fold, start
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
from models.layout import Layout
from models.parts import in_parts, parameters_in
from models.plan import compile_plan, make_plan

_ALPHA_STEP, _ALPHA_FLOOR, _BETA_STEP = 0.2, 0.5, 0.4  # specification 5.5


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
        """Alpha and beta after some rounds: with each decay alpha falls by 0.2 to 0.5, and beta
        rises by 0.4 to 1.

        An alpha that begins below 0.5 stays.
        """
        decays = sum(closed_rounds >= decay for decay in self.decays)
        floor = min(self.alpha, _ALPHA_FLOOR)
        return {
            "alpha": max(self.alpha - _ALPHA_STEP * decays, floor),
            "beta": min(self.beta + _BETA_STEP * decays, 1.0),
        }


def build(basis: Basis[FmlSettings]) -> Strategy:
    """The strategy as configured.

    Raises:
        PlanError: weights by samples are configured, which specification 5.2 leaves out for the
            devices' privacy; or the model lacks a part that is to be shared.
    """
    if basis.weighting == "samples":
        raise PlanError("fml takes the plain mean of the memes; remove weighting")
    keys = basis.options
    layout = basis.layout
    part = layout if keys.shared is None else trunk(layout, keys.shared)
    shared = [item.name for item in part.parameters]
    plan = compile_plan(part, make_plan(part, part.tier(1.0)))
    mean = average_and_step(finish, basis.optimizer)

    def add(sums: Accumulator, update: Contribution) -> None:
        fold(sums, update.key, plan, update.weights)

    def merged(sums: Accumulator, old: GlobalModel) -> GlobalModel:
        new = mean(sums, GlobalModel({name: old.weights[name] for name in shared}, old.state))
        return GlobalModel({**old.weights, **new.weights}, new.state)

    def instruct(instructions: Instructions, closed_rounds: int) -> Instructions:
        return instructions.model_copy(
            update={"routine": "mutual", "settings": keys.trust_after(closed_rounds)}
        )

    return replace(
        fedavg.build(replace(basis, weighting="uniform")),
        name="fml",
        paper="https://arxiv.org/abs/2006.16765",
        merge=Merge(lambda: start(part), add, merged),
        instruct=instruct,
        stays=tuple(item.name for item in layout.parameters if item.name not in shared),
    )


def trunk(layout: Layout, shared: Iterable[str]) -> Layout:
    """The layout of what devices share of the global model: blocks or modules by path, as in
    `FmlSettings.shared`.

    Raises:
        PlanError: a part has no parameter, or nothing is left to share.
    """
    parts = set(shared)
    names = parameters_in(layout, parts)
    if not names:
        raise PlanError(f"{layout.arch} would share nothing; name the parts that devices share")
    kept = tuple(item for item in layout.parameters if item.name in names)
    return replace(
        layout,
        parameters=kept,
        statistics=tuple(item for item in layout.statistics if in_parts(item, parts)),
        # A trunk has no rows that belong to labels.
        label_axes=tuple(
            axis
            for axis in layout.label_axes
            if any(dim.axis == axis for p in kept for dim in p.dims)
        ),
    )


STRATEGIES = {"fml": Method(build, FmlSettings)}
