"""What becomes of each update when its round closes: it counts as it is, bounded, or not at all.

Updates are folded as they come, though what they may be is known at the close only: bounds are
taken from all of them. Where one is not as it should be the sums are made again without it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from broker_server.settings.privacy import PrivacyConfig
from broker_server.settings.robust import RobustConfig
from broker_server.store import Outcome, Store, TaskPhase, TaskRecord, VersionRecord
from broker_server.updates.bounds import PEERS, Earlier, Verdict, screen
from broker_server.updates.folding import Folding
from broker_server.updates.krum import left_out
from broker_server.updates.moves import limit_samples, scale_change
from broker_server.updates.values import Tensors, Update
from fleet_protocol.errors import RefusalReason

_BACK = 20  # rounds that are looked at for a tier's norms, whose only board may have been away


@dataclass(frozen=True)
class Screened:
    """The updates of a round after all screens.

    Attributes:
        folding: of those that count.
        outcomes: of every update, by task.
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
    noise: PrivacyConfig | None = None,
) -> Screened:
    """Judge the updates of a round, and fold them again if not all of them count as they are.

    Args:
        folding: all updates of the round.
        store: has the norms of rounds before.
        old: the version that the round started from.
        config: the screens.
        noise: central noise, whose bound on every update is noted with the outcomes.

    Raises:
        BlobError: an update on disk can no longer be read.
    """
    verdicts = _judge(folding, store, old, config)
    far: set[str] = set()
    if config.merge == "krum":
        far = _farthest(folding, verdicts, config.faulty)
    outcomes = {}
    refusals = {}
    for task, verdict in verdicts.items():
        outcomes[task] = _outcome(verdict, left_out=task in far)
        if verdict.reason is not None:
            refusals[task] = (verdict.reason, verdict.detail)
    # Most rounds are merged as they were folded, with no second pass over the updates.
    if any(_is_changed(outcomes[task]) for task in folding.folded):
        folding = folding.fold_again(lambda task, update: _treat(outcomes[task], update))
    if noise is not None:
        for task, outcome in outcomes.items():
            outcomes[task] = _noting_clip(outcome, noise.clip)
    return Screened(folding, outcomes, refusals)


def _judge(
    folding: Folding,
    store: Store,
    old: VersionRecord,
    config: RobustConfig,
) -> dict[str, Verdict]:
    """Judge updates beside each other and those of rounds before."""
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
) -> dict[str, Earlier]:
    """Return what is known of updates that counted before, by tier.

    They are those that the old version was made of, and of rounds before where a tier has too few.
    """
    by_tier: dict[str, list[TaskRecord]] = {}
    # A device that is alone in the fleet has only itself to differ from.
    back = _BACK if sum(tiers.values()) > 1 else 1
    for number in range(old.round, max(old.round - back, 0), -1):
        for task in store.tasks(old.run, number, "train"):
            if task.phase is TaskPhase.MERGED and task.screening is not None:
                by_tier.setdefault(task.tier, []).append(task)
        if _are_enough(tiers, by_tier):
            break
    return {tier: _earlier(tasks) for tier, tasks in by_tier.items()}


def _earlier(tasks: Sequence[TaskRecord]) -> Earlier:
    """Return what is known of a tier from the tasks whose updates counted."""
    norms = []
    bounds = []
    for task in tasks:
        if task.screening is None:
            continue
        # The norm as it counted: of a clipped update that is the bound.
        norms.append(task.screening.norm * task.screening.scale)
        if task.screening.bound is not None:
            bounds.append(task.screening.bound)
    devices = frozenset(task.device for task in tasks)
    return Earlier(norms, devices, max(bounds, default=None))


def _are_enough(tiers: Mapping[str, int], by_tier: Mapping[str, Sequence[TaskRecord]]) -> bool:
    """Return whether every tier has enough norms for a median of its own."""
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
    """Return the tasks that Krum leaves out, of each plan by itself: others hold other entries."""
    by_plan: dict[str, dict[str, Tensors]] = {}
    for task in folding.folded:
        if verdicts[task].reason is None:
            update = folding.load(task)
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
    # The larger of both is never 0, as a clip is positive.
    scale = min(1.0, clip / max(outcome.screening.norm, clip))
    screening = outcome.screening.model_copy(update={"bound": clip, "scale": scale})
    return replace(outcome, screening=screening)
