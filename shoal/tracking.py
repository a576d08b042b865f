"""Writes the rounds of a run, a fleet's or a simulation's, to TensorBoard, MLflow, OpenTelemetry or
a home.

A home is Home Assistant's, by its discovery over MQTT:
https://www.home-assistant.io/integrations/mqtt/. Its broker is told a run's figures and who is
online, no weights and no samples.
"""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from paho.mqtt import MQTTException, publish

from broker_server.store import RunRecord, Store, queries
from broker_server.store.rows import config_json
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import ConfigError, StorageError, TransportError
from fleet_protocol.messages import Evaluation
from fleet_protocol.spelling import without_login
from fleet_protocol.transport import BrokerAddress

_ROUND_TAG = "shoal.round"
_RUN_TAG = "shoal.run"
_MLFLOW_ENDS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_LONGEST_PARAM, _MOST_PARAMS = 500, 100  # of a batch, by the REST API of MLflow
_COLLECTOR_SECONDS = 10
_SUFFIX = ".shoal"
_EXAMPLES = (
    "tensorboard:FOLDER, mlflow:http://HOST:5000, otlp:http://HOST:4318, homeassistant:mqtt://HOST"
)
_DISCOVERY = "homeassistant/device"
_RUN: Mapping[str, Mapping[str, str]] = {
    "status": {"name": "Run"},
    "round": {"name": "Rounds closed", "state_class": "measurement"},
    "accuracy": {
        "name": "Accuracy",
        "state_class": "measurement",
        "suggested_display_precision": "4",
    },
    "loss": {
        "name": "Loss",
        "state_class": "measurement",
        "suggested_display_precision": "4",
    },
    "online": {"name": "Boards online", "state_class": "measurement"},
}
_BOARD: Mapping[str, Mapping[str, str]] = {
    "online": {"name": "Online", "platform": "binary_sensor", "device_class": "connectivity"},
    "reason": {"name": "Not training because"},
    "tier": {"name": "Tier"},
    "merged": {"name": "Updates merged", "state_class": "total"},
    "temperature": {
        "name": "Temperature", "device_class": "temperature", "unit_of_measurement": "°C", "state_class": "measurement",
    },
}  # fmt: skip


class HomeAssistant:
    """A device for the fleet and one for each board, each with a retained state that is told again
    when it changes.

    Its broker is at ``mqtt://[user:password@]host[:port]``; another form is a ConfigError.
    """

    def __init__(self, address: str) -> None:
        self._broker = BrokerAddress.parse(address)
        self._told: dict[str, str] = {}

    def look(self, opened: Store, run: RunRecord) -> int:
        """Tell what has changed.

        The number of rounds told is that of the run's closed ones, the first time.
        """
        view = queries.status(opened, run.id)
        first = not self._told
        said = dict(self._messages(run, view, queries.devices(opened, run.id)))
        self._publish(
            [
                (topic, text, 1, True)
                for topic, text in said.items()
                if self._told.get(topic) != text
            ]
        )
        self._told = said
        return view.closed if first else 0

    def end(self, _status: str) -> None:
        """The states stay, retained."""

    @staticmethod
    def _messages(
        run: RunRecord, view: queries.StatusView, devices: list[queries.DeviceView]
    ) -> Iterator[tuple[str, str]]:
        judged = view.evaluation
        figures = {
            "status": view.run.status if view.run else run.status,
            "round": view.closed,
            "accuracy": judged.accuracy if judged else None,
            "loss": judged.loss if judged else None,
            "online": view.online,
        }
        fleet = f"shoal_{_safe(run.fleet)}"
        yield from _device(
            fleet, f"Shoal {run.fleet}", f"shoal-state/{run.fleet}/run", _RUN, figures
        )
        for item in devices:
            known = item.device.profile
            states = {
                "online": "ON" if item.device.online else "OFF",
                "reason": item.reason[:255] or "it trains",
                "tier": item.tier,
                "merged": item.merged,
                "temperature": known.temperature_celsius if known else None,
            }
            place = f"shoal-state/{run.fleet}/devices/{_safe(item.device.id)}"
            yield from _device(
                f"{fleet}_{_safe(item.device.id)}",
                item.device.id,
                place,
                _BOARD,
                states,
                fleet,
            )

    def _publish(self, retained: list[Any]) -> None:
        broker = self._broker
        login: Any = (
            {"username": broker.username, "password": broker.password} if broker.username else None
        )
        tls: Any = {"ca_certs": None} if broker.tls else None  # those that the system trusts
        try:
            if retained:
                publish.multiple(retained, broker.host, broker.port, auth=login, tls=tls)
        except (OSError, MQTTException) as error:
            raise TransportError(
                f"the broker of Home Assistant at {broker} has not taken it: {error}"
            ) from error


