"""Metrics for Prometheus: the newest run and its devices, from the page's functions.

Counters belong to the newest run. They restart at 0 with the next run, as Prometheus expects after
a restart.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector

from broker_server.settings.fleet import FleetConfig
from broker_server.store import RoundRecord, Store, queries
from broker_server.store.machine import FINAL
from broker_server.store.records import RunRecord
from broker_server.store.remedies import REVOKED, SIMULATED
from fleet_protocol.errors import RefusalReason

MOST_DEVICES = 100
"""Number of devices with their own rows: the first by id. All others share one row."""

MOST_STATES = 20
"""Number of device states with their own rows: the most common. All others share one row."""

_BROKER_TROUBLES = ("broker-lost", "blob-delayed", "inbox-full")
"""Kinds of lines in the log."""
_OTHERS = "(others)"
"""Name of the shared row; device ids have no parentheses."""
_BUCKET_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 14400)


@dataclass(frozen=True)
class StoreMetrics:
    """A collector of prometheus-client over an open store."""

    store: Store

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics; without a run, only those of devices and process."""
        views = queries.devices(self.store)
        states = Counter(_state(view) for view in views)
        # Devices name their states, so there may be any number of them.
        for state, _ in states.most_common()[MOST_STATES:]:
            states[_OTHERS] += states.pop(state)
        yield _gauge("shoal_devices", "Devices by the state of their agent.", "state", states)
        tiers = Counter(view.tier for view in views if view.tier)
        about_tiers = "Devices by the tier of their last task."
        yield _gauge("shoal_tier_devices", about_tiers, "tier", tiers)
        # Processor time, memory and open files of the server.
        yield from ProcessCollector(registry=None).collect()
        status = queries.status(self.store)
        if status.run is None:
            return
        yield from _run_metrics(status, status.run, self.store.rounds(status.run.id))
        lines = self.store.count_lines(status.run.id, _BROKER_TROUBLES)
        troubles = {(kind,): lines.get(kind, 0) for kind in _BROKER_TROUBLES}
        about_troubles = "Errors between server and broker."
        yield _counter("shoal_broker_troubles", about_troubles, ["kind"], troubles)
        yield from _device_metrics(sorted(views, key=lambda view: view.device.id))


def _state(view: queries.DeviceView) -> str:
    """Return the state of a device's agent, which is unknown while no server is running."""
    device = view.device
    if not device.online and device.state != REVOKED:
        return "offline"
    if device.online and not view.is_online and device.state != SIMULATED:
        return "unknown"
    return device.state


