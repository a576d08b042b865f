"""The rounds of a run in the files of TensorBoard and MLflow, each once, and as traces at a
collector.
"""

import gzip
import json
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from paho.mqtt.subscribe import simple
from sqlalchemy import select, update

from broker_server.store import Store, schema
from broker_server.store.queries import devices, rounds
from fleet_protocol.locks import held
from shoal.tracking import values_of
from shoal.tracking.home_assistant import _safe
from tests.brokers import mosquitto_broker
from tests.shoal.view.stores import RUN, made

pytest.importorskip("tensorboardX")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
mlflow = pytest.importorskip("mlflow")


@pytest.fixture
def store(tmp_path):
    return made(tmp_path, rounds=3)


def finish(store, at=None):
    with closing(Store(store)) as opened, opened._begin() as connection:
        connection.execute(
            update(schema.runs).values(status="finished", ended_at=at or time.time())
        )
        closed = schema.rounds.update().where(schema.rounds.c.number == 4)
        connection.execute(closed.values(state="closed", ended_at=time.time()))


def events_of(folder):
    """Event files are records: length, its sum, an event, its sum."""
    from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415

    (path,) = folder.glob("events.out.tfevents.*")
    data = path.read_bytes()
    at = 0
    events = []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        events.append(Event.FromString(data[at + 12 : at + 12 + length]))
        at += length + 16
    return events


def scalars_of(folder):
    return {
        (event.step, value.tag): value.simple_value
        for event in events_of(folder)
        for value in event.summary.value
        if value.HasField("simple_value")
    }


def test_tensorboard_has_every_round_that_has_ended(store, typed, tmp_path):
    """By name and round, once however often it is asked for; the folder is the run's, others are
    left alone.
    """
    board = tmp_path / "board"
    board.mkdir()
    (board / "other").write_text("mine")
    for count in (3, 4):
        done = typed("track", f"tensorboard:{board}", "--store", store, "--json")
        assert json.loads(done.stdout) == {
            "run": RUN,
            "target": f"tensorboard:{board}",
            "rounds": count,
        }, done.stderr
        scalars = scalars_of(board / RUN)
        assert {step for step, _ in scalars} == set(range(1, count + 1))
        if count == 3:
            finish(store)
    with closing(Store(store, read_only=True)) as opened:
        views = rounds(opened)
    expected = {
        (view.round.number, name): value for view in views for name, value in values_of(view)
    }
    assert scalars == pytest.approx(expected)
    assert {
        "model/accuracy",
        "model/f1",
        "tier/w0.50-d1/loss",
        "devices/accuracy",
        "round/merged",
    } <= {name for _, name in scalars}
    assert (board / "other").read_text() == "mine"


