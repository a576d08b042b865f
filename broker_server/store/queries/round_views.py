"""Views of the rounds of a run, each with its tasks and their figures."""

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
from broker_server.store.task_records import TaskPhase, TaskRecord
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import RefusalReason
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
        tasks: whether to include the tasks and the names of the devices that were left out, which
            make up most of the bytes.
    """
    if run is None and not store.runs():
        return []
    record = find_run(store, run)
    # One query for all rounds, instead of one for each.
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
        # An update may count in a later round, whose view then contains it.
        if task.screening is None or task.screening.round in {None, record.number}:
            phases[task.phase.value] += 1
        # By digest: devices that share a plan are sent one blob.
        sent_bytes[task.weights.digest] = task.weights.size
        received_bytes += task.update_size or 0
        if task.metrics and task.metrics.evaluation:
            evaluations.append(task.metrics.evaluation)
    clipped, too_far = count_bounded([*tasks, *late_tasks], record.number)
    accuracies = [judged.accuracy for judged in evaluations if judged.accuracy is not None]
    seconds = None
    if record.ended_at and record.opened_at:
        seconds = record.ended_at - record.opened_at
    return RoundView(
        round=record,
        phases=dict(sorted(phases.items())),
        seconds=seconds,
        tasks=tuple(tasks),
        # A mean over devices, not over samples: each board counts once.
        device_accuracy=sum(accuracies) / len(accuracies) if accuracies else None,
        device_range=(min(accuracies), max(accuracies)) if accuracies else None,
        device_metrics=join_metrics(evaluations),
        sent_bytes=sum(sent_bytes.values()),
        received_bytes=received_bytes,
        clipped=clipped,
        too_far=too_far,
    )


def count_bounded(tasks: Sequence[TaskRecord], number: int) -> tuple[int, int]:
    """Return what the bound on norms has done in a round.

    Args:
        tasks: tasks of the round, and those of earlier rounds whose updates came late.
        number: number of the round; updates that counted in another one are left out.

    Returns:
        How many updates it has scaled down, and how many it has refused.
    """
    clipped = 0
    too_far = 0
    for task in tasks:
        screening = task.screening
        if screening is not None and screening.round not in {None, number}:
            continue
        if task.phase is TaskPhase.REFUSED:
            # The reason for people begins with that for programs.
            too_far += (task.detail or "").startswith(RefusalReason.TOO_FAR.value)
        elif screening is not None and screening.scale < 1:
            clipped += 1
    return clipped, too_far


def _without_tasks(view: RoundView) -> RoundView:
    """Leave out tasks and names of devices, and keep their number."""
    left_out = view.round.left_out
    if left_out is None:
        return replace(view, tasks=())
    # Names make up most of the bytes; their number stays.
    counted = LeftOut(reasons={}, more=left_out.more + len(left_out.reasons))
    return replace(view, tasks=(), round=replace(view.round, left_out=counted))
