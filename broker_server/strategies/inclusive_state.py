"""The state of InclusiveFL between rounds, and its form beside a stored global version.

`broker_server.strategies.inclusivefl` has the mathematics and the reference.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from broker_server.strategies import server_optimizer
from broker_server.strategies.ladder import Ladder, Stack, stack_of
from broker_server.strategies.server_optimizer import OptimizerState
from fleet_protocol.errors import PlanError
from models.layout import Layout

Array = NDArray[Any]
Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class InclusiveState:
    """The state that the server carries from round to round.

    Attributes:
        models: the weights w^j of each group j.
        optimizers: the state of each group's optimizer.
        momenta: by group, the distilled momentum m^j taken from it, one tensor for each parameter
            of a layer; the shallowest group leaves none.
    """

    ladder: Ladder
    stack: Stack
    models: Mapping[str, Tensors]
    optimizers: Mapping[str, OptimizerState]
    momenta: Mapping[str, tuple[Array, ...]]

    def with_values_of(self, old: "InclusiveState", names: Collection[str]) -> "InclusiveState":
        """Return the state in which all groups have the values of an old one for some parameters.

        A shallow group's top layer moves by the momentum of deeper layers, even where devices sent
        nothing.
        """
        models: dict[str, Tensors] = {}
        for group, model in self.models.items():
            before = old.models[group]
            kept = {name: before[name] for name in names if name in before}
            models[group] = MappingProxyType({**model, **kept})
        return replace(self, models=MappingProxyType(models))


def state_tensors(state: InclusiveState) -> dict[str, Array]:
    """Return the state as one flat mapping of arrays, as it is stored beside a global version."""
    tensors: dict[str, Array] = {}
    for group, model in state.models.items():
        for name, value in model.items():
            # Group first, so that reading finds the tensors of a group by the beginning of a name.
            tensors[f"{group}/model/{name}"] = value
        for name, value in server_optimizer.state_tensors(state.optimizers[group]).items():
            tensors[f"{group}/{name}"] = value
        for position, value in enumerate(state.momenta.get(group, ())):
            tensors[f"{group}/momentum/{position}"] = value
    return tensors


def state_from_tensors(
    layout: Layout,
    depths: Mapping[str, int],
    tensors: Tensors,
) -> InclusiveState:
    """Read back the state that `state_tensors` wrote.

    Args:
        layout: the deepest model.
        depths: number of layers, by group.
        tensors: the stored arrays.

    Raises:
        PlanError: a tensor of a group is missing.
    """
    ladder = Ladder.from_depths(depths)
    stack = stack_of(layout)
    by_group: dict[str, dict[str, Array]] = {group: {} for group in ladder.groups}
    for key, value in tensors.items():
        group, _, name = key.partition("/")
        if group in by_group:
            by_group[group][name] = value
    models: dict[str, Tensors] = {}
    optimizers: dict[str, OptimizerState] = {}
    momenta: dict[str, tuple[Array, ...]] = {}
    for group, stored in by_group.items():
        models[group] = _stored_model(group, stack.names(ladder.depths[group]), stored)
        optimizers[group] = server_optimizer.state_from_tensors(stored)
        # Momentum goes from a deep group to a shallower one, so the shallowest has none.
        if group != ladder.groups[0]:
            positions = range(len(stack.layers[0]))
            momenta[group] = tuple(stored[f"momentum/{position}"] for position in positions)
    return InclusiveState(
        ladder,
        stack,
        MappingProxyType(models),
        MappingProxyType(optimizers),
        MappingProxyType(momenta),
    )


def _stored_model(
    group: str,
    names: Sequence[str],
    stored: Tensors,
) -> Tensors:
    model: dict[str, Array] = {}
    for name in names:
        value = stored.get(f"model/{name}")
        if value is None:
            raise PlanError(
                f"inclusivefl: the stored state of group {group} lacks {name}; start the run "
                "again from the beginning"
            )
        model[name] = value
    return MappingProxyType(model)