def _device(
    identity: str,
    name: str,
    place: str,
    parts: Mapping[str, Mapping[str, str]],
    states: Mapping[str, Any],
    through: str | None = None,
) -> Iterator[tuple[str, str]]:
    device = {"identifiers": [identity], "name": name, "manufacturer": "Shoal"}
    found = {
        "device": device if through is None else {**device, "via_device": through},
        "origin": {"name": "shoal", "sw_version": version("shoal")},
        "state_topic": place,
        "components": {
            key: {
                "platform": "sensor",
                "unique_id": f"{identity}_{key}",
                "value_template": f"{{{{ value_json.{key} }}}}",
                **part,
            }
            for key, part in parts.items()
        },
    }
    yield f"{_DISCOVERY}/{identity}/config", json.dumps(found, ensure_ascii=False)
    yield place, json.dumps(states)


def _safe(name: str) -> str:
    """A name in the letters that discovery allows; different names stay different."""
    made = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return made if made == name else f"{made}-{blob_digest(name.encode())[:6]}"


class Writer(Protocol):
    """Where a run is written to."""

    def look(self, opened: Store, run: RunRecord) -> int:
        """Bring it up to date with the store; how many rounds were written."""

    def end(self, status: str, /) -> None:
        """Nothing more comes just now; the status is that of the run."""


def tracking(target: str) -> Writer:
    """Where to write: ``tensorboard:FOLDER``, ``mlflow:ADDRESS``, ``otlp:ADDRESS`` or
    ``homeassistant:ADDRESS``.

    Addresses are of a tracking server, of a collector of traces, and of the broker of a home.

    Raises:
        ConfigError: it is none of these.
        ModuleNotFoundError: the package that writes there is not installed.
    """
    kind, _, place = target.partition(":")
    if kind not in _WRITERS or not place:
        raise ConfigError(f"{target!r} is no place to write to; give one of {_EXAMPLES}")
    return _WRITERS[kind](place)


def track(
    opened: Store,
    run: str | None,
    writer: Writer,
    looks: Callable[[], Iterator[object]],
) -> int:
    """Write the rounds of a run (None: the newest at each look) that have ended by each look.

    How many were written.

    Raises:
        ConfigError: there is no such run.
        StorageError: it cannot be written there.
    """
    written = sum(writer.look(opened, queries.find_run(opened, run)) for _ in looks())
    writer.end(queries.find_run(opened, run).status)
    return written


def values_of(view: queries.RoundView) -> Iterator[tuple[str, float]]:
    """What is known of a round, by name; `model/accuracy` and `round/seconds` for example."""
    judged = view.round.evaluation
    if judged is not None:
        yield from _of_model("model", judged)
        for tier, found in judged.tiers.items():
            yield from _of_model(f"tier/{tier}", found)
    counts = {
        phase: float(view.phases.get(phase, 0))
        for phase in ("merged", "missed", "refused", "declined", "left-out")
    }
    known = {
        **counts,
        "seconds": view.seconds,
        "sent_bytes": view.sent_bytes,
        "received_bytes": view.received_bytes,
    }
    own = {"accuracy": view.device_accuracy, **view.device_metrics}
    named = {f"round/{name}": value for name, value in known.items()} | {
        f"devices/{k}": v for k, v in own.items()
    }
    yield from (
        (name, value)
        for name, value in (named | {"epsilon": view.epsilon}).items()
        if value is not None
    )


