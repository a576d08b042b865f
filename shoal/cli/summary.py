"""Reads a stored run back into the numbers of a report."""

from contextlib import closing
from pathlib import Path

from broker_server.store import RoundRecord, Store, TaskRecord, queries
from broker_server.store.machine import RoundState
from shoal.cli.report import Arm, DevicePoint, Heading, RoundPoint


def _device(task: TaskRecord) -> DevicePoint | None:
    if task.metrics is None:
        return None
    return DevicePoint(
        device=task.device,
        tier=task.tier,
        examples=task.metrics.examples,
        train_loss=task.metrics.train_loss,
        local_accuracy=task.metrics.evaluation.accuracy if task.metrics.evaluation else None,
        train_seconds=task.metrics.train_seconds,
    )


def _round(record: RoundRecord, tasks: list[TaskRecord]) -> RoundPoint:
    devices = [point for task in tasks if (point := _device(task)) is not None]
    return RoundPoint(
        number=record.number,
        accuracy=record.evaluation.accuracy if record.evaluation else None,
        loss=record.evaluation.loss if record.evaluation else None,
        metrics={m.name: m.value for m in record.evaluation.metrics} if record.evaluation else {},
        seconds=(record.ended_at or record.planned_at) - record.planned_at,
        devices=tuple(devices),
    )


def summarise(store_folder: Path, run: str, heading: Heading, seconds: float) -> Arm:
    """Read a run, or raise a ConfigError where the store has none such."""
    with closing(Store(store_folder, read_only=True)) as store:
        view = queries.status(store, run)
        closed = [item for item in store.rounds(run) if item.state is RoundState.CLOSED]
        points = tuple(_round(item, store.tasks(run, item.number, "train")) for item in closed)
    return Arm(
        **vars(heading),
        rounds=points,
        wire_bytes=view.run.wire_bytes if view.run else 0,
        payload_bytes=view.run.payload_bytes if view.run else 0,
        seconds=seconds,
        refusals=view.refusals,
    )
