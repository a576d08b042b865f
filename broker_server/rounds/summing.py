"""Updates that nobody sees: what the server learns of a cohort is the sum, and all of it count as
their mean.

So whatever merges updates merges these: as many equal ones as there were.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from broker_server.rounds.collecting import Collection, OpenTask
from broker_server.rounds.dispatch import Services
from broker_server.store import TaskPhase
from broker_server.updates.checks import expected_shapes
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import RefusedError
from fleet_protocol.secure_sum import Words, restored
from fleet_protocol.weights import encode_weights


def sum_up(services: Services, collection: Collection) -> str:
    """Put the mean of its cohort in the place of every update of a collection that is over, but
    still open.

    The means are kept among the updates and committed to the store. Where fewer are in sums than
    make a quorum, it says why.

    Raises:
        StopRequested: the run shall stop here and be continued later.
        StorageError: the disk is full.
    """
    lost = "no update came"
    cohorts = [cohort for cohort in collection.cohorts() if cohort.came]
    for cohort in cohorts:
        came = cohort.came
        why = "it came after the others were added up"
        try:
            _replace(services, came, services.dispatcher.total(cohort), cohort.summing.clip)
        except RefusedError as error:
            why = lost = f"no sum of {came[0].record.tier}: {error}"
            services.dispatcher.reporter.note("sum-lost", lost)
            came = []
        for task in [task for task in cohort.came if task not in came]:
            services.store.settle([task.record.id], TaskPhase.MISSED, why)
            task.record = replace(task.record, phase=TaskPhase.MISSED, detail=why)
    left = sum(len(cohort.came) for cohort in cohorts)
    return "" if left and left >= collection.rule.needed(len(collection.tasks), 0) else lost


def _replace(services: Services, came: Sequence[OpenTask], total: Words, clip: float) -> None:
    first = came[0]
    updates = services.updates
    shapes = expected_shapes(first.expected)
    sent = open_weights(services.blobs.path(first.record.weights.digest))
    names = sorted(shapes)
    parts = np.split(
        restored(total, clip) / len(came),
        np.cumsum([math.prod(shapes[name]) for name in names])[:-1],
    )
    moved = {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}
    digest = updates.put(
        encode_weights({name: (sent[name] + moved[name]).astype(np.float32) for name in names})
    )
    records = [replace(task.record, update_digest=digest) for task in came]
    services.store.receive(records)
    for task, record in zip(came, records, strict=True):
        if task.record.update_digest not in {None, digest}:
            updates.remove(task.record.update_digest)
        task.record = record
