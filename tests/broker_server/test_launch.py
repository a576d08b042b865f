"""`shoal up` and `shoal run` below the command line: serving, submitting, stopping, looking at what
was stored.
"""

import contextlib
import json
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from broker_server.service import following, runs
from broker_server.service.embedded_broker import EmbeddedBroker
from broker_server.service.following import Follower, RunRejectedError
from broker_server.service.launch import (
    run_fleet,
    serve_fleet,
    server_status,
    steer,
    submit,
)
from broker_server.service.membership import broker_address
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.requested import RequestedSettings
from broker_server.store import RunRecord, Store, VersionRecord, queries
from broker_server.store.export import export_safetensors, load_version
from fleet_protocol import control, requests
from fleet_protocol.errors import ConfigError, RefusalReason, TransportError
from fleet_protocol.link import Link
from fleet_protocol.messages import ServerStatus
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Disconnected, Received
from tests.broker_server.peer import Peer, honest, profile, silent
from tests.brokers import free_port

ROOT = Path(__file__).parents[2]
SERVE = """
import sys
from pathlib import Path
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.requested import RequestedSettings
from broker_server.service.launch import serve_fleet
fleet, store, port = sys.argv[1:]
serve_fleet(fleet, Path(store), BrokerConfig(port=int(port)), on_ready=lambda _server: print("ready", flush=True))
"""


class Serving:
    """A server that takes requests, in a thread."""

    def __init__(self, config, url):
        broker = BrokerConfig(url=url, insecure=config.broker.insecure)
        self.server = Server(config.fleet, config.store, broker, own=config)

    def __enter__(self):
        self.server.__enter__()
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.server.__exit__(None, None, None)


def test_a_run_is_submitted_to_the_server_that_is_up(url, config, fleet):
    """The follower sees the events of its run and gets its result; another request meanwhile is
    rejected. The name belongs to the first run, and not to one that is started like it.
    """
    settings = config(evaluation={"data": None}, broker={"url": url}, run_name="baseline")
    events = []
    rejected = []

    def busy(peer, work):
        if not rejected:  # the run that is started again may ask, too
            with pytest.raises(RunRejectedError, match="another run is in progress") as error:
                submit(settings)
            rejected.append(error.value)
        honest()(peer, work)

    with Serving(settings, url), Peer(fleet, "d", url, busy):
        assert server_status(broker_address(settings.broker), fleet).online
        finished = run_fleet(settings, listener=events.append)
        again = steer(settings, "start")
        with contextlib.closing(Store(settings.store, read_only=True)) as store:
            assert [run.name for run in store.runs()] == [None, "baseline"]
            assert queries.find_run(store, "baseline").id == finished.run
    assert finished.status == "finished"
    assert again != finished.run
    assert len(rejected) == 1
    kinds = [event.type for event in events]
    assert kinds[0] == "run-started"
    assert kinds[-1] == "run-finished"
    assert {
        "round-started",
        "device-accepted",
        "device-progressed",
        "update-received",
        "round-closed",
    } <= set(kinds)
    assert len({event.run for event in events}) == 1
    assert not server_status(broker_address(settings.broker), fleet).online


def test_a_request_that_comes_again_is_answered_once(url, config, fleet):
    """A broker repeats what it has no acknowledgement of: the run was told that another, itself, is
    in progress.
    """
    settings = config(evaluation={"data": None}, broker={"url": url, "insecure": True})
    wanted = RequestedSettings.from_config(settings)
    request = requests.RunRequest(
        request="r1", fleet=fleet, settings=wanted.settings, others=wanted.others
    )
    inbox = queue.SimpleQueue()
    told = []
    link = Link(BrokerAddress.parse(url), f"twice-{fleet}", inbox)
    with Serving(settings, url), Peer(fleet, "d", url, honest()), contextlib.closing(link):
        link.connect(10)
        link.subscribe(Topics(fleet).server_events)
        for _ in range(2):
            link.publish(Topics(fleet).server_control, request.to_bytes())
        while "run-finished" not in told:
            event = inbox.get(timeout=30)
            if isinstance(event, Received):
                told.append(control.parse_run_event(event.payload).type)
    assert told[0] == "run-started"
    assert "run-rejected" not in told


def run_started(run, request):
    return control.RunStarted(
        run=run, seconds=0, request=request, arch="a", strategy="s", rounds=9, closed=0
    )


