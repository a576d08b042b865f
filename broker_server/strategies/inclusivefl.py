"""InclusiveFL: models of several depths share their lower layers.

Deeper models teach the top layers of shallower ones.

Ruixuan Liu, Fangzhao Wu, Chuhan Wu, Yanlin Wang, Lingjuan Lyu, Hong Chen, Xing Xie: "No One Left
Behind: Inclusive Federated Learning over Heterogeneous Devices", KDD 2022,
https://arxiv.org/abs/2202.08036, algorithm 1. Specification section 3, whose layer numbers (from 1)
are used here.

Every group of devices trains the model of its depth. A round is, for each group that took part:

1. the mean update g of its devices, unweighted;
2. momentum distillation: the update of the group's top layer becomes ``beta * m + (1 - beta) * g``,
  with m the momentum that the next deeper group left in the previous round;
3. a step of the group's own server optimizer (FedAdam);
4. its own new momentum: the mean of its distilled updates over the layers above the next shallower
  model, including that model's top layer.

Then every layer is averaged over the groups that own it as a shared layer, weighted by how many of
their devices took part, and written back to all of these groups. The top layer and the head of
every group stay separate. A group without devices this round keeps its momentum and its optimizer's
state, weighs nothing, and still receives shared layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from broker_server.strategies import server_optimizer
from broker_server.strategies.inclusive_state import Array, InclusiveState, Tensors
from broker_server.strategies.ladder import Ladder, stack_of
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.server_optimizer import OptimizerState
from fleet_protocol.errors import PlanError
from models.layout import Layout


@dataclass(frozen=True)
class InclusiveSettings:
    """The settings of the method.

    Attributes:
        beta: share of the momentum in a distilled update; 0 switches distillation off. The paper
            takes 0.2 for GLUE and 0.5 for NER, and finds values above 0.8 harmful.
        optimizer: the server optimizer of every group.
        sharing: average layers over the groups; off is the paper's "distillation only".
    """

    beta: float = 0.2
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(name="fedadam"))
    sharing: bool = True


@dataclass(frozen=True)
class Baseline:
    """A baseline of the paper, in terms of this method.

    Attributes:
        takes_part: ``all`` devices, or only those of the ``largest`` group.
        depth: the depth all devices train: their ``own``, the ``largest`` or the ``smallest``.
        distilling: whether beta applies; otherwise it is 0.
        sharing: whether layers are averaged over the groups.
        alone: no update leaves its device: each device is a separate group.
    """

    takes_part: str = "all"
    depth: str = "own"
    distilling: bool = True
    sharing: bool = True
    alone: bool = False

    def settings(self, settings: InclusiveSettings) -> InclusiveSettings:
        """Return the settings without the parts that this baseline lacks."""
        beta = settings.beta if self.distilling else 0.0
        return replace(settings, beta=beta, sharing=settings.sharing and self.sharing)


BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        "inclusive": Baseline(),
        "without_distillation": Baseline(distilling=False),
        "distillation_only": Baseline(sharing=False),
        "all_large": Baseline(depth="largest", distilling=False),
        "all_small": Baseline(depth="smallest", distilling=False),
        "exclusive": Baseline(takes_part="largest", distilling=False),
        "local": Baseline(distilling=False, sharing=False, alone=True),
    }
)
"""Specification 3.7.