def _gauge(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with a row for each value of one label."""
    gauge = GaugeMetricFamily(name, about, labels=[label])
    for label_value, value in values.items():
        gauge.add_metric([label_value], value)
    return gauge


def _counter(name: str, about: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    """Return a counter with a row for each combination of its labels' values."""
    counter = CounterMetricFamily(name, about, labels=labels)
    for label_values, value in values.items():
        counter.add_metric(label_values, value)
    return counter


def _run_metrics(
    status: queries.StatusView, run: RunRecord, rounds: Sequence[RoundRecord]
) -> Iterator[Metric]:
    """Yield the metrics of the newest run."""
    config = FleetConfig.stored(run.config)
    labels = ["fleet", "run", "model", "strategy", "status"]
    info = GaugeMetricFamily("shoal_run_info", "1.", labels=labels)
    info.add_metric([run.fleet, run.id, run.arch, config.strategy.name, run.status], 1)
    yield info
    is_running = run.status == "running"
    about_active = "1 while the run is in progress."
    yield GaugeMetricFamily("shoal_run_active", about_active, value=is_running)
    about_wanted = "Planned number of rounds in the run."
    yield GaugeMetricFamily("shoal_rounds_wanted", about_wanted, value=status.rounds)
    about_progress = "Time of the last progress of its rounds, in Unix time."
    yield GaugeMetricFamily(
        "shoal_progress_timestamp_seconds", about_progress, value=_last_progress(run, rounds)
    )
    limit = config.round.deadline_seconds + config.round.wait_seconds
    about_limit = "Sum of the waiting time and the deadline of a round."
    yield GaugeMetricFamily("shoal_round_limit_seconds", about_limit, value=limit)
    states = Counter(record.state for record in rounds)
    ended = {(state.value,): states[state] for state in sorted(FINAL)}
    yield _counter("shoal_rounds", "Ended rounds by kind of ending.", ["state"], ended)
    yield _round_seconds(rounds)
    refused = {(reason.value,): status.refusals.get(reason.value, 0) for reason in RefusalReason}
    about_refusals = "Refusals by server or device, by reason."
    yield _counter("shoal_refusals", about_refusals, ["reason"], refused)
    sent = {("wire",): run.wire_bytes, ("payload",): run.payload_bytes}
    about_bytes = "Bytes on the server's connection, and the payload among them."
    yield _counter("shoal_bytes", about_bytes, ["kind"], sent)
    yield from _scores(status)


def _last_progress(run: RunRecord, rounds: Sequence[RoundRecord]) -> float:
    """Return the time when the run began or its last round was planned or ended."""
    if not rounds:
        return run.created_at
    newest = rounds[-1]
    return max(run.created_at, newest.ended_at or newest.planned_at)


def _round_seconds(rounds: Sequence[RoundRecord]) -> Metric:
    """Return a histogram of the time from the offers of a round to its end."""
    durations = []
    for record in rounds:
        if record.ended_at and record.opened_at:
            durations.append(record.ended_at - record.opened_at)
    # Durations above the last bound are only in the bucket `+Inf`.
    # The number of a bucket is that of the first bound that a duration does not exceed.
    numbers = Counter(bisect_left(_BUCKET_SECONDS, duration) for duration in durations)
    # Prometheus's buckets are cumulative.
    totals = accumulate(numbers[number] for number in range(len(_BUCKET_SECONDS)))
    bounds = [str(seconds) for seconds in _BUCKET_SECONDS]
    buckets = [*zip(bounds, totals, strict=True), ("+Inf", len(durations))]
    about = "Time from the offers of a round to its end."
    return HistogramMetricFamily(
        "shoal_round_seconds", about, buckets=buckets, sum_value=sum(durations)
    )


def _scores(status: queries.StatusView) -> Iterator[Metric]:
    """Yield accuracy and loss of the newest evaluated version and its tiers."""
    evaluations: dict[str, Any] = {}
    if status.evaluation is not None:
        evaluations = {"": status.evaluation, **status.evaluation.tiers}
    for name in ("accuracy", "loss"):
        values = {}
        for tier, evaluation in evaluations.items():
            value = getattr(evaluation, name)
            if value is not None:
                values[tier] = value
        about = "Newest evaluated version, by tier; without a tier, the whole model."
        yield _gauge(f"shoal_model_{name}", about, "tier", values)


def _device_metrics(views: Sequence[queries.DeviceView]) -> Iterator[Metric]:
    """Yield the metrics of devices in the order of their ids."""
    online: Counter[str] = Counter()
    updates: Counter[tuple[str, ...]] = Counter()
    for number, view in enumerate(views):
        # A bounded number of rows, because every label value costs the database of Prometheus
        # memory.
        name = view.device.id if number < MOST_DEVICES else _OTHERS
        online[name] += view.is_online
        for outcome in ("merged", "missed", "refused"):
            updates[name, outcome] += getattr(view, outcome)
    about_online = (
        "1 if the device is connected; for the shared row, the number of connected devices."
    )
    yield _gauge("shoal_device_online", about_online, "device", online)
    about_updates = "Tasks of each device by outcome."
    yield _counter("shoal_device_updates", about_updates, ["device", "outcome"], updates)
    accuracies = {}
    train_seconds = {}
    # No shared row: a sum of accuracies or times would mean nothing.
    for view in views[:MOST_DEVICES]:
        if view.evaluation and view.evaluation.accuracy is not None:
            accuracies[view.device.id] = view.evaluation.accuracy
        if view.train_seconds is not None:
            train_seconds[view.device.id] = view.train_seconds
    yield _gauge(
        "shoal_device_accuracy", "Accuracy on the device's held-out samples.", "device", accuracies
    )
    about_seconds = "Mean training time in a round."
    yield _gauge("shoal_device_train_seconds", about_seconds, "device", train_seconds)