@pytest.mark.parametrize("now", [None, "r2"])
def test_who_missed_the_end_of_a_run_does_not_wait_for_ever(now, monkeypatch):
    """Its server is there, and has no run or another one by now, of which it tells."""
    monkeypatch.setattr(following, "AWAY_SECONDS", 0.3)
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(following, "NOTICE_SECONDS", 0.0)
    topics = Topics("lab")
    inbox = queue.SimpleQueue()

    def says(run):
        return Received(
            topics.server_status, ServerStatus(fleet="lab", online=True, run=run).to_bytes()
        )

    for event in (run_started("r1", "mine"), says("r1"), says(now), run_started("r2", "another's")):
        inbox.put(
            event
            if isinstance(event, Received)
            else Received(topics.server_events, event.to_bytes())
        )
    outcome = queue.SimpleQueue()
    lines = []

    def follow():
        try:
            follower = Follower(topics, "mine", lambda _event: None, lines.append)
            outcome.put(follower.follow(inbox))
        except TransportError as error:
            outcome.put(error)

    threading.Thread(target=follow, daemon=True).start()
    error = str(outcome.get(timeout=60))
    assert "has been offline for too long" in error
    # The user learns at once what to do, and not only when the command gives up.
    (line,) = lines
    for text in (line, error):
        assert "`shoal up`" in text
        assert "continues run r1" in text


def test_a_server_that_is_back_is_mentioned_only_after_its_absence(monkeypatch):
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(following, "NOTICE_SECONDS", 0.05)
    topics = Topics("lab")
    inbox = queue.SimpleQueue()
    lines = queue.SimpleQueue()

    def status(run):
        present = ServerStatus(fleet="lab", online=True, run=run)
        return Received(topics.server_status, present.to_bytes())

    inbox.put(Received(topics.server_events, run_started("r1", "mine").to_bytes()))
    inbox.put(status("r1"))
    inbox.put(Disconnected("the server has stopped"))
    follower = Follower(topics, "mine", lambda _event: None, lines.put)
    threading.Thread(target=follower.follow, args=(inbox,), daemon=True).start()
    assert "does not answer" in lines.get(timeout=20)
    inbox.put(status("r1"))
    assert "is back" in lines.get(timeout=20)


def test_a_second_server_of_a_fleet_learns_of_the_first_and_not_of_signatures(
    url, config, fleet, tmp_path
):
    """The request goes to the first, which refuses it for a reason that helps nobody here."""
    first = config(broker={"url": url})
    second = config(broker={"url": url}, store=tmp_path / "other")
    with Serving(first, url), pytest.raises(RunRejectedError) as error:
        run_fleet(second)
    text = str(error.value)
    already = text.index(f"fleet {fleet} already has a server on {url}, store {first.store} on ")
    assert already < text.index("insecure")
    assert "stop that one, or choose another `fleet`" in text


def test_a_second_server_on_the_port_of_the_first_learns_of_it(config, fleet, tmp_path):
    """Both would start a broker there: the port is taken by the first of the same fleet."""
    port = free_port()
    broker = BrokerConfig(port=port)
    first = config()
    with Server(fleet, first.store, broker), pytest.raises(TransportError) as error:
        serve_fleet(fleet, tmp_path / "other", broker)
    assert f"already has a server on mqtt://127.0.0.1:{port}, store {first.store}" in str(
        error.value
    )


def test_a_fleet_has_one_server_and_another_store_is_told_where(url, config, fleet, tmp_path):
    """Whoever comes second ends, and says which store has the fleet; a name left in a power cut is
    nobody's.
    """
    settings = config(broker={"url": url})
    with Serving(settings, url) as first:
        for store in (tmp_path / "other", settings.store):
            with pytest.raises(
                TransportError,
                match=rf"already has a server on .*, store .*{settings.store} on .*_pub",
            ):
                serve_fleet(fleet, store, settings.broker)
        left = ServerStatus(fleet=fleet, online=True, store=first.server._outbox._store)
    link = Link(BrokerAddress.parse(url), f"shoal-{fleet}-left", queue.SimpleQueue())
    with contextlib.closing(
        link
    ):  # the broker went down with the server, and has kept its last word
        link.connect(10)
        link.publish(Topics(fleet).server_status, left.to_bytes(), retain=True)
        link.drain(time.monotonic() + 10)
    with pytest.raises(TransportError, match="already has a server"):
        serve_fleet(fleet, tmp_path / "other", settings.broker)
    ready = []
    serve_fleet(
        fleet,
        settings.store,
        settings.broker,
        on_ready=lambda server: (ready.append(1), server.stop()),
    )
    assert ready


