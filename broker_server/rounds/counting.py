"""Which of a round's updates are merged, and how each counts: screened, clipped, chosen, and folded anew if need be.

Updates are folded as they come (`broker_server.rounds.fold_order`), though what they may be is known at the close only:
bounds are taken from all of them. Where all are as they should be nothing is done twice; where one is not, the sums are
made again without it. The updates are on disk until the round is over.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.rounds.dispatch import Services
from broker_server.rounds.fold_order import Folding
from broker_server.rounds.krum import left_out
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.screening import PEERS, Verdict, screen
from broker_server.store import Outcome, TaskPhase, TaskRecord, VersionRecord
from broker_server.strategies.strategy import Contribution
from fleet_protocol.errors import RefusalReason

Tensors = Mapping[str, NDArray[Any]]
_BACK = 20  # rounds that are looked at for a tier's norms, whose only board may have been away


@dataclass(frozen=True)
class Counted:
    """What is merged."""

    folding: Folding  # of the updates that count
    outcomes: Mapping[str, Outcome]  # of every update, by task
    refusals: Mapping[str, tuple[RefusalReason, str]]  # why updates were refused, by task


def count_updates(
    context: RunContext, services: Services, folding: Folding, old: VersionRecord, sent: Callable[[str], Tensors]
) -> Counted:
    """Judge updates that were folded by what was sent, and fold them again if not all of them count as they are.

    Raises:
        BlobError: an update on disk can no longer be read.
    """
    config, privacy = context.config.robust, context.config.privacy
    tiers = Counter(item.tier for item in folding.measured.values())
    earlier, devices = _earlier(services, old, tiers)
    if len(devices | {item.device for item in folding.measured.values()}) < PEERS:  # which of two is unlike the other?
        config = config.model_copy(update={"norm_bound": 0.0})
    verdicts = screen(folding.measured, earlier, config)
    chosen_out = _left_out(folding, verdicts, config.faulty) if config.merge == "krum" else ()
    outcomes = {task: _outcome(item, left_out=task in chosen_out) for task, item in verdicts.items()}
    changed = any(_changes(outcomes[task]) for task in folding.folded)

    def treated(task: str, update: Contribution) -> Contribution | None:
        if outcomes[task].phase is not TaskPhase.MERGED:
            return None
        screening = verdicts[task].screening
        if screening.scale < 1:
            update = replace(update, weights=_scaled(update.weights, sent(task), screening.scale))
        if screening.samples < screening.declared:
            update = replace(update, metrics=update.metrics.model_copy(update={"examples": screening.samples}))
        return update

    if changed:
        folding = folding.again(treated)
    if privacy is not None and privacy.where == "central":  # by the merge itself; noted here
        outcomes = {task: _clipped(item, privacy.clip) for task, item in outcomes.items()}
    refusals = {task: (item.reason, item.detail) for task, item in verdicts.items() if item.reason is not None}
    return Counted(folding, outcomes, refusals)


def report_refusals(services: Services, counted: Counted, tasks: Mapping[str, TaskRecord]) -> None:
    """Name those whose updates were refused, and count them."""
    for task, (reason, detail) in counted.refusals.items():
        record = tasks[task]
        services.dispatcher.reporter.refused(reason, detail, device=record.device, number=record.round)


def _earlier(
    services: Services, old: VersionRecord, tiers: Mapping[str, int]
) -> tuple[dict[str, list[float]], set[str]]:
    """Norms that the version the round started from was made of, by tier, those before where that is too few; whose."""
    found, devices = dict[str, list[float]](), set[str]()
    back = _BACK if sum(tiers.values()) > 1 else 1  # whoever is alone in the fleet has only itself to differ from
    for number in range(old.round, max(old.round - back, 0), -1):
        for task in services.store.tasks(old.run, number, "train"):
            if task.phase is TaskPhase.MERGED and task.screening is not None:
                found.setdefault(task.tier, []).append(task.screening.norm * task.screening.scale)
                devices.add(task.device)
        if all(count + len(found.get(tier, ())) >= PEERS for tier, count in tiers.items()):
            break
    return found, devices


def _left_out(folding: Folding, verdicts: Mapping[str, Verdict], faulty: float) -> tuple[str, ...]:
    by_plan: dict[str, dict[str, Tensors]] = {}
    for task in folding.folded:
        if verdicts[task].reason is None:
            update = folding.load(task)
            by_plan.setdefault(update.key, {})[task] = update.weights
    return tuple(task for updates in by_plan.values() for task in left_out(updates, faulty))


def _outcome(verdict: Verdict, *, left_out: bool) -> Outcome:
    if verdict.reason is not None:
        return Outcome(TaskPhase.REFUSED, verdict.screening, f"{verdict.reason.value}: {verdict.detail}")
    if left_out:
        return Outcome(TaskPhase.LEFT_OUT, verdict.screening, "krum: farther from the others of its tier than they are")
    return Outcome(TaskPhase.MERGED, verdict.screening)


def _changes(outcome: Outcome) -> bool:
    screening = outcome.screening
    return outcome.phase is not TaskPhase.MERGED or screening.scale < 1 or screening.samples < screening.declared


def _clipped(outcome: Outcome, clip: float) -> Outcome:
    noted = {"bound": clip, "scale": min(1.0, clip / max(outcome.screening.norm, clip))}
    return replace(outcome, screening=outcome.screening.model_copy(update=noted))


def _scaled(update: Tensors, sent: Tensors, scale: float) -> dict[str, NDArray[np.float32]]:
    """An update moved towards what was sent, in float64: the difference of large floats may be no float32."""
    return {
        name: (sent[name] + scale * (value.astype(np.float64) - sent[name])).astype(np.float32)
        for name, value in update.items()
    }
