"""Moves the blocks that a tier trains over its depth, from round to round (specification 7.5).

A tier with a trained share trains its top blocks. With ``rolling`` its window moves down by one
block in each round, and starts again at the top; with ``random`` each device draws a place in each
round. FedEL moves a window over depth too, so that slow devices train all of a network in turn: Bo
Chen, Jie Xu, Jieming Bian, Lei Wang, Letian Zhang: "FedEL: Federated Elastic Learning for
Heterogeneous Devices", NeurIPS 2025, https://arxiv.org/abs/2509.16902.

Each place is a separate tier with its graphs, so that only the plan knows of the window: the server
offers the device that tier, and checks and merges its update as such.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.strategy import PlannedTier, PlanRequest, Strategy
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from models.layout import Layout
from models.shares import tiers_of_window
from models.tier import Tier

WindowPlan = Literal["top", "rolling", "random"]


def _rolling(request: PlanRequest, places: int) -> int:
    return request.version % places


def _random(request: PlanRequest, places: int) -> int:
    # The device's own draw, which a server that restarts repeats.
    words = f"window/{request.seed}/{request.device}/{request.version}".encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "big") % places


# The place of a request among some places; a share at the top does not move.
_PLACES: Mapping[WindowPlan, Callable[[PlanRequest, int], int]] = MappingProxyType(
    {"rolling": _rolling, "random": _random}
)


# A place is a tier, which trains other entries than the one of the round before.
STAGES = stated(
    Stage(
        name='strategy.window = "rolling"',
        remedy='set strategy.window = "top"',
        setting="strategy.window",
        wanted=lambda run: run.strategy.window == "rolling",
        breaks=frozenset({Trait.FIXED_PLANS}),
    ),
    Stage(
        name='strategy.window = "random"',
        remedy='set strategy.window = "top"',
        setting="strategy.window",
        wanted=lambda run: run.strategy.window == "random",
        breaks=frozenset({Trait.FIXED_PLANS, Trait.SHARED_PLANS}),
    ),
)


def move_windows(
    strategy: Strategy, layout: Layout, kind: WindowPlan, exported: Sequence[Tier]
) -> Strategy:
    """Return a strategy whose plans choose the place of each tier's trained blocks.

    Args:
        strategy: the strategy.
        layout: layout of the global model.
        kind: how a window moves.
        exported: every exported tier.

    Raises:
        PlanError: no tier in use has a window, or a place is not exported.
    """
    choose_place = _PLACES.get(kind)
    if choose_place is None:
        return strategy
    windows: dict[Tier, tuple[Tier, ...]] = {}
    for tier in strategy.tiers:
        places = tiers_of_window(layout, tier)
        if tier.is_assignable and len(places) > 1:
            windows[tier] = places
    _require_exported(kind, windows, exported)

    def plan(request: PlanRequest) -> PlannedTier:
        # A task of an earlier moment names the place that was chosen for it.
        places = windows.get(request.tier, (request.tier,))
        tier = places[choose_place(request, len(places))]
        return strategy.plan(replace(request, tier=tier))

    return replace(
        strategy,
        plan=plan,
        places=lambda tier: windows.get(tier, (tier,)),
    )


def _require_exported(
    kind: WindowPlan, windows: Mapping[Tier, Sequence[Tier]], exported: Sequence[Tier]
) -> None:
    if not windows:
        raise PlanError(
            f"strategy.window = {kind!r} has nothing to move: no tier in use trains a share of"
            ' its blocks; export one with --trained, or set strategy.window = "top"'
        )
    for places in windows.values():
        for tier in places:
            if tier not in exported:
                raise PlanError(
                    f"strategy.window = {kind!r} needs tier {tier.id}, which is not exported; add"
                    " --windows to `shoal export`"
                )
