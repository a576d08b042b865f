"""Runs every screen when a round closes: each update counts as it is, bounded, or not at all.

`broker_server.stages.bounds` and `broker_server.stages.krum` compute what this module applies;
`broker_server.rounds.new_version` calls `screen_round`.

Updates are folded as they arrive, but the bounds are known only at the close, because they are
computed from all of them. An update that looks wrong by earlier rounds waits for the close with all
behind it, so most rounds read and fold every update once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from broker_server.settings.robust import RobustConfig
from broker_server.stages.bounds import (
    COLOSSAL,
    PEERS,
    EarlierNorms,
    Measured,
    Verdict,
    screen,
    usual_bounds,
)
from broker_server.stages.krum import left_out
from broker_server.stages.moves import limit_samples, scale_change
from broker_server.stages.update import Tensors, Update
from broker_server.store import Outcome, Store, TaskPhase, VersionRecord
from broker_server.store.task_records import MergedUpdate
from broker_server.strategies.private_merge import Noise
from broker_server.updates.folding import Folding, IsDoubtful
from fleet_protocol.errors import RefusalReason

# rounds that are searched for a tier's norms, because its only board may have been offline
_BACK = 20


@dataclass(frozen=True)
class ScreenedUpdates:
    """The updates of a round after all screens.

    Attributes:
        folding: folding of the updates that count.
        outcomes: outcomes of every update, by task.
        refusals: why updates were refused, by task.
    """

    folding: Folding
    outcomes: Mapping[str, Outcome]
    refusals: Mapping[str, tuple[RefusalReason, str]]


def screen_round(
    folding: Folding,
    store: Store,
    old: VersionRecord,
    config: RobustConfig,
    noise: Noise | None = None,
) -> ScreenedUpdates:
    """Screen the updates of a round, and fold each as it counts.

    Args:
        folding: all updates of the round.
        store: contains the norms of earlier rounds.
        old: the version with which the round started.
        config: the screens.
        noise: central noise, whose bound on every update is recorded with the outcomes.

    Raises:
        BlobError: an update on disk can no longer be read.
    """
    verdicts = _verdicts(folding, store, old, config)
    far: set[str] = set()
    # After the bounds: others are not compared with a refused update.
    if config.merge == "krum":
        far = _farthest(folding, verdicts, config.faulty)
    outcomes = {}
    refusals = {}
    for task, verdict in verdicts.items():
        outcomes[task] = _outcome(verdict, left_out=task in far)
        if verdict.reason is not None:
            refusals[task] = (verdict.reason, verdict.detail)
    treatments = {}
    for task, outcome in outcomes.items():
        if _is_changed(outcome):
            treatments[task] = partial(_treat, outcome)
    # Clips of central noise are noted below and not treated here: `moves` has applied them already.
    folding.settle(treatments)
    if noise is not None:
        for task, outcome in outcomes.items():
            outcomes[task] = _noting_clip(outcome, noise.clip)
    return ScreenedUpdates(folding, outcomes, refusals)


def expect_changes(
    store: Store,
    old: VersionRecord,
    config: RobustConfig,
    tiers: Mapping[str, int],
) -> IsDoubtful:
    """Return whether an update will probably not count as it is, by what is known before the close.

    Args:
        store: contains the norms of earlier rounds.
        old: the version with which the round starts.
        config: the screens.
        tiers: number of selected devices of each tier.
    """
    if config.merge == "krum":
        # It compares all updates of a plan, and leaves some of them out in most rounds.
        return lambda _measured: True
    bounds: dict[str, float] = {}
    if config.norm_factor:
        bounds = usual_bounds(_earlier_rounds(store, old, tiers), config)

    def is_doubtful(measured: Measured) -> bool:
        # Only a guess that saves work: the verdict at the close decides, and settles what was
        # folded wrongly.
        too_far = measured.norm > min(bounds.get(measured.tier, COLOSSAL), COLOSSAL)
        return too_far or measured.samples < measured.declared

    return is_doubtful


def _verdicts(
    folding: Folding,
    store: Store,
    old: VersionRecord,
    config: RobustConfig,
) -> dict[str, Verdict]:
    """Compare updates with each other and with those of earlier rounds."""
    measured = folding.measured
    tiers: Counter[str] = Counter()
    for update in measured.values():
        tiers[update.tier] += 1
    earlier = _earlier_rounds(store, old, tiers)
    devices = {update.device for update in measured.values()}
    for before in earlier.values():
        devices |= before.devices
    if len(devices) < PEERS:
        # Which of two is unlike the other?
        config = config.model_copy(update={"norm_bound": 0.0})
    return screen(measured, earlier, config)


def _earlier_rounds(
    store: Store, old: VersionRecord, tiers: Mapping[str, int]
) -> dict[str, EarlierNorms]:
    """Return the norms of updates that counted before, by tier.

    They are those in the old version, and in earlier ones if a tier has too few.
    """
    by_tier: dict[str, list[MergedUpdate]] = {}
    # If there is only one device in the fleet, it cannot be compared with others.
    back = _BACK if sum(tiers.values()) > 1 else 1
    for number in range(old.round, max(old.round - back, 0), -1):
        for update in store.merged_updates(old.run, number):
            by_tier.setdefault(update.tier, []).append(update)
        if _are_enough(tiers, by_tier):
            break
    return {tier: _earlier(updates) for tier, updates in by_tier.items()}


def _earlier(updates: Sequence[MergedUpdate]) -> EarlierNorms:
    """Return the norms of a tier from the updates that counted."""
    norms = []
    bounds = []
    for update in updates:
        screening = update.screening
        # The norm as it counted: for a clipped update, the bound.
        norms.append(screening.norm * screening.scale)
        if screening.bound is not None:
            bounds.append(screening.bound)
    devices = frozenset(update.device for update in updates)
    return EarlierNorms(norms, devices, max(bounds, default=None))


def _are_enough(tiers: Mapping[str, int], by_tier: Mapping[str, Sequence[MergedUpdate]]) -> bool:
    """Return whether every tier has enough norms for its own median."""
    for tier, count in tiers.items():
        earlier = len(by_tier.get(tier, ()))
        if count + earlier < PEERS:
            return False
    return True


def _farthest(
    folding: Folding,
    verdicts: Mapping[str, Verdict],
    faulty: float,
) -> set[str]:
    """Return the tasks that Krum leaves out, for each plan separately."""
    by_plan: dict[str, dict[str, Tensors]] = {}
    for task, verdict in verdicts.items():
        if verdict.reason is None:
            update = folding.open(task)
            by_plan.setdefault(update.key, {})[task] = update.weights
    tasks: set[str] = set()
    for updates in by_plan.values():
        tasks.update(left_out(updates, faulty))
    return tasks


def _outcome(verdict: Verdict, *, left_out: bool) -> Outcome:
    if verdict.reason is not None:
        detail = f"{verdict.reason.value}: {verdict.detail}"
        return Outcome(TaskPhase.REFUSED, verdict.screening, detail)
    if left_out:
        detail = "krum: farther from the others of its tier than they are"
        return Outcome(TaskPhase.LEFT_OUT, verdict.screening, detail)
    return Outcome(TaskPhase.MERGED, verdict.screening)


def _is_changed(outcome: Outcome) -> bool:
    """Return whether an update does not count as it was folded."""
    screening = outcome.screening
    whole = screening.scale >= 1 and screening.samples >= screening.declared
    return outcome.phase is not TaskPhase.MERGED or not whole


def _treat(outcome: Outcome, update: Update) -> Update | None:
    """Return an update as it counts; None if it does not."""
    if outcome.phase is not TaskPhase.MERGED:
        return None
    screening = outcome.screening
    if screening.scale < 1:
        update = scale_change(update, screening.scale)
    if screening.samples < screening.declared:
        update = limit_samples(update, screening.samples)
    return update


def _noting_clip(outcome: Outcome, clip: float) -> Outcome:
    # The larger of both is never 0, because a clip is positive.
    scale = min(1.0, clip / max(outcome.screening.norm, clip))
    screening = outcome.screening.model_copy(update={"bound": clip, "scale": scale})
    return replace(outcome, screening=screening)
