"""Updates that nobody sees: the server learns the sum of a cohort, and its mean counts for each."""

from collections.abc import Sequence
from dataclasses import replace

from broker_server.rounds.collecting import Cohort, Collection, OpenTask
from broker_server.rounds.dispatch import Services
from broker_server.store import TaskPhase
from broker_server.updates.combine import mean_of_sum
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import RefusedError


def sum_up(services: Services, collection: Collection) -> str:
    """Put the mean of its cohort in the place of every update of a collection.

    The collection is over, but still open. The means are kept among the updates and committed to
    the store.

    Returns:
        Why the round has no sum, where fewer updates are in sums than make a quorum; else nothing.

    Raises:
        StopRequested: the run shall stop here and be continued later.
        StorageError: the disk is full.
    """
    lost = "no update came"
    # A device may answer while its cohort is added up, so cohorts are chosen before the first is.
    cohorts = []
    for cohort in collection.cohorts():
        if cohort.received:
            cohorts.append(cohort)
    for cohort in cohorts:
        added, why = _sum_cohort(services, cohort)
        if not added:
            lost = why
        for task in cohort.received:
            # A masked update that is in no sum cannot be read by itself.
            if task not in added:
                services.store.settle([task.record.id], TaskPhase.MISSED, why)
                task.record = replace(task.record, phase=TaskPhase.MISSED, detail=why)
    count = 0
    for cohort in cohorts:
        count += len(cohort.received)
    enough = count and count >= collection.rule.needed(len(collection.tasks), 0)
    return "" if enough else lost


def _sum_cohort(services: Services, cohort: Cohort) -> tuple[Sequence[OpenTask], str]:
    """Return the tasks that are in the sum of a cohort, and why its other tasks are not."""
    tasks = cohort.received
    try:
        _store_mean(services, cohort, tasks)
    except RefusedError as error:
        why = f"no sum of {tasks[0].record.tier}: {error}"
        services.dispatcher.reporter.note("sum-lost", why)
        return (), why
    return tasks, "it came after the others were added up"


def _store_mean(services: Services, cohort: Cohort, tasks: Sequence[OpenTask]) -> None:
    total = services.dispatcher.total(cohort)
    first = tasks[0]
    sent = open_weights(services.blobs.path(first.record.weights.digest))
    mean = mean_of_sum(total, len(tasks), cohort.summing.clip, first.expected, sent)
    digest = services.updates.put(mean)
    records = [replace(task.record, update_digest=digest) for task in tasks]
    # Committed before the masked updates are removed: a server that is killed finds one of both.
    services.store.receive(records)
    for task, record in zip(tasks, records, strict=True):
        if task.record.update_digest not in {None, digest}:
            services.updates.remove(task.record.update_digest)
        task.record = record
