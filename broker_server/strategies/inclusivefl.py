"""InclusiveFL: models of several depths share their lower layers, and deeper models teach the tops
of shallower ones.

Ruixuan Liu, Fangzhao Wu, Chuhan Wu, Yanlin Wang, Lingjuan Lyu, Hong Chen, Xing Xie: "No One Left
Behind: Inclusive Federated Learning over Heterogeneous Devices", KDD 2022,
https://arxiv.org/abs/2202.08036, algorithm 1. Specification section 3, whose layer numbers (from 1)
are used here.

Every group of devices trains the model of its depth. A round is, for each group that took part:

1. the mean update g of its devices, unweighted;
2. momentum distillation: the update of the group's top layer becomes ``beta * m + (1 - beta) * g``,
   with m the momentum
   that the next deeper group left in the round before;
3. a step of the group's own server optimizer (FedAdam);
4. its own new momentum: the mean of its distilled updates over the layers that stand above the next
   shallower model,
   that model's top layer included.

Then every layer is averaged over the groups that own it as a shared layer, weighted by how many of
their devices took part, and written back to all of these groups. The top layer and the head of
every group stay its own. A group without devices this round keeps its momentum and its optimizer's
state, weighs nothing, and still receives shared layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies import server_optimizer
from broker_server.strategies.ladder import Ladder, Stack, stack_of
from broker_server.strategies.server_optimizer import OptimizerSettings, OptimizerState
from fleet_protocol.errors import PlanError
from models.layout import Layout

Array = NDArray[Any]
Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class InclusiveSettings:
    """What the method leaves open.

    Attributes:
        beta: share of the momentum in a distilled update; 0 switches distillation off. The paper
            takes 0.2 for GLUE and 0.5 for NER, and finds values above 0.8 harmful.
        optimizer: of every group.
        sharing: average layers over the groups; off is the paper's "distillation only".
    """

    beta: float = 0.2
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(name="fedadam"))
    sharing: bool = True


@dataclass(frozen=True)
class Baseline:
    """A method the paper compares with, in terms of this one."""

    takes_part: str = "all"  # ``all`` devices, or only those of the ``largest`` group
    depth: str = (
        "own"  # the depth everybody trains: its ``own``, the ``largest`` or the ``smallest``
    )
    distilling: bool = True  # whether beta counts; otherwise it is 0
    sharing: bool = True  # whether layers are averaged over the groups
    alone: bool = False  # no update leaves its device: each one is a group of its own

    def settings(self, settings: InclusiveSettings) -> InclusiveSettings:
        """The settings with what this baseline lacks switched off."""
        return replace(
            settings,
            beta=settings.beta if self.distilling else 0.0,
            sharing=settings.sharing and self.sharing,
        )


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
class InclusiveState:
    """What the server carries from round to round."""

    ladder: Ladder
    stack: Stack
    models: Mapping[str, Tensors]  # by group, its weights w^j
    optimizers: Mapping[str, OptimizerState]  # by group, its optimizer's state
    # by group, the distilled momentum m^j taken from it, one tensor for each parameter of a layer;
    # the shallowest group leaves none
    momenta: Mapping[str, tuple[Array, ...]]


@dataclass(frozen=True)
class InclusiveRound:
    """For diagnosis, by group that took part: its update after distillation, and its weights before
    sharing.
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
    """The state before the first round: every group starts from the bottom of the same pre-trained
    model.

    Args:
        layout: the deepest model.
        depths: by group, its number of layers.
        weights: the deepest model's weights.
        settings: see `InclusiveSettings`.
        heads: by group, its own head; groups not named take the head of `weights`. Heads may differ
            in shape, as groups may have labels of their own.

    Raises:
        PlanError: the model cannot be layered so: it has no such depth, or its layers are not
            alike.
    """
    ladder = Ladder.from_depths(depths)
    stack = stack_of(layout)
    if ladder.deepest > len(stack.layers):
        raise PlanError(
            f"inclusivefl: {layout.arch} has {len(stack.layers)} layers, not {ladder.deepest}"
        )
    models: dict[str, Tensors] = {}
    for group in ladder.groups:
        own = (heads or {}).get(group, {})
        names = stack.names(ladder.depths[group])
        models[group] = MappingProxyType(
            {name: np.array(own.get(name, weights[name])) for name in names}
        )
    blank = tuple(np.zeros_like(weights[name]) for name in stack.layers[0])
    return InclusiveState(
        ladder=ladder,
        stack=stack,
        models=MappingProxyType(models),
        optimizers=MappingProxyType(
            {j: server_optimizer.init(settings.optimizer, models[j]) for j in models}
        ),
        momenta=MappingProxyType(dict.fromkeys(ladder.groups[1:], blank)),
    )


