"""What Prometheus reads: the newest run and its devices, from the functions that the page is drawn
with.

Counters belong to the newest run, so they begin again with the next one, as Prometheus expects of a
restart.
"""

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
from broker_server.store.remedies import REVOKED
from fleet_protocol.errors import RefusalReason

MOST_DEVICES = 100
"""Devices that have rows of their own; of more the first by id have, and the others are one row."""

MOST_STATES = 20
"""States of devices that have rows of their own; likewise."""

_TROUBLES = ("broker-lost", "blob-delayed", "inbox-full")  # lines of the log
_OTHERS = "(others)"  # no device is called so
_BUCKETS = (1, 5, 15, 60, 300, 900, 3600, 14400)  # seconds of a round


@dataclass(frozen=True)
class StoreMetrics:
    """A collector of prometheus-client over an open store."""

    store: Store

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now; without a run those of the devices alone."""
        views = queries.devices(self.store)
        known = (view.device for view in views)
        states = Counter(
            each.state if each.online or each.state == REVOKED else "offline" for each in known
        )
        for state, _ in states.most_common()[MOST_STATES:]:  # devices say what they like
            states[_OTHERS] += states.pop(state)
        yield _gauge("shoal_devices", "Devices by the state of their agent.", "state", states)
        tiers = Counter(view.tier for view in views if view.tier)
        yield _gauge(
            "shoal_tier_devices",
            "Devices by the tier that they were last given.",
            "tier",
            tiers,
        )
        yield from ProcessCollector(registry=None).collect()
        view = queries.status(self.store)
        if view.run is not None:
            yield from _run(view, view.run, self.store.rounds(view.run.id))
            counts = self.store.count_lines(view.run.id, _TROUBLES)
            troubles = {(kind,): counts.get(kind, 0) for kind in _TROUBLES}
            yield _counter(
                "shoal_broker_troubles",
                "What went wrong between server and broker.",
                ["kind"],
                troubles,
            )
            yield from _devices(sorted(views, key=lambda item: item.device.id))


def _gauge(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(
        GaugeMetricFamily(name, about, labels=[label]),
        {(key,): value for key, value in values.items()},
    )


def _counter(name: str, about: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    return _filled(CounterMetricFamily(name, about, labels=labels), values)


def _filled(made: Any, values: Mapping[Any, float]) -> Metric:
    for keys, value in values.items():
        made.add_metric(keys, value)
    return made  # type: ignore[no-any-return]


def _run(
    view: queries.StatusView, run: RunRecord, rounds: Sequence[RoundRecord]
) -> Iterator[Metric]:
    config = FleetConfig.stored(run.config)
    info = GaugeMetricFamily(
        "shoal_run_info", "1.", labels=["fleet", "run", "model", "strategy", "status"]
    )
    info.add_metric([run.fleet, run.id, run.arch, config.strategy.name, run.status], 1)
    yield info
    yield GaugeMetricFamily(
        "shoal_run_active",
        "1 while the run is in progress.",
        value=run.status == "running",
    )
    yield GaugeMetricFamily(
        "shoal_rounds_wanted", "Rounds that the run is to close.", value=view.rounds
    )
    moved = max([run.created_at, *(item.ended_at or item.planned_at for item in rounds[-1:])])
    yield GaugeMetricFamily(
        "shoal_progress_timestamp_seconds",
        "When its rounds moved last, in Unix time.",
        value=moved,
    )
    limit = config.round.deadline_seconds + config.round.wait_seconds
    yield GaugeMetricFamily(
        "shoal_round_limit_seconds",
        "Waiting time and deadline of a round together.",
        value=limit,
    )
    ended = {(state.value,): sum(item.state is state for item in rounds) for state in sorted(FINAL)}
    yield _counter("shoal_rounds", "Rounds that ended, by how.", ["state"], ended)
    took = [item.ended_at - item.opened_at for item in rounds if item.ended_at and item.opened_at]
    counts = accumulate(
        Counter(next((b for b in _BUCKETS if value <= b), 0) for value in took)[b] for b in _BUCKETS
    )
    buckets = [*zip(map(str, _BUCKETS), counts, strict=True), ("+Inf", len(took))]
    about = "From the offers of a round to its end."
    yield HistogramMetricFamily("shoal_round_seconds", about, buckets=buckets, sum_value=sum(took))
    refused = {(reason.value,): view.refusals.get(reason.value, 0) for reason in RefusalReason}
    yield _counter(
        "shoal_refusals",
        "What was refused, by server or device, by reason.",
        ["reason"],
        refused,
    )
    sent = {("wire",): run.wire_bytes, ("payload",): run.payload_bytes}
    yield _counter(
        "shoal_bytes",
        "On the server's connection, and of it what was to be sent.",
        ["kind"],
        sent,
    )
    judged = {} if view.evaluation is None else {"": view.evaluation, **view.evaluation.tiers}
    for name in ("accuracy", "loss"):
        values = {
            tier: value
            for tier, item in judged.items()
            if (value := getattr(item, name)) is not None
        }
        yield _gauge(
            f"shoal_model_{name}",
            "Of the newest judged version; by tier, without one whole.",
            "tier",
            values,
        )


def _devices(views: Sequence[queries.DeviceView]) -> Iterator[Metric]:
    def name(at: int, view: queries.DeviceView) -> str:
        return view.device.id if at < MOST_DEVICES else _OTHERS

    online: Counter[str] = Counter()
    updates: Counter[tuple[str, ...]] = Counter()
    for at, view in enumerate(views):
        online[name(at, view)] += view.device.online
        for outcome in ("merged", "missed", "refused"):
            updates[name(at, view), outcome] += getattr(view, outcome)
    yield _gauge(
        "shoal_device_online",
        "Whether it is connected; of others, how many are.",
        "device",
        online,
    )
    yield _counter(
        "shoal_device_updates",
        "Of each device, by what became of them.",
        ["device", "outcome"],
        updates,
    )
    own = {
        view.device.id: view.evaluation.accuracy for view in views[:MOST_DEVICES] if view.evaluation
    }
    accuracies = {device: value for device, value in own.items() if value is not None}
    yield _gauge("shoal_device_accuracy", "On its own held-out samples.", "device", accuracies)
    trained = {
        view.device.id: view.train_seconds
        for view in views[:MOST_DEVICES]
        if view.train_seconds is not None
    }
    yield _gauge(
        "shoal_device_train_seconds",
        "Mean time of training in a round.",
        "device",
        trained,
    )