def test_two_servers_that_did_not_see_each_other_at_their_start_say_so(
    url, config, fleet, tmp_path, caplog
):
    """As when the first was away from the broker while the second began."""
    first = config(broker={"url": url})
    second = config(broker={"url": url}, store=tmp_path / "other")
    with Serving(first, url), Serving(second, url):
        give_up = time.monotonic() + 60
        while caplog.text.count("stop one of the two") < 2:
            assert time.monotonic() < give_up, caplog.text
            threading.Event().wait(0.05)
    assert f"{tmp_path / 'other'} on" in caplog.text
    with contextlib.closing(Store(first.store, read_only=True)) as store:
        assert [line.kind for line in store.events() if line.kind == "another-server"] == [
            "another-server"
        ]


def test_the_server_that_stays_is_heard_of_when_another_goes(url, config, fleet, tmp_path):
    """The farewell of the other has taken the place of its word, and who asks for a run would hear
    that.
    """
    first = config(broker={"url": url})
    second = config(broker={"url": url}, store=tmp_path / "other")
    with Serving(first, url) as stays:
        with Serving(second, url):
            pass
        give_up = time.monotonic() + 60
        while (
            said := server_status(broker_address(first.broker), fleet)
        ) is None or not said.online:
            assert time.monotonic() < give_up
        assert said.store == stays.server._outbox._store


def test_a_copy_of_the_store_of_a_server_that_is_up_is_refused(url, config, fleet, tmp_path):
    """It has the number of the first, and is another folder."""
    settings = config(broker={"url": url})
    with Serving(settings, url):
        copy = tmp_path / "copy"
        copy.mkdir()
        (copy / "server-number").write_bytes((settings.store / "server-number").read_bytes())
        with pytest.raises(TransportError, match="already has a server"):
            serve_fleet(fleet, copy, settings.broker)


def test_a_request_that_cannot_begin_is_rejected_with_the_reason(url, config, fleet, tmp_path):
    """Missing artifacts end the request, not the server; the exit code travels with the reason."""
    settings = config(broker={"url": url}, model={"artifacts": tmp_path / "nowhere"})
    with Serving(settings, url):
        for _ in range(2):
            with pytest.raises(RunRejectedError, match="no architecture 'tiny'") as error:
                run_fleet(settings)
            assert error.value.exit_code == ConfigError.exit_code


def test_a_run_that_cannot_go_on_is_said_in_the_log_of_the_server(
    url, config, fleet, tmp_path, caplog
):
    """Its service log had no word of it: an operator saw a server that is up and does nothing."""
    settings = config(broker={"url": url}, model={"artifacts": tmp_path / "nowhere"})
    with contextlib.closing(Store(settings.store)) as store:
        run = RunRecord(
            "r1", fleet, "tiny", settings.model_dump_json(), "running", None, 0.0, None, 0, 0
        )
        store.add_run(run, VersionRecord("r1", 0, 0, "0" * 64, None, None, 0.0, None))
    with Serving(settings, url):
        give_up = time.monotonic() + 60
        while "cannot resume yet" not in caplog.text and time.monotonic() < give_up:
            threading.Event().wait(0.05)
    assert "cannot resume yet: " in caplog.text
    assert "no architecture 'tiny'" in caplog.text


