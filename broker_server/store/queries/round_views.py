"""View the rounds of a run, each with its tasks and their figures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from broker_server.settings.combinations import keeps
from broker_server.settings.fleet import FleetConfig
from broker_server.store.privacy_spent import epsilon_by_round
from broker_server.store.queries.run_views import find_run
from broker_server.store.queries.views import RoundView
from broker_server.store.records import LeftOut, RoundRecord
from broker_server.store.repository import Store
from broker_server.store.task_records import TaskRecord
from broker_server.strategies.traits import Trait
from fleet_protocol.metrics import join_metrics


def rounds(
    store: Store,
    run: str | None = None,
    *,
    first: int = 1,
    last: int | None = None,
    tasks: bool = True,
) -> list[RoundView]:
    """Return the rounds of a run in order.

    Args:
        store: the store.
        run: id of the run or its beginning, by default the newest.
        first: number of the first round to return.
        last: number of the last round to return; None for the newest.
        tasks: with the tasks, and the names of the devices that were left out, which are most of
            the bytes.
    """
    if run is None and not store.runs():
        return []
    record = find_run(store, run)
    epsilons = epsilon_by_round(store, record)
    # Only a run that merges from a buffer has updates that count in a later round.
    is_buffered = not keeps(FleetConfig.stored(record.config), Trait.ONE_VERSION)
    views = []
    for round_record in store.rounds(record.id):
        number = round_record.number
        if number < first or (last is not None and number > last):
            continue
        round_tasks = store.tasks(record.id, number, "train")
        late_tasks = store.late_tasks(record.id, number) if is_buffered else []
        view = _view(round_record, round_tasks, late_tasks)
        view = replace(view, epsilon=epsilons.get(number))
        views.append(view if tasks else _without_tasks(view))
    return views


def _view(
    record: RoundRecord, tasks: Sequence[TaskRecord], late_tasks: Sequence[TaskRecord]
) -> RoundView:
    """View a round with its tasks, and those of earlier rounds whose updates are in its version."""
    phases = Counter(task.phase.value for task in late_tasks)
    evaluations = []
    sent_bytes: dict[str, int] = {}
    received_bytes = 0
    for task in tasks:
        # An update may count in a later round, whose view has it.
        if task.screening is None or task.screening.round in {None, record.number}:
            phases[task.phase.value] += 1
        sent_bytes[task.weights.digest] = task.weights.size
        received_bytes += task.update_size or 0
        if task.metrics and task.metrics.evaluation:
            evaluations.append(task.metrics.evaluation)
    accuracies = [judged.accuracy for judged in evaluations if judged.accuracy is not None]
    seconds = None
    if record.ended_at and record.opened_at:
        seconds = record.ended_at - record.opened_at
    return RoundView(
        round=record,
        phases=dict(sorted(phases.items())),
        seconds=seconds,
        tasks=tuple(tasks),
        device_accuracy=sum(accuracies) / len(accuracies) if accuracies else None,
        device_range=(min(accuracies), max(accuracies)) if accuracies else None,
        device_metrics=join_metrics(evaluations),
        sent_bytes=sum(sent_bytes.values()),
        received_bytes=received_bytes,
    )


def _without_tasks(view: RoundView) -> RoundView:
    """Leave out tasks and names of devices, and keep their number."""
    left_out = view.round.left_out
    if left_out is None:
        return replace(view, tasks=())
    counted = LeftOut(reasons={}, more=left_out.more + len(left_out.reasons))
    return replace(view, tasks=(), round=replace(view.round, left_out=counted))