def test_mlflow_has_every_round_once(store, typed, tmp_path, monkeypatch):
    """A second call goes on where the first has ended, and ends the run when it has."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    address = (tmp_path / "mlruns").as_uri()
    assert "3 rounds of run" in typed("track", f"mlflow:{address}", "--store", store).stdout
    finish(store, at=1_790_000_000.25)
    assert "1 rounds of run" in typed("track", f"mlflow:{address}", "--store", store).stdout
    assert "0 rounds of run" in typed("track", f"mlflow:{address}", "--store", store).stdout
    client = mlflow.MlflowClient(tracking_uri=address)
    (experiment,) = [
        measured for measured in client.search_experiments() if measured.name == "shoal/lab"
    ]
    (tracked_run,) = client.search_runs([experiment.experiment_id])
    assert (tracked_run.info.run_name, tracked_run.info.status, tracked_run.info.end_time) == (
        RUN,
        "FINISHED",
        1_790_000_000_250,
    )
    assert tracked_run.data.params["strategy.name"] == "fedrolex"
    history = client.get_metric_history(tracked_run.info.run_id, "model/accuracy")
    assert [(measured.step, round(measured.value, 4)) for measured in history] == [
        (1, 0.6),
        (2, 0.7),
        (3, 0.75),
    ]
    assert len(client.get_metric_history(tracked_run.info.run_id, "round/merged")) == 4


def test_a_collector_has_a_trace_of_each_round(store, typed):
    """The round, in it the part of each device with its outcome, in it what the board measured,
    none outside of it.
    """
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: PLC0415

    taken = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["Content-Length"]))
            data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
            taken.append((self.path, ExportTraceServiceRequest.FromString(data)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with (
        closing(Store(store)) as opened,
        opened._begin() as connection,
    ):  # a simulation's answers go by its own clock
        late = update(schema.tasks).where(
            schema.tasks.c.round == 1, schema.tasks.c.phase == "merged"
        )
        assert connection.execute(late.values(timing='{"answered": 900}')).rowcount
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        done = typed("track", f"otlp:http://127.0.0.1:{server.server_port}", "--store", store)
        server.shutdown()
        thread.join(10)
    assert "3 rounds of run" in done.stdout, done.stderr
    assert {path for path, _ in taken} == {"/v1/traces"}
    with closing(Store(store, read_only=True)) as opened:
        views = rounds(opened, last=3)
    for view, (_, request) in zip(views, taken, strict=True):
        (scope,) = request.resource_spans[0].scope_spans
        spans = {span.span_id: span for span in scope.spans}
        names = {view.round.number: f"round {view.round.number}"}
        (whole,) = [span for span in spans.values() if not span.parent_span_id]
        assert whole.name == names[view.round.number]
        children = {
            span.name: span for span in spans.values() if span.parent_span_id == whole.span_id
        }
        collected, merged = children.pop("collect"), children.pop("merge")  # the server's own part
        assert (
            whole.start_time_unix_nano
            == collected.start_time_unix_nano
            < collected.end_time_unix_nano
        )
        assert collected.end_time_unix_nano == merged.start_time_unix_nano
        assert merged.end_time_unix_nano == pytest.approx(whole.end_time_unix_nano, abs=1000)
        assert sorted(children) == [task.device for task in view.tasks]
        for task in view.tasks:
            attributes = {
                attribute.key: attribute.value.string_value
                for attribute in children[task.device].attributes
            }
            assert attributes["shoal.outcome"] == task.phase.value
            inner = [
                span
                for span in spans.values()
                if span.parent_span_id == children[task.device].span_id
            ]
            assert [span.name for span in inner] == (["fetch", "train"] if task.metrics else [])
        assert len({span.trace_id for span in spans.values()}) == 1
        assert all(
            whole.start_time_unix_nano <= span.start_time_unix_nano
            and span.end_time_unix_nano <= whole.end_time_unix_nano + 1000
            for span in spans.values()
        )
    assert (
        len({request.resource_spans[0].scope_spans[0].spans[0].trace_id for _, request in taken})
        == 3
    )


def test_every_outcome_of_a_task_is_a_value_of_its_round(store):
    """Those that a device declined or a merge left out were in no value, and the counts did not add
    up.
    """
    phases = ("merged", "missed", "refused", "declined", "left-out")
    with closing(Store(store)) as opened:
        with opened._begin() as connection:
            asked = (
                connection.execute(select(schema.tasks.c.id).where(schema.tasks.c.round == 1))
                .scalars()
                .all()
            )
            for task, phase in zip(asked, ("declined", "left-out", "left-out"), strict=False):
                connection.execute(
                    update(schema.tasks).where(schema.tasks.c.id == task).values(phase=phase)
                )
        view = rounds(opened)[0]
    values = dict(values_of(view))
    assert (view.round.number, values["round/declined"], values["round/left-out"]) == (1, 1, 2)
    assert sum(values[f"round/{phase}"] for phase in phases) == len(view.tasks) == len(asked)


def test_a_home_finds_the_fleet_and_its_boards(store, typed, tmp_path):
    """Configurations and states are retained, a state has what its components read, and names are
    legal in topics.
    """
    with mosquitto_broker(tmp_path) as broker:
        with held(store, "a server works here"):
            done = typed(
                "track",
                f"homeassistant:{broker.url.replace('//', '//me:secret@')}",
                "--store",
                store,
            )
        assert "3 rounds of run" in done.stdout, done.stderr
        assert "secret" not in done.stdout + done.stderr
        with closing(Store(store, read_only=True)) as opened:
            fleet_devices = devices(opened)
        topics = ["homeassistant/#", "shoal-state/#"]
        messages = simple(
            topics, msg_count=2 + 2 * len(fleet_devices), port=broker.port, hostname="127.0.0.1"
        )
        heard = {message.topic: message for message in messages}
    assert all(message.retain for message in heard.values())
    configs = {
        topic: json.loads(message.payload)
        for topic, message in heard.items()
        if topic.startswith("homeassistant/")
    }
    assert len(configs) == 1 + len(fleet_devices)
    uniques = []
    about = {"identifiers", "name", "manufacturer", "via_device"}
    shown = {"platform", "unique_id", "value_template", "name", "state_class", "device_class"}
    for topic, discovery in configs.items():
        # The keys that Home Assistant knows of a device discovery; it refuses a message with
        # another.
        assert discovery.keys() == {"device", "origin", "state_topic", "components"}
        assert {"identifiers", "name"} <= discovery["device"].keys() <= about
        assert isinstance(discovery["device"]["identifiers"], list)
        assert discovery["origin"].keys() == {"name", "sw_version"}
        for component in discovery["components"].values():
            assert component["platform"] in {"sensor", "binary_sensor"}
            assert component.keys() <= shown | {
                "suggested_display_precision",
                "unit_of_measurement",
            }
            assert component.get("state_class", "total") in {
                "measurement",
                "total",
                "total_increasing",
            }
        assert re.fullmatch(r"homeassistant/device/[A-Za-z0-9_-]+/config", topic)
        state = json.loads(heard[discovery["state_topic"]].payload)
        for key, component in discovery["components"].items():
            assert component["value_template"] == "{{ value_json." + key + " }}"
            assert key in state
            uniques.append(component["unique_id"])
    assert len(set(uniques)) == len(uniques)
    assert [_safe(name) for name in ("pi-1", "a_b")] == ["pi-1", "a_b"]
    assert re.fullmatch("a_b-[0-9a-f]{6}", _safe("a.b"))
    run = json.loads(heard["shoal-state/lab/run"].payload)
    assert run == {"status": "running", "round": 3, "accuracy": 0.75, "loss": 0.5, "online": 5}
    away = json.loads(heard["shoal-state/lab/devices/pi-0004"].payload)
    assert (away["online"], away["reason"]) == ("OFF", "offline")


def test_a_home_that_is_watched_sees_the_next_run(store, tmp_path):
    """It had ended with the run, and left boards that are away as online in the home."""
    finish(store)
    with mosquitto_broker(tmp_path) as broker:
        words = ("track", f"homeassistant:{broker.url}", "--store", store, "--watch")
        with subprocess.Popen(
            [sys.executable, "-m", "shoal", *words], stderr=subprocess.DEVNULL
        ) as watching:
            try:
                run_topic = "shoal-state/lab/run"
                first = simple([run_topic], port=broker.port, hostname="127.0.0.1")
                assert json.loads(first.payload)["status"] == "finished"
                with closing(Store(store)) as opened, opened._begin() as connection:
                    connection.execute(update(schema.devices).values(online=False))
                    connection.execute(update(schema.runs).values(status="running", ended_at=None))
                give_up = time.monotonic() + 60
                while json.loads(
                    simple([run_topic], port=broker.port, hostname="127.0.0.1").payload
                )["online"]:
                    assert time.monotonic() < give_up
                assert watching.poll() is None
            finally:
                watching.send_signal(signal.SIGINT)
                assert watching.wait(30) == 0


def test_a_place_that_is_none_says_which_there_are(store, typed, tmp_path):
    """So does one that cannot be written."""
    done = typed("track", "wandb:here", "--store", store)
    assert done.returncode == 2
    assert (
        "give one of tensorboard:FOLDER, mlflow:http://HOST:5000, otlp:http://HOST:4318, "
        "homeassistant:mqtt://HOST" in " ".join(done.stderr.split())
    )
    (tmp_path / "file").write_text("")
    done = typed("track", f"tensorboard:{tmp_path / 'file'}", "--store", store)
    assert (done.returncode, "cannot write" in done.stderr) == (7, True), done.stderr


@pytest.mark.slow
def test_nobody_who_answers_is_said(store, typed):
    """After a try or two, and without the password."""
    for target in (
        "mlflow:http://u:p@ss@127.0.0.1:1",
        "otlp:http://u:p@ss@127.0.0.1:1",
        "homeassistant:mqtt://127.0.0.1:1",
    ):
        done = typed("track", target, "--store", store)
        assert "did not accept" in " ".join(done.stderr.split())
        assert "ss@" not in done.stderr
        assert done.returncode == (5 if target.startswith("home") else 7)