def apply(
    state: InclusiveState,
    updates: Mapping[str, Tensors],
    counts: Mapping[str, int],
    settings: InclusiveSettings,
) -> tuple[InclusiveState, InclusiveRound]:
    """One round of the server: the state after it, and what happened on the way.

    By group that took part there is the unweighted mean over its devices of local minus global
    weights, and how many devices these are; a group that is not named counts 0.

    Raises:
        PlanError: an update is missing for a group with devices, or lacks a tensor.
    """
    ladder = state.ladder
    present = [group for group in ladder.groups if counts.get(group, 0) > 0]
    strangers = set(counts) - set(ladder.groups)
    if strangers:
        raise PlanError(
            f"inclusivefl: there is no group {min(strangers)}; there are {', '.join(ladder.groups)}"
        )
    distilled: dict[str, Tensors] = {}
    models = dict(state.models)
    optimizers = dict(state.optimizers)
    momenta = dict(state.momenta)
    for group in present:
        _check(state, group, updates)
        deeper = ladder.deeper(group)
        # m_{t-1}: what the deeper group left in the round before, not in this one.
        distilled[group] = distil(
            state,
            group,
            updates[group],
            state.momenta[deeper] if deeper else None,
            settings.beta,
        )
        models[group], optimizers[group] = server_optimizer.apply(
            settings.optimizer,
            state.optimizers[group],
            state.models[group],
            distilled[group],
        )
        if group in momenta:
            momenta[group] = _momentum(state, group, distilled[group])
    stepped = {group: models[group] for group in present}
    if settings.sharing:
        models = _share(state, models, counts)
    new = replace(
        state,
        models=MappingProxyType(
            {group: MappingProxyType(dict(model)) for group, model in models.items()}
        ),
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
    """Push the top layer of a group towards what the layers it stands in for do in the next deeper
    model.

    It becomes ``beta * m + (1 - beta) * g``, with the momentum of the next deeper group, one tensor
    for each parameter of a layer; the deepest has none. In the first round, when m is 0, this
    shrinks the top layer's update.
    """
    changed = {name: update[name] for name in state.models[group]}
    if momentum is not None:
        for name, taught in zip(state.stack.layer(state.ladder.top(group)), momentum, strict=True):
            changed[name] = beta * taught + (1 - beta) * update[name]
    return changed


def _momentum(state: InclusiveState, group: str, distilled: Tensors) -> tuple[Array, ...]:
    """The mean of the distilled updates over the layers that a shallower model's top layer stands
    in for.
    """
    layers = [state.stack.layer(number) for number in state.ladder.momentum_layers(group)]
    means = []
    for names in zip(*layers, strict=True):
        total = np.array(distilled[names[0]])
        for name in names[1:]:
            np.add(total, distilled[name], out=total)
        means.append(total / len(names))
    return tuple(means)


def _share(
    state: InclusiveState, models: Mapping[str, Tensors], counts: Mapping[str, int]
) -> dict[str, Tensors]:
    """Average every layer over the groups that own it as a shared one, and write it back to all of
    these.
    """
    shared: dict[str, dict[str, Array]] = {group: dict(model) for group, model in models.items()}
    # Layer 0 stands for what lies below layer 1: the embeddings, which every group shares.
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
    return {group: MappingProxyType(model) for group, model in shared.items()}


def _check(state: InclusiveState, group: str, updates: Mapping[str, Tensors]) -> None:
    if group not in updates:
        raise PlanError(f"inclusivefl: group {group} has devices in this round but no update")
    for name, value in state.models[group].items():
        given = updates[group].get(name)
        if given is None or given.shape != value.shape:
            found = "missing" if given is None else f"of shape {given.shape}"
            raise PlanError(
                f"inclusivefl: tensor {name} of group {group}'s update is {found}, expected {value.shape}"
            )


def state_tensors(state: InclusiveState) -> dict[str, Array]:
    """The state as one flat mapping of arrays, as it is stored beside a global version."""
    flat: dict[str, Array] = {}
    for group, model in state.models.items():
        flat |= {f"{group}/model/{name}": value for name, value in model.items()}
        for name, value in server_optimizer.state_tensors(state.optimizers[group]).items():
            flat[f"{group}/{name}"] = value
        for position, value in enumerate(state.momenta.get(group, ())):
            flat[f"{group}/momentum/{position}"] = value
    return flat


def state_from_tensors(
    layout: Layout, depths: Mapping[str, int], tensors: Tensors
) -> InclusiveState:
    """Read back what `state_tensors` made of a state of such groups, given the deepest model.

    Else a PlanError.
    """
    ladder = Ladder.from_depths(depths)
    stack = stack_of(layout)
    parts: dict[str, dict[str, Array]] = {group: {} for group in ladder.groups}
    for key, value in tensors.items():
        group, _, name = key.partition("/")
        if group in parts:
            parts[group][name] = value
    models: dict[str, Tensors] = {}
    for group, part in parts.items():
        names = stack.names(ladder.depths[group])
        missing = [name for name in names if f"model/{name}" not in part]
        if missing:
            raise PlanError(
                f"inclusivefl: the stored state of group {group} lacks {missing[0]}; start the run afresh"
            )
        models[group] = MappingProxyType({name: part[f"model/{name}"] for name in names})
    return InclusiveState(
        ladder,
        stack,
        MappingProxyType(models),
        MappingProxyType(
            {group: server_optimizer.state_from_tensors(part) for group, part in parts.items()}
        ),
        MappingProxyType(
            {
                group: tuple(
                    parts[group][f"momentum/{position}"] for position in range(len(stack.layers[0]))
                )
                for group in ladder.groups[1:]
            }
        ),
    )