def test_a_tier_that_is_gone_holds_the_run(
    url, config, running, fleet, tmp_path, artifacts, caplog
):
    """The server had died of it at every start, so that the run could not be ended either."""
    exported = shutil.copytree(artifacts, tmp_path / "exported")
    settings = config(
        model={"artifacts": exported}, round={"min_devices": 2}, evaluation={"data": None}
    )
    half = Peer(fleet, "half", url, silent, profile=profile(max_width=0.5))
    with half, Peer(fleet, "whole", url, silent) as whole:
        server = running(settings, url)
        server.wait_event(control.RoundStarted)
        server.server.stop()
        assert server.wait().status == "stopped"
        server.server.__exit__(None, None, None)
        (gone,) = (exported / "tiny").glob("w0.50*")
        gone.rename(tmp_path / gone.name)
        half.script = whole.script = honest(1.0)
        with (
            Serving(server.config, url) as serving,
            contextlib.closing(Store(settings.store, read_only=True)) as store,
        ):
            give_up = time.monotonic() + 60
            while "cannot resume yet" not in caplog.text and time.monotonic() < give_up:
                threading.Event().wait(0.05)
            assert (
                f"{gone.name} of tiny, which devices are training, is no longer in {exported}"
                in caplog.text
            )
            assert serving.thread.is_alive()
            (tmp_path / gone.name).rename(gone)
            steer(server.config, "go")
            while store.runs()[0].status == "running" and time.monotonic() < give_up + 60:
                threading.Event().wait(0.05)
            assert store.runs()[0].status == "finished"


def test_without_a_server_everything_is_hosted_for_the_run(config, fleet):
    """The embedded broker is started and stopped; the devices may be there before it is."""
    port = free_port()
    settings = config(broker={"port": port}, evaluation={"data": None})
    events = []
    done = threading.Event()

    def device():
        ready.wait(20)
        with Peer(fleet, "d", f"mqtt://127.0.0.1:{port}", honest()):
            done.wait(30)

    ready = threading.Event()
    thread = threading.Thread(target=device)
    thread.start()

    def listen(event):
        events.append(event)
        ready.set()

    finished = run_fleet(settings, listener=listen)
    done.set()
    thread.join(20)
    assert finished.status == "finished"
    with pytest.raises(TransportError):
        server_status(broker_address(settings.broker), fleet, connect_seconds=0.5)


@pytest.mark.slow
def test_a_server_that_is_asked_to_stop_says_goodbye_and_its_run_goes_on_later(
    config, fleet, tmp_path
):
    """SIGTERM in mid-round ends the process with 0; the next one on the same store resumes the run
    by itself.
    """
    port = free_port()
    settings = config(broker={"port": port}, evaluation={"data": None}, round={"rounds": 2})
    url = f"mqtt://127.0.0.1:{port}"
    held = threading.Event()

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, fleet, str(settings.store), str(port)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        return process

    first = start()
    with Peer(fleet, "d", url, lambda _peer, _work: held.set()) as peer:
        outcome = []
        follower = threading.Thread(target=lambda: outcome.append(submit(settings)))
        follower.start()
        assert held.wait(30)
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        follower.join(20)
        assert (outcome[0].status, outcome[0].exit_code) == ("stopped", 130)
        peer.script = honest()
        second = start()
        store = Store(settings.store, read_only=True)
        peer.wait_for(lambda device: len({offer.round for offer in device.offers}) == 2, 30)
    second.send_signal(signal.SIGTERM)
    assert second.wait(20) == 0
    first.stdout.close()
    second.stdout.close()
    assert store.version(outcome[0].run).number >= 1
    store.close()


def test_an_address_that_is_not_there_yet_is_no_mistake_of_the_settings(tmp_path):
    """After a power cut the network may come later than the server: its unit starts it again."""
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.77"):
        EmbeddedBroker(tmp_path, port=free_port(), listen="192.0.2.77").start()


def test_a_taken_port_is_an_error_that_says_what_to_do(tmp_path):
    """The message names the port, the broker that is there, and the setting."""
    port = free_port()
    with (
        EmbeddedBroker(tmp_path / "a", port=port),
        pytest.raises(
            TransportError, match=rf"port {port} on 127\.0\.0\.1 is taken.*\[broker\] port"
        ),
    ):
        EmbeddedBroker(tmp_path / "b", port=port).start()


def test_a_broker_that_is_down_is_an_error_with_its_address(config):
    """`shoal run` against an address where nothing listens ends soon, naming it."""
    port = free_port()
    settings = config(broker={"url": f"mqtt://127.0.0.1:{port}", "connect_timeout_seconds": 1})
    with pytest.raises(
        TransportError, match=f"cannot connect to the broker at mqtt://127.0.0.1:{port} within 1 s"
    ):
        run_fleet(settings)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")
