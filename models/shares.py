"""Trained shares: which parameters of a sub-model a tier trains, and which it only holds.

A share counts blocks from the top, where the loss is, because a gradient passes every block above
the one that it is for: training the top half of a model ends the backward pass in the middle, and
saves the activations, gradients and optimizer states below. The blocks below come with the global
version, which tiers with a larger share train.

A model with a depth counts the blocks of the tier; its stem is trained only by tiers that train
everything. A model without a depth has no such blocks, so its modules count instead: the members of
its lists and sequences (``blocks.3``, ``layer1.0``), and its other layers (``conv1``), in the order
in which they are registered.

The trained blocks may lie deeper, at another place: then the blocks above them are passed by the
gradient and not trained, so that a board keeps their activations. A plan that moves this window
over depth (`broker_server.strategies.trained_window`) lets small boards train all blocks in turn.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from fleet_protocol.errors import PlanError
from models.block_names import HEAD, STEM
from models.layout import Layout
from models.tier import HEAD_SHARE, WHOLE_SHARE, Tier


def counted_blocks(layout: Layout, tier: Tier) -> tuple[str, ...]:
    """Return the blocks that the share of a tier counts, from the bottom.

    They are ``block1``, ``block2`` ... of a model with a depth, and paths of modules of another.
    """
    blocks: dict[str, None] = {}  # a set in the order of the first parameters
    for block in _counted_by_parameter(layout, tier).values():
        if block is not None:
            blocks[block] = None
    return tuple(blocks)


def frozen_parameters(layout: Layout, tier: Tier) -> tuple[str, ...]:
    """Return the parameters that a tier holds and does not train, in registration order.

    They are outside its share; a tier that trains everything has none.

    Raises:
        PlanError: the model does not support the tier, or the share trains everything.
    """
    if tier.trained == WHOLE_SHARE:
        return ()
    blocks = counted_blocks(layout, tier)
    places = _count_places(blocks, tier)
    if tier.place >= places:
        raise PlanError(
            f"{layout.arch}: tier {tier.id} does not exist; its share has the places 0 to"
            f" {places - 1} among {len(blocks)} blocks"
        )
    frozen = _outside_share(layout, tier, blocks)
    if not frozen:
        raise PlanError(
            f"{layout.arch}: tier {tier.id} trains all of the {len(blocks)} blocks that a share"
            " counts; choose a smaller share, or share 1"
        )
    if len(frozen) == len(layout.kept(tier)):
        raise PlanError(
            f"{layout.arch}: tier {tier.id} trains nothing, because no parameter is outside the"
            f" {len(blocks)} blocks; exits belong to their blocks, so choose a share that trains a"
            f" block, such as {1 / len(blocks):.2f}"
        )
    return tuple(frozen)


def trains_everything(layout: Layout, tier: Tier) -> bool:
    """Return whether the share of a tier, which should be a part, is everything that it holds.

    So a tier with half of the blocks does not exist if it has one block, and no stem.
    """
    if tier.trained == WHOLE_SHARE:
        return False
    return not _outside_share(layout, tier, counted_blocks(layout, tier))


def tiers_of_window(layout: Layout, tier: Tier) -> tuple[Tier, ...]:
    """Return a tier at each place that its trained blocks may have, from the top down.

    A tier that trains everything, or only the head, has one place.

    Raises:
        PlanError: the model does not support the tier.
    """
    blocks = counted_blocks(layout, tier)
    places = _count_places(blocks, tier)
    return tuple(replace(tier, place=place) for place in range(places))


def trained_count(layout: Layout, tier: Tier) -> int:
    """Count the scalar parameters that a tier trains, which its updates contain.

    It raises the errors of `frozen_parameters`.
    """
    shapes = layout.shapes(tier)
    for name in frozen_parameters(layout, tier):
        del shapes[name]
    counts = [math.prod(shape) for shape in shapes.values()]
    return sum(counts)


def largest_first(layout: Layout, tiers: Sequence[Tier]) -> list[Tier]:
    """Order tiers by what they train, then by what they hold; the order depends only on the tiers.

    A board gets the first that fits it, so a tier that trains more comes before one that holds
    more: half of the width trains more than the head of the whole model.
    """

    def size(tier: Tier) -> tuple[int, int, str]:
        # The id last, so that equal sizes have an order that does not depend on the
        # configuration's.
        return (-trained_count(layout, tier), -layout.parameter_count(tier), tier.id)

    return sorted(tiers, key=size)


def _outside_share(layout: Layout, tier: Tier, blocks: Sequence[str]) -> list[str]:
    """Return the parameters that lie outside a tier's share, in registration order."""
    # A place counts from the top: at place 0 the window ends with the last block.
    end = len(blocks) - tier.place
    start = end - _count_trained(blocks, tier)
    trained = frozenset(blocks[start:end])
    counted = _counted_by_parameter(layout, tier)
    outside: list[str] = []
    for parameter in layout.kept(tier):
        # Every tier trains the head, without which no gradient would reach a block.
        if parameter.block != HEAD and counted[parameter.name] not in trained:
            outside.append(parameter.name)
    return outside


def _count_trained(blocks: Sequence[str], tier: Tier) -> int:
    """Count the blocks that make up a tier's share, at least one unless it trains only the head."""
    if tier.trained == HEAD_SHARE:
        return 0
    # Half a block counts as one, so that half of five blocks is three.
    rounded = math.floor(tier.trained * len(blocks) + 0.5)
    return max(1, rounded)


def _count_places(blocks: Sequence[str], tier: Tier) -> int:
    # No window to move: it is empty, or it is everything.
    if tier.trained in {HEAD_SHARE, WHOLE_SHARE}:
        return 1
    trained = _count_trained(blocks, tier)
    return max(1, len(blocks) - trained + 1)


def _counted_by_parameter(layout: Layout, tier: Tier) -> dict[str, str | None]:
    """Return for each parameter of a tier the block for which it counts.

    It is None for the head, and for what lies below all blocks.
    """
    has_depth = any(parameter.block not in {STEM, HEAD} for parameter in layout.parameters)
    counted: dict[str, str | None] = {}
    for parameter in layout.kept(tier):
        if parameter.block == HEAD:
            counted[parameter.name] = None
        elif has_depth:
            counted[parameter.name] = None if parameter.block == STEM else parameter.block
        else:
            counted[parameter.name] = _module_of(parameter.name)
    return counted


def _module_of(name: str) -> str:
    """Return the member of a list or sequence that has a parameter, or else its layer."""
    modules = name.split(".")
    for position, module in enumerate(modules):
        if module.isdecimal():
            return ".".join(modules[: position + 1])
    # A layer that is in no list counts by itself, with its weight and its bias.
    return ".".join(modules[:-1]) or name
