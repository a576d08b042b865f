"""Writes each round of a run as a trace to a collector of OpenTelemetry."""

from dataclasses import dataclass
from typing import Any

from broker_server.store import RoundRecord, RunRecord, TaskRecord, queries
from fleet_protocol.errors import StorageError
from fleet_protocol.spelling import without_login
from shoal.tracking.writer import RoundWriter

_COLLECTOR_SECONDS = 10


class Traces(RoundWriter):
    """A trace for each round, with a span for each device and spans of the board's measurements."""

    def __init__(self, address: str) -> None:
        from opentelemetry.exporter.otlp.proto.http import (  # noqa: PLC0415  (an extra)
            trace_exporter,
        )

        self._address = f"{address.rstrip('/')}/v1/traces"
        self._exporter = trace_exporter.OTLPSpanExporter(
            endpoint=self._address, timeout=_COLLECTOR_SECONDS
        )

    def begin(self, run: RunRecord) -> int:
        """Remember the run; every round of it is written."""
        self._run = run
        return 1

    def write(self, view: queries.RoundView) -> None:
        """Send the trace of a round."""
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415

        trace = _Trace(self._run)
        record = view.round
        began = record.opened_at or record.planned_at
        seconds = (record.ended_at or began) - began
        whole = trace.add_span(
            f"round {record.number}",
            began,
            seconds,
            round=record.number,
            state=record.state.value,
        )
        _add_stages(trace, whole, record, began, seconds)
        times = _RoundTimes(began, record.collect_seconds or seconds, seconds)
        for task in view.tasks:
            _add_task(trace, whole, task, times)
        # The exporter reports failures by its result, and does not raise.
        if self._exporter.export(trace.spans()) is not SpanExportResult.SUCCESS:
            raise StorageError(
                f"{without_login(self._address)} did not accept the trace of round {record.number}"
            )

    def end(self, _status: str) -> None:
        """Close the connection to the collector."""
        self._exporter.shutdown()


class _Trace:
    """The spans of one round."""

    def __init__(self, run: RunRecord) -> None:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: PLC0415
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: PLC0415
            InMemorySpanExporter,
        )

        # Spans are collected here and sent in one request.
        self._finished = InMemorySpanExporter()
        resource = Resource(
            {"service.name": "shoal", "shoal.fleet": run.fleet, "shoal.run": run.id}
        )
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._finished))
        self._tracer = provider.get_tracer("shoal")

    def add_span(
        self,
        name: str,
        start: float,
        seconds: float,
        parent: Any = None,
        **attributes: str | float | None,
    ) -> Any:
        """Add a span with its known attributes, and return it.

        Args:
            name: name of the span.
            start: start time in seconds since 1970.
            seconds: its duration.
            parent: the span around it, if any.
            attributes: values by name; None for unknown ones.
        """
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        named = {}
        for key, value in attributes.items():
            if value is not None:
                named[f"shoal.{key}"] = value
        context = None if parent is None else set_span_in_context(parent)
        # Nanoseconds since 1970.
        span = self._tracer.start_span(name, context, start_time=int(start * 1e9), attributes=named)
        span.end(int((start + seconds) * 1e9))
        return span

    def spans(self) -> Any:
        """Return all spans."""
        return self._finished.get_finished_spans()


def _add_stages(
    trace: _Trace, whole: Any, record: RoundRecord, began: float, seconds: float
) -> None:
    """Add the spans of collecting and merging, if the round collected updates."""
    if record.ending is None or record.collect_seconds is None:
        return
    # A simulation has its own clock, on which more time may pass than in reality.
    collected = min(record.collect_seconds, seconds)
    trace.add_span("collect", began, collected, whole, wanted=record.wanted, quorum=record.quorum)
    trace.add_span("merge", began + collected, seconds - collected, whole, version=record.version)


@dataclass(frozen=True)
class _RoundTimes:
    """When a round began, and how long it lasted.

    Attributes:
        began: in seconds since the epoch.
        given_up: seconds after which the server stopped waiting for a device that had not answered.
        most: duration of the round in seconds.
    """

    began: float
    given_up: float
    most: float


def _add_task(trace: _Trace, whole: Any, task: TaskRecord, times: _RoundTimes) -> None:
    """Add the span of a device, and of what it measured.

    Args:
        trace: the trace of the round.
        whole: the span of the round.
        task: what the device was to do.
        times: times of the round.
    """
    ended = None
    if task.timing:
        # A device that answered after the end of the round does not extend its span.
        ended = task.timing.answered or task.timing.left
    span = trace.add_span(
        task.device,
        times.began,
        min(ended or times.given_up, times.most),
        whole,
        tier=task.tier,
        outcome=task.phase.value,
        why=task.detail,
        bytes=task.update_size,
    )
    if task.metrics is None:
        return
    fetch_seconds = task.metrics.fetch_seconds
    trace.add_span("fetch", times.began, fetch_seconds, span, bytes=task.weights.size)
    trace.add_span(
        "train",
        times.began + fetch_seconds,
        task.metrics.train_seconds,
        span,
        examples=task.metrics.examples,
    )