def test_an_embedded_broker_forgets_small_messages_that_came_with_large_ones(tmp_path):
    """Of each message it keeps what was read with it, here 100 kB of an update: it must not keep
    thousands of them.
    """
    topics = Topics("f")
    inbox = queue.SimpleQueue()

    def resident_mb():
        lines = Path(f"/proc/{broker.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS:"))

    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker(tmp_path / "broker", port=free_port()))
        address = BrokerAddress.parse(broker.url)
        server, device = (Link(address, name, inbox) for name in ("server", "device"))
        for link in (server, device):
            link.connect(60)
            stack.callback(link.close)
        server.subscribe(topics.reply("+"))
        server.subscribe(topics.upload("+", "+"))
        device.publish_stream(
            ((topics.upload("t", 0), bytes(100_000)) for _ in range(100)), time.monotonic() + 60
        )
        before = resident_mb()
        for _ in range(1000):
            sent = (topics.upload("t", 0), bytes(100_000)), (topics.reply("device"), bytes(300))
            device.publish_stream(sent, time.monotonic() + 60)
        device.drain(time.monotonic() + 60)
        assert resident_mb() - before < 50


@pytest.mark.slow
def test_an_embedded_broker_that_dies_is_started_again(config, running, fleet, tmp_path):
    """The server notices and revives it on the same port; the round goes on."""
    port = free_port()
    settings = config(
        broker={"port": port}, evaluation={"data": None}, round={"deadline_seconds": 60}
    )
    server = Server(settings.fleet, settings.store, settings.broker)
    killed = []

    def after_the_broker_died(peer, work):
        if not killed:
            killed.append(server._broker.pid)
            server._broker._process.kill()
        honest()(peer, work)

    with server, Peer(fleet, "d", f"mqtt://127.0.0.1:{port}", after_the_broker_died):
        finished = server.run(settings)
        assert server._broker.pid != killed[0]
    assert finished.status == "finished", finished.error


def test_a_broker_that_cannot_start_now_may_start_later(tmp_path, monkeypatch):
    """Whatever it lacks for a while: a port, a package that is upgraded just now, the list of
    members.
    """
    with EmbeddedBroker(tmp_path, port=free_port()) as broker:
        broker._process.kill()
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(ConnectionError, match="needs the package iotcore"):
            broker.ensure()
        monkeypatch.undo()
        assert broker.ensure()


@pytest.mark.slow
def test_a_run_outlives_an_embedded_broker_whose_port_another_program_took(
    config, running, fleet, monkeypatch
):
    """The run had failed for good, and its server ended; both wait until the port is free again."""
    monkeypatch.setattr(runs, "RETRY_SECONDS", 0.5)
    port = free_port()
    settings = config(
        broker={"port": port}, evaluation={"data": None}, round={"deadline_seconds": 60}
    )
    server = Server(settings.fleet, settings.store, settings.broker)
    taken = []

    def after_the_port_is_taken(peer, work):
        if not taken:
            with server._broker._changing:
                server._broker._process.kill()
                server._broker._process.wait(10)
                taken.append(socket.create_server(("127.0.0.1", port)))
        honest()(peer, work)

    with server, Peer(fleet, "d", f"mqtt://127.0.0.1:{port}", after_the_port_is_taken):
        stopped = server.run(settings)
        assert (stopped.status, stopped.exit_code) == ("stopped", TransportError.exit_code)
        assert f"port {port} on 127.0.0.1 is taken" in stopped.error
        assert "the run has not ended" in stopped.error
        serves = threading.Thread(target=server.serve)
        serves.start()
        threading.Event().wait(1.5)
        assert serves.is_alive()
        taken[0].close()
        give_up = time.monotonic() + 60
        while server._store.run(stopped.run).status == "running" and time.monotonic() < give_up:
            threading.Event().wait(0.2)
        server.stop()
        serves.join(30)
        assert server._store.run(stopped.run).status == "finished"


@pytest.fixture
def stored(url, config, running, fleet):
    """A finished run of two rounds with two devices."""
    settings = config(round={"rounds": 2, "min_devices": 2})
    with Peer(fleet, "a", url, honest(1.0)), Peer(fleet, "b", url, honest(2.0)):
        server = running(settings, url)
        finished = server.wait()
        assert finished.status == "finished", finished.error
    store = Store(settings.store, read_only=True)
    yield store, finished
    store.close()


