"""The ladder of depths: which layers InclusiveFL's groups share, and which they keep separate.

Liu et al., KDD 2022 (see `broker_server.strategies.inclusivefl`); specification 3.1 and 3.3. Layers
are numbered from 1, and groups are ordered from the shallowest to the deepest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fleet_protocol.errors import PlanError
from models.block_names import HEAD, STEM, block_name
from models.layout import Layout


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
        """Order groups by their numbers of layers.

        Raises:
            PlanError: two groups have one depth, a depth is less than 1, or there is no group.
        """
        has_duplicates = len(set(depths.values())) < len(depths)
        if not depths or min(depths.values()) < 1 or has_duplicates:
            raise PlanError(
                f"groups need different positive depths, not {dict(depths)}; join groups of one"
                " depth"
            )
        ordered = dict(sorted(depths.items(), key=lambda entry: entry[1]))
        return cls(tuple(ordered), MappingProxyType(ordered))

    @property
    def deepest(self) -> int:
        """Layers of the deepest group."""
        return self.depths[self.groups[-1]]

    def top(self, group: str) -> int:
        """Return the number of a group's isolated layer, its last."""
        return self.depths[group]

    def deeper(self, group: str) -> str | None:
        """Return the next deeper group, whose momentum this one gets; None for the deepest."""
        after = self.groups[self.groups.index(group) + 1 :]
        return after[0] if after else None

    def shallower(self, group: str) -> str | None:
        """Return the next shallower group, which gets this one's momentum, if there is one."""
        before = self.groups[: self.groups.index(group)]
        return before[-1] if before else None

    def momentum_layers(self, group: str) -> range:
        """Return the layers of a group's momentum.

        They go from the shallower group's top to the group's own, both included. The shallowest
        group has no momentum, and an empty range.
        """
        below = self.shallower(group)
        if below is None:
            return range(0)
        # The shallower group's top layer is included, since it is the one that stands in for all of
        # these.
        return range(self.depths[below], self.depths[group] + 1)

    def owners(self, layer: int) -> tuple[str, ...]:
        """Return the groups whose models have a layer as a shared one.

        Only the deepest group owns its top layer: no other group has it.

        Args:
            layer: its number; 0 for the embeddings.
        """
        owners = tuple(group for group in self.groups if layer < self.depths[group])
        if not owners and layer == self.deepest:
            return (self.groups[-1],)
        return owners

    def shares(
        self,
        layer: int,
        counts: Mapping[str, int],
    ) -> dict[str, float] | None:
        """Return the share of each owner in the average of a layer.

        Args:
            layer: its number; 0 for the embeddings.
            counts: how many devices of each group took part.

        Returns:
            By owner, shares that add up to 1; None if no owner had devices, and then the layer
            keeps its values.
        """
        shares: dict[str, float] = {}
        total = 0
        for group in self.owners(layer):
            count = counts.get(group, 0)
            shares[group] = count
            total += count
        # Dividing by nothing would make the layer not a number; it keeps its values instead.
        if not total:
            return None
        for group in shares:
            shares[group] /= total
        return shares


@dataclass(frozen=True)
class Stack:
    """The names of a model's parameters, layer by layer.

    Attributes:
        stem: those below layer 1 (the embeddings).
        layers: those of each layer; the same position means the same role in every layer.
        head: those above the layers.
        order: all names, in registration order.
    """

    stem: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    order: tuple[str, ...]

    def layer(self, number: int) -> tuple[str, ...]:
        """Return the names of a layer; 0 is the stem."""
        return self.layers[number - 1] if number else self.stem

    def names(self, depth: int) -> tuple[str, ...]:
        """Return the names in the model of a depth, in registration order."""
        kept = {*self.stem, *self.head}
        for layer in self.layers[:depth]:
            kept.update(layer)
        return tuple(name for name in self.order if name in kept)


def stack_of(layout: Layout) -> Stack:
    """List the parameters of a model layer by layer.

    Raises:
        PlanError: the model has no depth unit, or its layers are not alike, so that one cannot
            represent another.
    """
    blocks: dict[str, list[str]] = {}
    for parameter in layout.parameters:
        blocks.setdefault(parameter.block, []).append(parameter.name)
    layers = []
    for number in range(1, layout.depth + 1):
        names = blocks.get(block_name(number), [])
        layers.append(tuple(names))
    if not layers[0]:
        raise PlanError(
            f"{layout.arch} has no stack of layers: its builder does not use cut.depth. "
            "InclusiveFL needs a model cut by depth, such as text_encoder"
        )
    shapes = {parameter.name: parameter.shape for parameter in layout.parameters}
    _check_alike(layout.arch, layers, shapes)
    return Stack(
        stem=tuple(blocks.get(STEM, ())),
        layers=tuple(layers),
        head=tuple(blocks.get(HEAD, ())),
        order=tuple(shapes),
    )


def _check_alike(
    arch: str,
    layers: Sequence[tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Refuse layers whose parameters differ in shape from those of layer 1."""
    first = None
    for number, names in enumerate(layers, 1):
        layer_shapes = [shapes[name] for name in names]
        if first is None:
            first = layer_shapes
        # Compared by position: the same position has the same role in every layer, which is how
        # momenta are matched.
        if layer_shapes != first:
            raise PlanError(
                f"{arch}: layer {number} is not shaped like layer 1, so it cannot teach it"
            )
