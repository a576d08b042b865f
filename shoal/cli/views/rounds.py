"""Shows the rounds of a run."""

from collections.abc import Iterable, Sequence
from typing import Any

from broker_server.store import RoundRecord
from broker_server.store.queries import RoundView
from shoal.cli.console import number_text, print_rows, seconds_text
from shoal.cli.views.view import View, without_field
from shoal.sources import Source


def _read(source: Source, run: str) -> list[RoundView]:
    # The table shows no single task.
    return source.rounds(run, tasks=0)


def _draw(views: Sequence[RoundView]) -> None:
    columns = _Columns(views)
    rows = [columns.row(view) for view in views]
    print_rows("rounds", rows, empty="no round yet")


class _Columns:
    """The columns that exist only if a round has the measurement."""

    def __init__(self, views: Iterable[RoundView]) -> None:
        # Dictionaries serve as sets that keep the order of first occurrence.
        metrics: dict[str, None] = {}
        device_metrics: dict[str, None] = {}
        tiers: dict[str, None] = {}
        for view in views:
            device_metrics |= dict.fromkeys(view.device_metrics)
            evaluation = view.round.evaluation
            if evaluation:
                metrics |= dict.fromkeys(metric.name for metric in evaluation.metrics)
                tiers |= dict.fromkeys(evaluation.tiers)
        self._metrics = tuple(metrics)
        self._device_metrics = tuple(device_metrics)
        self._tiers = tuple(tiers)

    def row(self, view: RoundView) -> dict[str, str]:
        """Return the cells of one round in the order of the columns."""
        record = view.round
        evaluation = record.evaluation
        accuracy = evaluation.accuracy if evaluation else None
        loss = evaluation.loss if evaluation else None
        cells = {
            "round": str(record.number),
            "state": record.state.value,
            "accuracy": number_text(accuracy),
            "loss": number_text(loss),
        }
        for name in self._metrics:
            cells[name] = number_text(_metric(record, name))
        cells["on devices"] = number_text(view.device_accuracy)
        for name in self._device_metrics:
            cells[f"{name} on devices"] = number_text(view.device_metrics.get(name))
        for tier in self._tiers:
            cells[tier] = _tier_accuracy(record, tier)
        # Only runs with noise have this column.
        if view.epsilon is not None:
            cells["epsilon"] = f"{view.epsilon:.4g}"
        updates = [f"{count} {phase}" for phase, count in view.phases.items()]
        if view.clipped:
            updates.append(f"{view.clipped} of them clipped")
        if view.too_far:
            updates.append(f"{view.too_far} of them too far")
        cells["updates"] = ", ".join(updates)
        cells["time"] = seconds_text(view.seconds)
        cells["note"] = record.reason or record.note or ""
        return cells


def _metric(record: RoundRecord, name: str) -> float | None:
    """Return the value of a metric in a round, if it was measured."""
    if record.evaluation is None:
        return None
    for metric in record.evaluation.metrics:
        if metric.name == name:
            return metric.value
    return None


def _tier_accuracy(record: RoundRecord, tier: str) -> str:
    """Return the cell of a tier's score in a round."""
    if record.evaluation is None or tier not in record.evaluation.tiers:
        return number_text(None)
    return number_text(record.evaluation.tiers[tier].shown)


def _as_records(views: Sequence[RoundView]) -> list[dict[str, Any]]:
    return [without_field("tasks", view) for view in views]


ROUNDS = View(_read, _draw, _as_records)