def test_views_of_a_stored_run(stored):
    """Status, devices, rounds and log tell what happened, and all of it is plain JSON."""
    store, finished = stored
    status = queries.status(store)
    assert (status.run.id, status.run.status, status.closed, status.rounds) == (
        finished.run,
        "finished",
        2,
        2,
    )
    assert status.evaluation == finished.evaluation
    assert (finished.wire_bytes, finished.payload_bytes) == (
        status.run.wire_bytes,
        status.run.payload_bytes,
    )
    devices = queries.devices(store)
    assert [(item.device.id, item.merged, item.tier) for item in devices] == [
        ("a", 2, "w1.00-d1"),
        ("b", 2, "w1.00-d1"),
    ]
    rounds = queries.rounds(store, finished.run[:-2])
    assert [(item.round.number, item.phases) for item in rounds] == [
        (1, {"merged": 2}),
        (2, {"merged": 2}),
    ]
    kinds = [line.kind for line in queries.log(store, finished.run)]
    assert kinds[0] == "run-started"
    assert kinds[-1] == "run-finished"
    assert len(queries.log(store, last=3)) == 3
    for view in (status, devices, rounds, queries.log(store)):
        json.dumps(queries.to_json_values(view), allow_nan=False)
    with pytest.raises(ConfigError, match="has no run nope; its runs: "):
        queries.status(store, "nope")


def test_who_is_not_training_is_told_why(url, config, running, fleet):
    """In `shoal devices`: too narrow for every tier, unable by its own word, refusing; not who
    trains.
    """
    settings = config(round={"rounds": 2, "min_devices": 2, "quorum": 0.5})
    with (
        Peer(fleet, "able", url, honest(1.0)),
        Peer(fleet, "narrow", url, honest(1.0), profile=profile(max_width=0.1)),
        Peer(fleet, "broken", url, honest(1.0), profile=profile(unable="libgomp.so.1 is missing")),
        Peer(
            fleet,
            "full",
            url,
            lambda peer, work: peer.refuse(work, RefusalReason.NO_SPACE, "no space"),
        ),
    ):
        finished = running(settings, url).wait()
        store = Store(settings.store, read_only=True)
        try:
            reasons = {view.device.id: view.reason for view in queries.devices(store)}
        finally:
            store.close()
    assert finished.status == "finished", finished.error
    assert reasons.pop("narrow").startswith(
        "none of the tiers w1.00-d1, w0.50-d1 fits it: it has max_width 0.1"
    )
    assert reasons.pop("full").startswith("round 2: declined")
    assert reasons == {"able": "", "broken": "libgomp.so.1 is missing"}


def test_every_version_can_be_exported(stored, tmp_path):
    """Weights of any version come out as safetensors with their origin; statistics with those that
    have them.
    """
    store, finished = stored
    first = load_version(store, version=0)
    last = load_version(store)
    for name, value in first.weights.items():
        np.testing.assert_allclose(last.weights[name], value + 3.0, rtol=1e-6, atol=1e-6)
    assert list(last.weights) == ["hidden.weight", "hidden.bias", "head.weight", "head.bias"]
    assert first.statistics == {}
    export_safetensors(last, tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    assert set(found) == {*last.weights, "stat.norm.mean", "stat.norm.var"}
    assert last.metadata["run"] == finished.run
    with pytest.raises(ConfigError, match="has no version 9; it has versions 0 to 2"):
        load_version(store, version=9)


def test_only_versions_are_kept_when_a_run_is_over(stored):
    """Slices and updates are gone; three versions and two sets of statistics stay."""
    store, _ = stored
    kept = [path.name for path in (store.folder / "blobs" / "objects").rglob("*") if path.is_file()]
    versions = store.versions(store.runs()[0].id)
    wanted = {version.digest for version in versions} | {
        version.statistics_digest for version in versions
    } - {None}
    assert set(kept) == wanted
    assert not [path for path in (store.folder / "updates").rglob("*") if path.is_file()]


def test_events_are_values_that_travel(stored):
    """Every event reads back from its own bytes."""
    _, finished = stored
    assert control.parse_run_event(finished.to_bytes()) == finished


def test_evaluating_loads_neither_torch_nor_onnx(artifacts):
    """A process that opens a graph stays small, also with the training flavour of onnxruntime."""
    graph = artifacts / "tiny" / "w1.00-d1" / "eval.onnx"
    script = f"""
import sys
from pathlib import Path
from broker_server.rounds.onnx_runtime import open_graph
open_graph(Path({str(graph)!r}), threads=1)
print(sorted({{"torch", "onnx"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "[]"
