"""What Prometheus reads: the newest run and its devices, from the functions that the page uses.

Counters belong to the newest run. They begin again with the next one, as Prometheus expects of a
restart.
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
from broker_server.store.records import DeviceRecord, RunRecord
from broker_server.store.remedies import REVOKED
from fleet_protocol.errors import RefusalReason

MOST_DEVICES = 100
"""Devices that have rows of their own: the first by id. All others are one row."""

MOST_STATES = 20
"""States of devices that have rows of their own: the most common. All others are one row."""

_BROKER_TROUBLES = ("broker-lost", "blob-delayed", "inbox-full")
"""Kinds of lines in the log."""
_OTHERS = "(others)"
"""Name of the row that stands for several; an id of a device has no parentheses."""
_BUCKET_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 14400)


@dataclass(frozen=True)
class StoreMetrics:
    """A collector of prometheus-client over an open store."""

    store: Store

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now; without a run those of devices and process alone."""
        views = queries.devices(self.store)
        states = Counter(_state(view.device) for view in views)
        # Devices name their own states, so there may be any number.
        for state, _ in states.most_common()[MOST_STATES:]:
            states[_OTHERS] += states.pop(state)
        yield _gauge("shoal_devices", "Devices by the state of their agent.", "state", states)
        tiers = Counter(view.tier for view in views if view.tier)
        about_tiers = "Devices by the tier that they were last given."
        yield _gauge("shoal_tier_devices", about_tiers, "tier", tiers)
        yield from ProcessCollector(registry=None).collect()
        status = queries.status(self.store)
        if status.run is None:
            return
        yield from _run_metrics(status, status.run, self.store.rounds(status.run.id))
        lines = self.store.count_lines(status.run.id, _BROKER_TROUBLES)
        troubles = {(kind,): lines.get(kind, 0) for kind in _BROKER_TROUBLES}
        about_troubles = "What went wrong between server and broker."
        yield _counter("shoal_broker_troubles", about_troubles, ["kind"], troubles)
        yield from _device_metrics(sorted(views, key=lambda view: view.device.id))


def _state(device: DeviceRecord) -> str:
    """Return the state of a device's agent."""
    if device.online or device.state == REVOKED:
        return device.state
    return "offline"


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
    """Yield what is known of the newest run."""
    config = FleetConfig.stored(run.config)
    labels = ["fleet", "run", "model", "strategy", "status"]
    info = GaugeMetricFamily("shoal_run_info", "1.", labels=labels)
    info.add_metric([run.fleet, run.id, run.arch, config.strategy.name, run.status], 1)
    yield info
    is_running = run.status == "running"
    about_active = "1 while the run is in progress."
    yield GaugeMetricFamily("shoal_run_active", about_active, value=is_running)
    about_wanted = "Rounds that the run is to close."
    yield GaugeMetricFamily("shoal_rounds_wanted", about_wanted, value=status.rounds)
    about_progress = "When its rounds moved last, in Unix time."
    yield GaugeMetricFamily(
        "shoal_progress_timestamp_seconds", about_progress, value=_last_progress(run, rounds)
    )
    limit = config.round.deadline_seconds + config.round.wait_seconds
    about_limit = "Waiting time and deadline of a round together."
    yield GaugeMetricFamily("shoal_round_limit_seconds", about_limit, value=limit)
    states = Counter(record.state for record in rounds)
    ended = {(state.value,): states[state] for state in sorted(FINAL)}
    yield _counter("shoal_rounds", "Rounds that ended, by how.", ["state"], ended)
    yield _round_seconds(rounds)
    refused = {(reason.value,): status.refusals.get(reason.value, 0) for reason in RefusalReason}
    about_refusals = "What was refused, by server or device, by reason."
    yield _counter("shoal_refusals", about_refusals, ["reason"], refused)
    sent = {("wire",): run.wire_bytes, ("payload",): run.payload_bytes}
    about_bytes = "On the server's connection, and of it what was to be sent."
    yield _counter("shoal_bytes", about_bytes, ["kind"], sent)
    yield from _scores(status)


def _last_progress(run: RunRecord, rounds: Sequence[RoundRecord]) -> float:
    """Return when the run began, or its last round was planned or ended."""
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
    # Longer durations than the last bound are in the bucket `+Inf` alone.
    numbers = Counter(bisect_left(_BUCKET_SECONDS, duration) for duration in durations)
    totals = accumulate(numbers[number] for number in range(len(_BUCKET_SECONDS)))
    bounds = [str(seconds) for seconds in _BUCKET_SECONDS]
    buckets = [*zip(bounds, totals, strict=True), ("+Inf", len(durations))]
    about = "From the offers of a round to its end."
    return HistogramMetricFamily(
        "shoal_round_seconds", about, buckets=buckets, sum_value=sum(durations)
    )


def _scores(status: queries.StatusView) -> Iterator[Metric]:
    """Yield accuracy and loss of the newest judged version, whole and of its tiers."""
    evaluations: dict[str, Any] = {}
    if status.evaluation is not None:
        evaluations = {"": status.evaluation, **status.evaluation.tiers}
    for name in ("accuracy", "loss"):
        values = {}
        for tier, evaluation in evaluations.items():
            value = getattr(evaluation, name)
            if value is not None:
                values[tier] = value
        about = "Of the newest judged version; by tier, without one whole."
        yield _gauge(f"shoal_model_{name}", about, "tier", values)


def _device_metrics(views: Sequence[queries.DeviceView]) -> Iterator[Metric]:
    """Yield what is known of devices, in the order of their ids."""
    online: Counter[str] = Counter()
    updates: Counter[tuple[str, ...]] = Counter()
    for number, view in enumerate(views):
        name = view.device.id if number < MOST_DEVICES else _OTHERS
        online[name] += view.device.online
        for outcome in ("merged", "missed", "refused"):
            updates[name, outcome] += getattr(view, outcome)
    about_online = "Whether it is connected; of others, how many are."
    yield _gauge("shoal_device_online", about_online, "device", online)
    about_updates = "Of each device, by what became of them."
    yield _counter("shoal_device_updates", about_updates, ["device", "outcome"], updates)
    accuracies = {}
    train_seconds = {}
    for view in views[:MOST_DEVICES]:
        if view.evaluation and view.evaluation.accuracy is not None:
            accuracies[view.device.id] = view.evaluation.accuracy
        if view.train_seconds is not None:
            train_seconds[view.device.id] = view.train_seconds
    yield _gauge("shoal_device_accuracy", "On its own held-out samples.", "device", accuracies)
    about_seconds = "Mean time of training in a round."
    yield _gauge("shoal_device_train_seconds", about_seconds, "device", train_seconds)