The HeteroFL baseline is the strategy of that name with widths instead of depths.
"""


@dataclass(frozen=True)
class InclusiveRound:
    """The steps of one round by group that took part, for diagnosis.

    Attributes:
        distilled: the group's update after distillation.
        stepped: the group's weights before sharing.
    """

    distilled: Mapping[str, Tensors]
    stepped: Mapping[str, Tensors]


def init(
    layout: Layout,
    depths: Mapping[str, int],
    weights: Tensors,
    settings: InclusiveSettings,
    heads: Mapping[str, Tensors] | None = None,
) -> InclusiveState:
    """Return the state before the first round.

    Every group starts from the bottom of the same pre-trained model.

    Args:
        layout: the deepest model.
        depths: number of layers, by group.
        weights: the deepest model's weights.
        settings: see `InclusiveSettings`.
        heads: the separate head of each group; groups that are not named take the head of
            `weights`. Heads may differ in shape, because groups may have different labels.

    Raises:
        PlanError: the model lacks such a depth, or its layers are not alike.
    """
    ladder = Ladder.from_depths(depths)
    stack = stack_of(layout)
    if ladder.deepest > len(stack.layers):
        raise PlanError(
            f"inclusivefl: {layout.arch} has {len(stack.layers)} layers, not {ladder.deepest}"
        )
    models: dict[str, Tensors] = {}
    optimizers: dict[str, OptimizerState] = {}
    for group in ladder.groups:
        sources = {**weights, **(heads or {}).get(group, {})}
        names = stack.names(ladder.depths[group])
        models[group] = MappingProxyType({name: np.array(sources[name]) for name in names})
        optimizers[group] = server_optimizer.init(settings.optimizer, models[group])
    zeros = tuple(np.zeros_like(weights[name]) for name in stack.layers[0])
    return InclusiveState(
        ladder=ladder,
        stack=stack,
        models=MappingProxyType(models),
        optimizers=MappingProxyType(optimizers),
        momenta=MappingProxyType(dict.fromkeys(ladder.groups[1:], zeros)),
    )


def apply(
    state: InclusiveState,
    updates: Mapping[str, Tensors],
    counts: Mapping[str, int],
    settings: InclusiveSettings,
) -> tuple[InclusiveState, InclusiveRound]:
    """Run one round of the server.

    Args:
        state: the state before the round.
        updates: by group that took part, the unweighted mean over its devices of local minus
            global weights.
        counts: number of devices that took part, by group; a group that is not named counts 0.
        settings: see `InclusiveSettings`.

    Returns:
        The state after the round, and the intermediate steps.

    Raises:
        PlanError: an update is missing for a group with devices, or lacks a tensor.
    """
    ladder = state.ladder
    unknown = set(counts) - set(ladder.groups)
    if unknown:
        raise PlanError(
            f"inclusivefl: group {min(unknown)} does not exist; the groups are "
            f"{', '.join(ladder.groups)}"
        )
    distilled: dict[str, Tensors] = {}
    stepped: dict[str, Tensors] = {}
    optimizers = dict(state.optimizers)
    momenta = dict(state.momenta)
    for group in ladder.groups:
        if counts.get(group, 0) <= 0:
            continue  # a group without devices keeps its momentum and its optimizer's state
        _check_update(state, group, updates)
        deeper = ladder.deeper(group)
        # m_{t-1}: from the previous state, because a deeper group's momentum of this round is m_t.
        momentum = state.momenta[deeper] if deeper else None
        distilled[group] = distil(
            state,
            group,
            updates[group],
            momentum,
            settings.beta,
        )
        stepped[group], optimizers[group] = server_optimizer.apply(
            settings.optimizer,
            state.optimizers[group],
            state.models[group],
            distilled[group],
        )
        if group in momenta:
            momenta[group] = _momentum(state, group, distilled[group])
    models: Mapping[str, Tensors] = {**state.models, **stepped}
    # After the steps of all groups: the average is of stepped weights, not of updates.
    if settings.sharing:
        models = _share(state, models, counts)
    frozen = {group: MappingProxyType(dict(model)) for group, model in models.items()}
    new = replace(
        state,
        models=MappingProxyType(frozen),
        optimizers=MappingProxyType(optimizers),
        momenta=MappingProxyType(momenta),
    )
    return new, InclusiveRound(MappingProxyType(distilled), MappingProxyType(stepped))


def distil(
    state: InclusiveState,
    group: str,
    update: Tensors,
    momentum: tuple[Array, ...] | None,
    beta: float,
) -> dict[str, Array]:
    """Move the top layer of a group towards the deeper layers that it represents.

    Its update becomes ``beta * m + (1 - beta) * g``. In the first round, when m is 0, this shrinks
    the top layer's update.

    Args:
        state: the state before the round.
        group: the group.
        update: its mean update g.
        momentum: m of the next deeper group, one tensor for each parameter of a layer; None for
            the deepest group, whose update stays as it is.
        beta: see `InclusiveSettings`.
    """
    distilled = {name: update[name] for name in state.models[group]}
    if momentum is not None:
        top_layer = state.stack.layer(state.ladder.top(group))
        for name, m in zip(top_layer, momentum, strict=True):
            distilled[name] = beta * m + (1 - beta) * update[name]
    return distilled


def _momentum(
    state: InclusiveState,
    group: str,
    distilled: Tensors,
) -> tuple[Array, ...]:
    """Return the mean of the distilled updates over the layers of a group's momentum.

    A shallower model's top layer represents these layers.
    """
    layers = [state.stack.layer(number) for number in state.ladder.momentum_layers(group)]
    means = []
    # `names` are the parameters of one role, one for each layer.
    for names in zip(*layers, strict=True):
        total = np.array(distilled[names[0]])
        for name in names[1:]:
            np.add(total, distilled[name], out=total)
        means.append(total / len(names))
    return tuple(means)


def _share(
    state: InclusiveState,
    models: Mapping[str, Tensors],
    counts: Mapping[str, int],
) -> Mapping[str, Tensors]:
    """Average every layer over the groups that own it as a shared one, and write it back to all."""
    shared: dict[str, dict[str, Array]] = {group: dict(model) for group, model in models.items()}
    # Layer 0 stands for the parameters below layer 1: the embeddings, which every group shares.
    for number in range(state.ladder.deepest + 1):
        owners = state.ladder.owners(number)
        shares = state.ladder.shares(number, counts)
        if shares is None or len(owners) < 2:
            continue
        for name in state.stack.layer(number):
            total = np.zeros_like(models[owners[0]][name])
            for group, share in shares.items():
                if share:
                    np.add(total, models[group][name] * total.dtype.type(share), out=total)
            for group in owners:
                shared[group][name] = total
    return shared


def _check_update(
    state: InclusiveState,
    group: str,
    updates: Mapping[str, Tensors],
) -> None:
    if group not in updates:
        raise PlanError(f"inclusivefl: group {group} has devices in this round but no update")
    for name, value in state.models[group].items():
        update = updates[group].get(name)
        if update is None or update.shape != value.shape:
            actual = "missing" if update is None else f"of shape {update.shape}"
            raise PlanError(
                f"inclusivefl: tensor {name} of group {group}'s update is {actual}, expected"
                f" {value.shape}"
            )
