"""FML: devices keep a personal model of any shape and teach each other through copies of the global one.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu, Chao Wu: "Federated Mutual
Learning", 2020, https://arxiv.org/abs/2006.16765. METHODS section 5.

The server's half: only the copies of the global model (the memes) come back, and their mean is plain, without weights
by samples. The global model may be a trunk: then the rest, each device's adaptor and head, stays on its device, may
have another shape there, and is neither merged nor evaluated here. The losses and the mutual step are
`trainer_export.mutual`, the device's half is `device_runtime.personal`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from broker_server.config import StrategyConfig
from broker_server.merge import Accumulator, finish, fold, start
from broker_server.strategies import fedavg
from broker_server.strategies.strategy import Contribution, ServerState, Strategy
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.messages import MutualSettings, TrainSettings
from models.layout import Layout
from models.parts import in_parts, parameters_in
from models.plan import compile_plan, make_plan
from models.slicing import Tensors

__all__ = ["MutualWeights", "build", "decay_rounds", "merge_memes", "trunk"]

_ALPHA_STEP, _ALPHA_FLOOR, _BETA_STEP = 0.2, 0.5, 0.4  # METHODS 5.5


@dataclass(frozen=True)
class MutualWeights:
    """How much each model trusts the labels; the rest is trust in the other model.

    Attributes:
        alpha: of the personal model, in [0, 1]; 1 makes it ignore the meme.
        beta: of the meme, in [0, 1]; 1 trains it as in FedAvg.
        dynamic: alpha falls and beta rises each time the learning rate decays.
    """

    alpha: float = 0.5
    beta: float = 0.5
    dynamic: bool = False

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not 0 <= value <= 1:
                raise ConfigError(f"mutual learning: {name} must be in [0, 1], not {value}")

    def after(self, decays: int) -> MutualWeights:
        """The weights after the learning rate has decayed so many times.

        Args:
            decays: how often.

        Returns:
            ``alpha <- max(alpha - 0.2, 0.5)`` and ``beta <- min(beta + 0.4, 1)`` for each decay; an alpha below 0.5
            stays. Without `dynamic`, these weights.
        """
        if not self.dynamic or decays < 1:
            return self
        floor = min(self.alpha, _ALPHA_FLOOR)
        return replace(
            self,
            alpha=max(self.alpha - _ALPHA_STEP * decays, floor),
            beta=min(self.beta + _BETA_STEP * decays, 1.0),
        )


def build(config: StrategyConfig) -> Strategy:
    """The strategy as configured.

    Args:
        config: ``fml``.

    Raises:
        PlanError: weights by samples are configured, which METHODS 5.2 leaves out for the devices' privacy.
    """
    if config.weighting == "samples":
        raise PlanError("fml takes the plain mean of the memes; remove weighting")
    built = fedavg.build(config.model_copy(update={"weighting": "uniform"}))
    keys = config.fml
    weights = MutualWeights(keys.alpha, keys.beta, dynamic=True)

    def shared(layout: Layout) -> Layout:
        return layout if keys.shared is None else trunk(layout, keys.shared)

    def stays(layout: Layout) -> tuple[str, ...]:
        kept = {item.name for item in shared(layout).parameters}
        return tuple(item.name for item in layout.parameters if item.name not in kept)

    def train(settings: TrainSettings, layout: Layout, closed_rounds: int) -> TrainSettings:
        now = weights.after(sum(closed_rounds >= decay for decay in keys.decays))
        mutual = MutualSettings(alpha=now.alpha, beta=now.beta, stays=stays(layout))
        return settings.model_copy(update={"mutual": mutual})

    def for_run(strategy: Strategy, layout: Layout, _tiers: object) -> Strategy:
        part = shared(layout)  # refuses parts that the model lacks
        plan = compile_plan(part, make_plan(part, part.tier(1.0)))

        def add(state: Accumulator, update: Contribution) -> None:
            fold(state, update.key, plan, update.weights)

        def step(
            old: Tensors, merged: dict[str, NDArray[Any]], state: ServerState
        ) -> tuple[dict[str, NDArray[Any]], ServerState]:
            new, after = strategy.step({name: old[name] for name in merged}, merged, state)
            return {**old, **new}, after

        return replace(strategy, start=lambda _layout: start(part), fold=add, step=step)

    return replace(built, name="fml", paper="https://arxiv.org/abs/2006.16765", train=train, for_run=for_run)


def decay_rounds(rounds: int) -> tuple[int, ...]:
    """Closed rounds after which the learning rate decays: after each third of the run (METHODS 5.6).

    Args:
        rounds: rounds of the run.

    Returns:
        Milestones for `broker_server.assignment.scheduled_rate` of the kind ``after``: 16, 32, 48 for 50 rounds.
    """
    third = rounds // 3
    return tuple(range(third, rounds, third)) if third else ()


def trunk(layout: Layout, shared: Iterable[str] | None = None) -> Layout:
    """The part of the global model that devices share.

    Args:
        layout: the global model.
        shared: blocks (``stem``, ``block1`` ..., ``head``) or modules by path that are shared; None shares all but the
            head, which is each device's adaptor.

    Returns:
        A layout of the shared parameters and statistics alone.

    Raises:
        PlanError: a part has no parameter, or nothing is left to share.
    """
    parts = {item.block for item in layout.parameters} - {"head"} if shared is None else set(shared)
    names = parameters_in(layout, parts)
    if not names:
        raise PlanError(f"{layout.arch} would share nothing; name the parts that devices share")
    kept = tuple(item for item in layout.parameters if item.name in names)
    return replace(
        layout,
        parameters=kept,
        statistics=tuple(item for item in layout.statistics if in_parts(item, parts)),
        # A trunk has no rows that belong to labels.
        label_axes=tuple(axis for axis in layout.label_axes if any(dim.axis == axis for p in kept for dim in p.dims)),
    )


def merge_memes(layout: Layout, old: Tensors, memes: Iterable[Tensors]) -> dict[str, NDArray[Any]]:
    """The plain mean of the memes of one round.

    Args:
        layout: the shared part of the global model: a whole layout, or a `trunk`.
        old: its weights before the round, kept if there is no meme.
        memes: the shared parameters of each device that reported, float32, in a fixed order of the devices.

    Returns:
        The new weights, float32, in layout order.

    Raises:
        PlanError: a meme lacks a parameter or has another shape.
    """
    plan = compile_plan(layout, make_plan(layout, layout.tier(1.0)))
    state = start(layout)
    for meme in memes:
        fold(state, "meme", plan, meme)
    return finish(state, old)
