"""The ladder of depths: which layers the groups of InclusiveFL share, distil from and keep to
themselves.

Liu et al., KDD 2022 (see `broker_server.strategies.inclusivefl`); specification 3.1 and 3.3. Layers
are numbered from 1, and groups are ordered from the shallowest to the deepest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fleet_protocol.errors import PlanError
from models.layout import HEAD, STEM, Layout, block_name


@dataclass(frozen=True)
class Ladder:
    """Groups of devices by the depth they train, a number of layers, shallowest first.

    Example:
        >>> ladder = Ladder.from_depths({"weak": 4, "medium": 8, "strong": 12})
        >>> ladder.owners(4), list(ladder.momentum_layers("medium"))
        (('medium', 'strong'), [4, 5, 6, 7, 8])
    """

    groups: tuple[str, ...]
    depths: Mapping[str, int]

    @classmethod
    def from_depths(cls, depths: Mapping[str, int]) -> "Ladder":
        """Order the groups by their numbers of layers, at least 1 and all different, or else raise
        a PlanError.
        """
        if not depths or min(depths.values()) < 1 or len(set(depths.values())) < len(depths):
            raise PlanError(
                f"groups need different positive depths, not {dict(depths)}; join groups of one depth"
            )
        groups = tuple(sorted(depths, key=lambda group: depths[group]))
        return cls(groups, MappingProxyType({group: depths[group] for group in groups}))

    @property
    def deepest(self) -> int:
        """Layers of the deepest group."""
        return self.depths[self.groups[-1]]

    def top(self, group: str) -> int:
        """The number of a group's isolated layer, its last."""
        return self.depths[group]

    def deeper(self, group: str) -> str | None:
        """The next deeper group, whose momentum this one receives; None for the deepest."""
        after = self.groups[self.groups.index(group) + 1 :]
        return after[0] if after else None

    def shallower(self, group: str) -> str | None:
        """The next shallower group, which this one's momentum is for; None for the shallowest."""
        before = self.groups[: self.groups.index(group)]
        return before[-1] if before else None

    def momentum_layers(self, group: str) -> range:
        """Layers of a group's momentum: from the shallower group's top to its own, both included.

        None without one.
        """
        below = self.shallower(group)
        return range(self.depths[below], self.depths[group] + 1) if below else range(0)

    def owners(self, layer: int) -> tuple[str, ...]:
        """The groups whose models have a layer, by number and 0 for the embeddings, as a shared
        one.

        The deepest group owns its top layer too, alone: nobody else has it.
        """
        last = self.groups[-1]
        return tuple(
            group
            for group in self.groups
            if layer < self.depths[group] or (group == last and layer <= self.deepest)
        )

    def shares(self, layer: int, counts: Mapping[str, int]) -> dict[str, float] | None:
        """How much each owner of a layer counts in its average, given how many devices of each
        group took part.

        Returns:
            By owner, shares that add up to 1; None if no owner had devices, and then the layer
            keeps its values.
        """
        owners = self.owners(layer)
        total = sum(counts.get(group, 0) for group in owners)
        return {group: counts.get(group, 0) / total for group in owners} if total else None


@dataclass(frozen=True)
class Stack:
    """The parameters of a model, layer by layer."""

    stem: tuple[str, ...]  # names of those below layer 1 (the embeddings)
    # for each layer, its names; the same position means the same role in every layer
    layers: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]  # names of those above
    order: tuple[str, ...]  # all names, in registration order

    def layer(self, number: int) -> tuple[str, ...]:
        """Names of a layer; 0 is the stem."""
        return self.layers[number - 1] if number else self.stem

    def names(self, depth: int) -> tuple[str, ...]:
        """Names in the model of a depth, in registration order."""
        kept = {
            *self.stem,
            *self.head,
            *(name for layer in self.layers[:depth] for name in layer),
        }
        return tuple(name for name in self.order if name in kept)


def stack_of(layout: Layout) -> Stack:
    """List the parameters of a model layer by layer.

    Raises:
        PlanError: the model has no depth unit, or its layers are not alike, so that one cannot
            stand in for another.
    """
    blocks: dict[str, list[str]] = {}
    shapes = {item.name: item.shape for item in layout.parameters}
    for item in layout.parameters:
        blocks.setdefault(item.block, []).append(item.name)
    layers = tuple(
        tuple(blocks.get(block_name(number), ())) for number in range(1, layout.depth + 1)
    )
    if not layers[0]:
        raise PlanError(
            f"{layout.arch} has no layers to stack: its builder does not ask for cut.depth. InclusiveFL needs a model"
            " cut by depth, such as text_encoder"
        )
    for number, names in enumerate(layers, 1):
        if [shapes[name] for name in names] != [shapes[name] for name in layers[0]]:
            raise PlanError(
                f"{layout.arch}: layer {number} is not shaped like layer 1, so it cannot teach it"
            )
    return Stack(
        tuple(blocks.get(STEM, ())),
        layers,
        tuple(blocks.get(HEAD, ())),
        tuple(item.name for item in layout.parameters),
    )
