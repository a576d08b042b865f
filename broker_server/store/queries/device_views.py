"""Views of the devices of a store, each with its part in a run."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from broker_server.store.queries.run_views import find_run, is_served
from broker_server.store.queries.views import DeviceView
from broker_server.store.records import DeviceRecord, RunRecord
from broker_server.store.remedies import SIMULATED, absence_reason, remedy
from broker_server.store.repository import Store
from broker_server.store.task_records import DevicePart
from fleet_protocol.messages import TaskMetrics

_NEWEST_LINES = 200  # of the log, which are searched for reasons
_NO_TOTALS = {
    "merged": 0,
    "missed": 0,
    "train_seconds": None,
    "fetch_seconds": None,
    "resident_bytes": None,
}


def devices(store: Store, run: str | None = None) -> list[DeviceView]:
    """Return every device that ever connected, with its part in a run, by default the newest."""
    served = is_served(store)
    if run is None and not store.runs():
        return [replace(_view(device, None, 0, {}), served=served) for device in store.devices()]
    record = find_run(store, run)
    device_parts = store.device_parts(record.id)
    left_out = _left_out(store, record)
    refused: Counter[str] = Counter()
    for refusal in store.refusals(record.id):
        refused[refusal.device] += refusal.count
    device_records = store.devices()
    if not device_records:
        # A simulation has tasks, but no devices that connect.
        device_records = _simulated_devices(record, device_parts)
    views = []
    for device in device_records:
        view = _view(device, device_parts.get(device.id), refused[device.id], left_out)
        views.append(replace(view, served=served))
    return views


def _left_out(store: Store, record: RunRecord) -> Mapping[str, str]:
    """Return why devices were left out of the newest round, or of the next one."""
    newest = store.last_round(record.id)
    reasons: dict[str, str] = {}
    if newest is not None and newest.left_out is not None:
        reasons.update(newest.left_out.reasons)
    newest_number = newest.number if newest is not None else 0
    for line in store.events(record.id, last=_NEWEST_LINES):
        # A round that waits for devices is not planned yet; its reasons are only in the log.
        is_of_next_round = (line.round or 0) > newest_number
        if line.kind == "unfit" and line.device and is_of_next_round:
            reasons[line.device] = line.detail
    return reasons


def _simulated_devices(record: RunRecord, names: Iterable[str]) -> list[DeviceRecord]:
    ended_at = record.ended_at or record.created_at
    return [
        DeviceRecord(
            fleet=record.fleet,
            id=name,
            online=True,
            state=SIMULATED,
            profile=None,
            first_seen_at=record.created_at,
            last_seen_at=ended_at,
        )
        for name in sorted(names)
    ]


def _view(
    device: DeviceRecord,
    part: DevicePart | None,
    refused: int,
    left_out: Mapping[str, str],
) -> DeviceView:
    if part is not None and part.received_at is not None:
        # An update also shows that a device is online; its own reports are older.
        last_seen_at = max(device.last_seen_at, part.received_at)
        device = replace(device, last_seen_at=last_seen_at)
    newest = part.newest if part is not None else None
    measured = part.measured if part is not None else None
    metrics = measured.metrics if measured is not None else None
    reason = absence_reason(device, newest, left_out)
    return DeviceView(
        device=device,
        tier=newest.tier if newest is not None else None,
        phase=newest.phase if newest is not None else None,
        **(part.totals if part is not None else _NO_TOTALS),
        refused=refused,
        examples=_examples_of(device, metrics),
        evaluation=metrics.evaluation if metrics is not None else None,
        shared_evaluation=metrics.shared_evaluation if metrics is not None else None,
        reason=reason,
        remedy=remedy(device.id, reason),
    )


def _examples_of(device: DeviceRecord, metrics: TaskMetrics | None) -> int | None:
    """Return how many samples a device trained on last, or else those of its profile."""
    if metrics is not None and metrics.examples is not None:
        return metrics.examples
    return device.profile.examples if device.profile is not None else None