def _of_model(name: str, found: Evaluation) -> Iterator[tuple[str, float]]:
    yield f"{name}/loss", found.loss
    if found.accuracy is not None:
        yield f"{name}/accuracy", found.accuracy
    yield from ((f"{name}/{item.name}", item.value) for item in found.metrics)


class _ByRounds(ABC):
    """What is told round by round, each once."""

    _next: int | None = None
    _ended: float | None = None

    @abstractmethod
    def begin(self, run: RunRecord) -> int:
        """The number of the first round that is not there yet."""

    @abstractmethod
    def write(self, view: queries.RoundView) -> None:
        """A round that has ended."""

    def look(self, opened: Store, run: RunRecord) -> int:
        first = self._next = self._next or self.begin(run)
        views, self._ended = (
            queries.rounds(opened, run.id, first=first),
            queries.find_run(opened, run.id).ended_at,
        )
        for view in views:
            known = view.round.evaluation or view.round.note or view.round.reason
            # The newest that ended may be judged still; no round ends before the one before it is
            # judged.
            later = any(
                item.round.ended_at for item in views if item.round.number > view.round.number
            )
            if view.round.ended_at is None or not (known or later or self._ended):
                break
            self.write(view)
            self._next = view.round.number + 1
        return self._next - first


class _TensorBoard(_ByRounds):
    """A folder for each run, written anew each time: event files cannot say what they have."""

    def __init__(self, folder: str) -> None:
        from tensorboardX import SummaryWriter  # noqa: PLC0415  (an extra)

        self._open = SummaryWriter
        self._folder = Path(folder)

    def begin(self, run: RunRecord) -> int:
        place = self._folder / run.id
        try:
            for old in place.glob(f"events.out.tfevents.*{_SUFFIX}"):
                old.unlink()
            self._writer = self._open(str(place), filename_suffix=_SUFFIX)
        except OSError as error:
            raise StorageError(f"cannot write {place}: {error}") from error
        self._writer.add_text("settings", f"```json\n{json.dumps(config_json(run), indent=1)}\n```")
        return 1

    def write(self, view: queries.RoundView) -> None:
        for name, value in values_of(view):
            self._writer.add_scalar(name, value, view.round.number, walltime=view.round.ended_at)
        self._writer.flush()

    def end(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


class _MlFlow(_ByRounds):
    """A run of an experiment named as the fleet is; what is there already is not written again."""

    def __init__(self, address: str) -> None:
        os.environ.setdefault(
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"
        )  # else minutes, when nobody answers
        os.environ.setdefault(
            "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true"
        )  # where our own JSON is read
        from mlflow import MlflowClient  # noqa: PLC0415  (an extra)

        self._address = address
        self._client = self._asked(MlflowClient, tracking_uri=address)

    def begin(self, run: RunRecord) -> int:
        from mlflow.entities import Param  # noqa: PLC0415

        client = self._client
        name = f"shoal/{run.fleet}"
        found = self._asked(client.get_experiment_by_name, name)
        experiment = found.experiment_id if found else self._asked(client.create_experiment, name)
        known = self._asked(client.search_runs, [experiment], f"tags.`{_RUN_TAG}` = '{run.id}'")
        if known:
            self._run = known[0].info.run_id
            return int(known[0].data.tags.get(_ROUND_TAG, "0")) + 1
        tags = {_RUN_TAG: run.id, "model": run.arch}
        self._run = self._asked(
            client.create_run, experiment, int(run.created_at * 1000), tags, run.id
        ).info.run_id
        settings = [
            Param(key, str(value)[:_LONGEST_PARAM])
            for key, value in queries.flat_settings(config_json(run))
        ]
        for at in range(0, len(settings), _MOST_PARAMS):
            self._asked(client.log_batch, self._run, params=settings[at : at + _MOST_PARAMS])
        return 1

    def write(self, view: queries.RoundView) -> None:
        from mlflow.entities import Metric, RunTag  # noqa: PLC0415

        number = view.round.number
        at = int((view.round.ended_at or 0) * 1000)
        numbers = [Metric(name, value, at, number) for name, value in values_of(view)]
        self._asked(
            self._client.log_batch,
            self._run,
            numbers,
            tags=[RunTag(_ROUND_TAG, str(number))],
        )

    def end(self, status: str) -> None:
        if status in _MLFLOW_ENDS:
            ended = int(self._ended * 1000) if self._ended else None
            self._asked(self._client.set_terminated, self._run, _MLFLOW_ENDS[status], ended)

    def _asked(self, ask: Callable[..., Any], *values: Any, **named: Any) -> Any:
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        try:
            return ask(*values, **named)
        except MlflowException as error:
            raise StorageError(
                without_login(f"MLflow at {self._address} has not taken it: {error}")
            ) from error


class _Traces(_ByRounds):
    """A trace of each round: in it a span for the part of each device, and in that what the board
    has measured.
    """

    def __init__(self, address: str) -> None:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415  (an extra)

        self._address = f"{address.rstrip('/')}/v1/traces"
        self._exporter = trace_exporter.OTLPSpanExporter(
            endpoint=self._address, timeout=_COLLECTOR_SECONDS
        )

    def begin(self, run: RunRecord) -> int:
        self._run = run
        return 1

    def write(self, view: queries.RoundView) -> None:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult  # noqa: PLC0415
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: PLC0415
            InMemorySpanExporter,
        )
        from opentelemetry.trace import Span, set_span_in_context  # noqa: PLC0415

        made = InMemorySpanExporter()
        run = self._run
        record = view.round
        given = Resource({"service.name": "shoal", "shoal.fleet": run.fleet, "shoal.run": run.id})
        provider = TracerProvider(resource=given, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(made))
        tracer = provider.get_tracer("shoal")

        def span(
            name: str,
            at: float,
            seconds: float,
            inside: Span | None,
            **values: str | float | None,
        ) -> Span:
            known = {f"shoal.{key}": value for key, value in values.items() if value is not None}
            within = set_span_in_context(inside) if inside is not None else None
            begun = tracer.start_span(name, within, start_time=int(at * 1e9), attributes=known)
            begun.end(int((at + seconds) * 1e9))
            return begun

        began = record.opened_at or record.planned_at
        took = (record.ended_at or began) - began
        whole = span(
            f"round {record.number}",
            began,
            took,
            None,
            round=record.number,
            state=record.state.value,
        )
        if record.ending is not None and record.collect_seconds is not None:
            collected = min(
                record.collect_seconds, took
            )  # a simulation collects on a clock of its own
            span(
                "collect",
                began,
                collected,
                whole,
                wanted=record.wanted,
                quorum=record.quorum,
            )
            span(
                "merge",
                began + collected,
                took - collected,
                whole,
                version=record.version,
            )
        for task in view.tasks:
            ended = (task.timing.answered or task.timing.left) if task.timing else None
            given_up = ended or record.collect_seconds or took
            part = span(task.device, began, min(given_up, took), whole, tier=task.tier, outcome=task.phase.value,
                        why=task.detail, bytes=task.update_size)  # fmt: skip
            if task.metrics is not None:
                fetched = task.metrics.fetch_seconds
                trained = task.metrics.train_seconds
                span("fetch", began, fetched, part, bytes=task.weights.size)
                span(
                    "train",
                    began + fetched,
                    trained,
                    part,
                    examples=task.metrics.examples,
                )
        if self._exporter.export(made.get_finished_spans()) is not SpanExportResult.SUCCESS:
            raise StorageError(
                f"{without_login(self._address)} has not taken the trace of round {record.number}"
            )

    def end(self, _status: str) -> None:
        self._exporter.shutdown()


_WRITERS: Mapping[str, Callable[[str], Writer]] = MappingProxyType(
    {
        "tensorboard": _TensorBoard,
        "mlflow": _MlFlow,
        "otlp": _Traces,
        "homeassistant": HomeAssistant,
    }
)
