"""Aggregates with secure sums: the server learns a cohort's sum, and uses its mean for each update.

Boards reveal shares for only one sum of a version, so a sum that was opened always becomes part of
the next version: the server checks that there are enough updates before it opens the first sum.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from broker_server.rounds.collecting import Cohort, OpenTask
from broker_server.rounds.collecting import Collection as OpenCollection
from broker_server.rounds.collection_end import quorum_size
from broker_server.rounds.dispatch import Services
from broker_server.rounds.tier_assignment import Assignment
from broker_server.stages.secure_mean import mean_of_sum
from broker_server.store import TaskPhase
from broker_server.updates.checks import expected_shapes
from broker_server.updates.distance import measure
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import RefusedError
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages.instructions import Summing
from fleet_protocol.weights import MASKED

_TOO_LATE = "it arrived after the other updates had been summed"


def sum_up(services: Services, collection: OpenCollection) -> str:
    """Replace every update of a collection by the mean of its cohort.

    The collection is over, but still open. The means are stored among the updates and committed.

    Returns:
        Why the round has no sum; empty if it has one.

    Raises:
        StopRequested: the run must stop here and resume later.
        StorageError: the disk is full.
    """
    needed = _quorum(collection)
    # A device may answer while its cohort is added up, so all cohorts are chosen before the first
    # sum.
    cohorts = [cohort for cohort in collection.cohorts() if cohort.received]
    are_added = [_is_added(services, cohort) for cohort in cohorts]
    obstacles = _obstacles(services, cohorts, are_added)
    lost = _last_reason(cohorts, obstacles)
    possible = _count_possible(cohorts, obstacles)
    is_opened = services.dispatcher.has_begun_sums
    for cohort, is_added in zip(cohorts, are_added, strict=True):
        if is_added:
            is_opened = True
        elif is_opened or possible >= needed:
            count = len(cohort.received)
            why = _sum_cohort(services, cohort)
            is_opened = is_opened or not why
            possible -= count if why else 0
            lost = why or lost
        else:
            # No sum has been opened yet, so the boards may try again from the same version.
            _settle(services, cohort.received, lost)
    return "" if any(cohort.received for cohort in cohorts) else lost


def why_no_sum(
    summing: Summing | None,
    eligible: Collection[Assignment],
    drawn: int,
    share: float,
) -> str:
    """Return why a round cannot open enough secure sums; empty if it may.

    Each tier has a sum, so a fleet of many devices may be too small if each tier has few.

    Args:
        summing: instructions for the devices of a sum; None if the run has no sums.
        eligible: the devices from which a round is drawn, with their tiers.
        drawn: number of devices that a round draws.
        share: share of these whose updates a round needs.
    """
    if summing is None:
        return ""
    counts = Counter(assignment.tier.tier.id for assignment in eligible)
    summed = sum(count for count in counts.values() if count >= summing.least)
    needed = max(summing.least, quorum_size(share, drawn))
    if min(summed, drawn) >= needed:
        return ""
    if summed >= needed:
        return (
            f"a secure sum needs {summing.least} devices, but a round draws {drawn} of"
            f" {len(eligible)}; raise round.fraction or round.min_devices, or lower"
            " secure_sum.least"
        )
    found = ", ".join(f"{count} with {tier}" for tier, count in sorted(counts.items()))
    return (
        f"a secure sum needs {summing.least} devices of one tier, and a round needs {needed} of its"
        f" {drawn} devices in such sums; this fleet has {found}; start more devices, allow fewer"
        " tiers ([tiers] allowed), or lower secure_sum.least"
    )


def _obstacles(
    services: Services,
    cohorts: Sequence[Cohort],
    are_added: Sequence[bool],
) -> list[str]:
    """Return why the sum of each cohort cannot be opened; empty if it can, or has been."""
    obstacles = []
    for cohort, is_added in zip(cohorts, are_added, strict=True):
        obstacles.append("" if is_added else services.dispatcher.sum_obstacle(cohort))
    return obstacles


def _count_possible(cohorts: Sequence[Cohort], obstacles: Sequence[str]) -> int:
    """Return the number of updates in cohorts whose sum can be opened."""
    possible = 0
    for cohort, obstacle in zip(cohorts, obstacles, strict=True):
        if not obstacle:
            possible += len(cohort.received)
    return possible


def _last_reason(cohorts: Sequence[Cohort], obstacles: Sequence[str]) -> str:
    reason = "no update arrived"
    for cohort, obstacle in zip(cohorts, obstacles, strict=True):
        if obstacle:
            reason = _reason(cohort, obstacle)
    return reason


def _quorum(collection: OpenCollection) -> int:
    phases = list(collection.phases().values())
    return collection.rule.needed(len(phases), phases.count(TaskPhase.REFUSED))


def _is_added(services: Services, cohort: Cohort) -> bool:
    """Return whether a killed server had replaced the updates of a cohort by their mean."""
    digest = cohort.received[0].record.update_digest
    return digest is not None and MASKED not in services.updates.tensors(digest)


def _sum_cohort(services: Services, cohort: Cohort) -> str:
    """Add up a cohort's updates, and settle the tasks that are in no sum.

    Returns:
        Why there is no sum; empty if there is one.
    """
    added: Sequence[OpenTask] = ()
    why = ""
    try:
        added = _store_mean(services, cohort)
    except RefusedError as error:
        why = _reason(cohort, str(error))
        services.dispatcher.reporter.note("sum-lost", why)
    # A masked update that is in no sum cannot be read.
    missed = [task for task in cohort.received if task not in added]
    _settle(services, missed, why or _TOO_LATE)
    return why


def _reason(cohort: Cohort, why: str) -> str:
    return f"no sum of {cohort.received[0].record.tier}: {why}"


def _settle(services: Services, tasks: Sequence[OpenTask], why: str) -> None:
    for task in tasks:
        services.store.settle([task.record.id], TaskPhase.MISSED, why)
        task.record = replace(task.record, phase=TaskPhase.MISSED, detail=why)


def _store_mean(services: Services, cohort: Cohort) -> Sequence[OpenTask]:
    """Store the mean of a cohort as the update of its tasks, and return these."""
    cohort_sum = services.dispatcher.total(cohort)
    tasks = cohort_sum.tasks
    first = tasks[0]
    sent = open_weights(services.blobs.path(first.record.weights.digest))
    shapes = expected_shapes(first.expected)
    mean = mean_of_sum(cohort_sum.total, len(tasks), cohort.summing.clip, shapes, sent)
    # It stands for each of the updates, so it is measured once for all of them.
    distance = measure(tensors_in(mean), sent)
    digest = services.updates.put(mean)
    records = [replace(task.record, update_digest=digest) for task in tasks]
    # Committed before the masked updates are removed: after a crash the server finds one or the
    # other.
    services.store.receive(records)
    for task, record in zip(tasks, records, strict=True):
        if task.record.update_digest not in {None, digest}:
            services.updates.remove(task.record.update_digest)
        task.record = record
        task.distance = distance
    return tasks
