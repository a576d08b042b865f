"""What anybody at the broker asks of a server: no message names a path, a program or an address for
it to use.
"""

import contextlib
import json
import os
import queue
import shutil
import sqlite3
import threading
import time

import pytest

from broker_server.service.authority import found_fleet
from broker_server.service.following import RunRejectedError
from broker_server.service.launch import run_fleet, steer, submit
from broker_server.service.new_fleet import NewFleet
from broker_server.service.server import Server
from broker_server.service.visiting import ServerAccess, by_broker
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.requested import SETTABLE, RequestedSettings
from broker_server.store import Store
from broker_server.store.configurations import FOLDER, save_config
from fleet_protocol import control
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError, StorageError
from fleet_protocol.link import Link
from fleet_protocol.requests import RunRequest
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Received
from tests.broker_server.peer import Peer, honest, silent
from tests.broker_server.test_launch import Serving
from tests.brokers import mosquitto_broker

PATIENCE = 90
CODE = """
from pathlib import Path

Path(__file__).with_name("marker").touch()


def load(x=None, *rest, **more):
    return x
"""


@pytest.fixture
def evil(tmp_path):
    """The folder of a Python file that leaves a marker where it runs."""
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(CODE)
    return folder


def attacks(config, evil):
    """Whole configurations, each with something that only the server's own file may say."""
    test = config["evaluation"]["data"]
    function = f"{evil}/evil.py:load"
    python = {"kind": "python", "entry_point": function}
    return {
        "entry point": {"evaluation": {"data": python}},
        "transforms": {"evaluation": {"data": {**test, "transforms": [function]}}},
        "augment": {"evaluation": {"data": {**test, "augment": [function]}}},
        "tier data": {
            "evaluation": {"data": test, "tiers": ["w0.50-d1"], "tier_data": {"w0.50-d1": python}}
        },
        "test set": {"evaluation": {"data": {**test, "path": f"{evil}/evil.py"}}},
        "weights": {"model": {**config["model"], "weights": f"{evil}/evil.py"}},
        "artifacts": {"model": {**config["model"], "artifacts": str(evil)}},
        "store": {"store": str(evil / "store")},
        "broker": {"broker": {"url": "mqtt://127.0.0.1:9"}},
        "receivers": {
            "broker": {"url": "mqtt://127.0.0.1:9", "receivers": 1, "receiver_hosts": ["evil"]}
        },
        "page": {"view": {"port": 0, "token_file": str(evil / "token"), "actions": True}},
        "fleet": {"fleet": "another"},
    }


def whole_configuration(fleet, number, document):
    """A request as it was when one carried a configuration."""
    request = {
        "type": "run-request",
        "request": f"r{number}",
        "fleet": fleet,
        "config": json.dumps(document),
    }
    return json.dumps(request).encode()


def untouched(evil):
    """Whether nothing ran there, and nothing was written."""
    return sorted(path.name for path in evil.iterdir()) == ["evil.py"]


def wait_until(fulfilled, what=""):
    give_up = time.monotonic() + PATIENCE
    while not fulfilled():
        assert time.monotonic() < give_up, what
        threading.Event().wait(0.05)


def refused(settings):
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        return sum(line.count for line in store.refusals())


@pytest.mark.attack(
    "outsider",
    "Requests a run whose configuration names a function, a path or an address",
    "refused as `malformed`; the server opens and calls nothing",
    "2026-11-28",
)
@pytest.mark.parametrize("insecure", [False, True])
def test_a_configuration_in_a_message_is_never_read(url, config, fleet, evil, insecure):
    """Between runs and in one: each is refused and counted, nothing of it is opened or run, and the
    run ends.
    """
    settings = config(broker={"url": url, "insecure": insecure})
    document = json.loads(settings.model_dump_json())
    link = Link(BrokerAddress.parse(url), f"evil-{fleet}", queue.SimpleQueue())

    def attack(offset):
        for number, change in enumerate(attacks(document, evil).values()):
            payload = whole_configuration(fleet, offset + number, {**document, **change})
            link.publish(Topics(fleet).server_control, payload)
        link.drain(time.monotonic() + 10)

    def attacked(peer, work):
        attack(100)
        honest()(peer, work)

    count = len(attacks(document, evil))
    with Serving(settings, url), contextlib.closing(link), Peer(fleet, "d", url, attacked):
        link.connect(10)
        attack(0)
        wait_until(lambda: refused(settings) >= count)
        assert run_fleet(settings).status == "finished"
        wait_until(lambda: refused(settings) >= 2 * count)
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        assert [run.config for run in store.runs()] == [settings.model_dump_json()]
    assert untouched(evil)


@contextlib.contextmanager
def open_fleet(kind, config, fleet, tmp_path):
    """A server that takes requests over MQTT, signed or not, and how somebody on another computer
    asks it.
    """
    with mosquitto_broker(tmp_path) as broker:
        table = {"url": broker.url, "insecure": True}
        if kind == "enrolled":
            found_fleet(tmp_path / "lab", NewFleet(fleet, "127.0.0.1", broker.port))
            table = {"url": broker.url, "identity": tmp_path / "lab" / "server.enrolment"}
        settings = config(broker=table, round={"rounds": 2, "wait_seconds": 60})
        with Server(fleet, settings.store, settings.broker, own=settings) as server:
            serving = threading.Thread(target=server.serve)
            serving.start()
            try:
                yield settings, settings.model_copy(update={"store": tmp_path / "elsewhere"})
            finally:
                server.stop()
                serving.join(PATIENCE)


def asked(settings, request):
    """What the server answers to a request over MQTT."""
    with by_broker(ServerAccess(settings.fleet, settings.store, settings.broker), request) as inbox:
        while True:
            event = inbox.get(timeout=PATIENCE)
            if isinstance(event, Received) and event.topic == Topics(settings.fleet).server_events:
                answer = control.parse_run_event(event.payload)
                if getattr(answer, "request", None) == request.request:
                    return answer


NAMED = {
    "entry point": "evaluation.data.entry_point",
    "transforms": "evaluation.data.transforms",
    "augment": "evaluation.data.augment",
    "tier data": "evaluation.tier_data",
    "test set": "evaluation.data.path",
    "weights": "model.weights",
    "artifacts": "model.artifacts",
    "fleet": "fleet",
}


@pytest.mark.attack(
    "outsider",
    "Requests a run with settings that no request is allowed to change",
    "refused; the answer names the settings",
    "2026-11-28",
)
@pytest.mark.parametrize("kind", ["insecure", "enrolled"])
def test_a_request_that_differs_is_refused_by_the_names_of_the_settings(
    kind, config, fleet, evil, tmp_path
):
    """As a command on another computer asks, whose file is another; what is the server's own to say
    has no effect.
    """
    with open_fleet(kind, config, fleet, tmp_path) as (settings, elsewhere):
        document = json.loads(elsewhere.model_dump_json())
        for number, (name, change) in enumerate(attacks(document, evil).items()):
            wanted = RequestedSettings.from_config(
                FleetConfig.model_validate({**document, **change})
            )
            if (
                name not in NAMED
            ):  # store, broker and page are the server's own, and are not even asked for
                assert wanted == RequestedSettings.from_config(elsewhere) or name == "store"
                continue
            request = RunRequest(
                request=f"r{number}", fleet=fleet, settings=wanted.settings, others=wanted.others
            )
            answer = asked(elsewhere, request)
            assert isinstance(answer, control.RunRejected), name
            assert answer.exit_code == ConfigError.exit_code
            assert NAMED[name] in answer.detail
            assert "the file of `shoal up --config`" in answer.detail
        with contextlib.closing(Store(settings.store, read_only=True)) as store:
            assert not store.runs()
    assert untouched(evil)


@pytest.mark.attack(
    "outsider",
    "Puts a string, a list or an unknown key into a request for a run",
    "refused as `malformed`",
    "2026-11-28",
)
@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"model.weights": "/etc/passwd"}},
        {"settings": {"round.rounds": "3"}},
        {"settings": {"round.rounds": True}},
        {"settings": {"seed": [1]}},
        {"others": {"model.weights": "/etc/passwd"}},
        {"config": "{}"},
        {"store": "/tmp"},
        {"name": "../x"},
        {"name": "a\x1b[31m"},
        {"name": "newest"},
    ],
    ids=str,
)
def test_nothing_but_numbers_and_fingerprints_travels(change):
    """A word, a list or another key is no request."""
    from fleet_protocol.requests import parse_request  # noqa: PLC0415

    head = {"type": "run-request", "request": "r", "fleet": "lab", "settings": {}, "others": {}}
    assert parse_request(json.dumps(head).encode()).settings == {}
    with pytest.raises(RefusedError):
        parse_request(json.dumps({**head, **change}).encode())


@pytest.mark.attack(
    "outsider",
    "Leaves a retained request for a run in the broker, so that it reaches the server at every "
    "start",
    "refused as `replayed`; the message shows the command that deletes the request, and no run "
    "begins",
    "2026-11-29",
)
def test_a_request_that_the_broker_has_retained_begins_no_run(url, config, fleet):
    """Somebody who is gone would otherwise have a run of the server at each of its starts."""
    settings = config(broker={"url": url, "insecure": True})
    wanted = RequestedSettings.from_config(settings)
    request = RunRequest(request="r1", fleet=fleet, settings=wanted.settings, others=wanted.others)
    topic = Topics(fleet).server_control
    link = Link(BrokerAddress.parse(url), f"gone-{fleet}", queue.SimpleQueue())
    with contextlib.closing(link):
        link.connect(10)
        link.publish(topic, request.to_bytes(), retain=True)
        link.drain(time.monotonic() + 10)
    with Serving(settings, url), Peer(fleet, "d", url, honest()):
        wait_until(lambda: refused(settings) == 1)
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        assert [line.reason for line in store.refusals()] == [RefusalReason.REPLAYED.value]
        assert not store.runs()
        assert f"mosquitto_pub -r -n -t {topic}" in next(
            event.detail for event in store.events() if event.kind == "refused"
        )


@pytest.mark.parametrize("kind", ["insecure", "enrolled"])
def test_what_a_request_may_set_is_set(kind, config, fleet, tmp_path):
    """From another computer, to which the server's paths mean nothing: numbers are as asked, the
    rest its own.
    """
    numbers = {
        "round.rounds": 1,
        "seed": 77,
        "train.epochs": 5,
        "train.steps": 9,
        "round.wait_seconds": 33.0,
    }
    with open_fleet(kind, config, fleet, tmp_path) as (settings, elsewhere):
        wanted = RequestedSettings.from_config(elsewhere)
        for number, (name, bounds) in enumerate(SETTABLE.items()):
            other_settings = {
                setting: value for setting, value in wanted.others.items() if setting != name
            }
            for value in (bounds.most * 2, -1):
                request = RunRequest(
                    request=f"o{number}",
                    fleet=fleet,
                    settings={**wanted.settings, name: value},
                    others=other_settings,
                )
                answer = asked(
                    elsewhere, request.model_copy(update={"request": f"o{number}-{value > 0:d}"})
                )
                assert isinstance(answer, control.RunRejected)
                assert f"{name} = {value!r} is out of bounds: use {bounds}" in answer.detail
        other_settings = {
            name: value for name, value in wanted.others.items() if name not in numbers
        }
        settings_wanted = {**wanted.settings, **numbers}
        request = RunRequest(
            request="r", fleet=fleet, settings=settings_wanted, others=other_settings, name="afar"
        )
        answer = asked(elsewhere, request)
        assert isinstance(answer, control.RunStarted)
        assert answer.rounds == 1
        assert steer(elsewhere, "abandon") == answer.run
        with contextlib.closing(Store(settings.store, read_only=True)) as store:
            (run,) = store.runs()
    assert run.name == "afar"
    does = FleetConfig.stored(run.config)
    assert (does.seed, does.train.epochs, does.train.steps, does.round.wait_seconds) == (
        77,
        5,
        9,
        33.0,
    )
    assert does.model == settings.model
    assert does.evaluation == settings.evaluation
    assert does.store == settings.store


def test_a_server_without_a_file_takes_no_run_over_mqtt(url, config, fleet, tmp_path):
    """`shoal up --fleet NAME`; the socket is there for its owner."""
    settings = config(broker={"url": url, "insecure": True}, evaluation={"data": None})
    with Server(fleet, settings.store, settings.broker) as server, Peer(fleet, "d", url, honest()):
        serving = threading.Thread(target=server.serve)
        serving.start()
        with pytest.raises(
            RunRejectedError, match=r"start it with `shoal up --config fleet\.toml`"
        ):
            submit(settings.model_copy(update={"store": tmp_path / "elsewhere"}))
        assert submit(settings).status == "finished"
        server.stop()
        serving.join(PATIENCE)


@pytest.mark.attack(
    "outsider",
    "Requests a run over MQTT from a server without identities",
    "refused and counted; the first answers say how to allow such requests",
    "2026-11-28",
)
def test_who_asks_where_mqtt_is_closed_is_told_what_to_do(url, config, fleet, tmp_path, caplog):
    """Runs, steering and predictions alike; the log says it once, and a flood is answered a few
    times.
    """
    settings = config(broker={"url": url})
    elsewhere = settings.model_copy(update={"store": tmp_path / "elsewhere"})
    with Serving(settings, url):
        with pytest.raises(
            RunRejectedError, match=r"accepts no requests over MQTT.*insecure = true"
        ):
            submit(elsewhere)
        with pytest.raises(RunRejectedError, match="accepts no requests over MQTT"):
            steer(elsewhere, "stop")
        for _ in range(30):
            with (
                contextlib.suppress(Exception),
                by_broker(elsewhere, RunRequest(request="r", fleet=fleet)),
            ):
                pass
        wait_until(lambda: refused(settings) >= 32)
    assert caplog.text.count("accepts no requests over MQTT") == 1


def changed_in(store, config):
    with contextlib.closing(sqlite3.connect(store / "shoal.db")) as database, database:
        database.execute("UPDATE runs SET config = ?", (json.dumps(config),))


def cut_short(settings, url, fleet):
    """A run that its server left in mid-round; its id."""
    held = threading.Event()
    with Serving(settings, url) as serving, Peer(fleet, "d", url, lambda *_: held.set()):
        follower = threading.Thread(target=lambda: submit(settings))
        follower.start()
        assert held.wait(PATIENCE)
        serving.server.stop()
        follower.join(PATIENCE)
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        return store.runs()[0].id


def how_it_is(settings, run):
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        return store.run(run).status, [line.detail for line in store.events()]


@pytest.mark.attack(
    "file",
    "A changed database names a function in the configuration of a run",
    "the server resumes the run with the configuration that it saved, or puts it on hold; it "
    "never calls the function",
    "2026-11-28",
)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "restored"])
@pytest.mark.parametrize("attack", [*NAMED, "no configuration"])
def test_a_changed_database_runs_nothing(attack, kept, url, config, fleet, evil):
    """The run goes on with what its server kept; where nothing was, it is held, until its owner
    says with what.
    """
    settings = config(broker={"url": url})
    run = cut_short(settings, url, fleet)
    document = json.loads(settings.model_dump_json())
    change = {**document, **attacks(document, evil)[attack]} if attack in NAMED else {"fleet": 3}
    changed_in(settings.store, change)
    if not kept:
        shutil.rmtree(settings.store / FOLDER)
    with Serving(settings, url), Peer(fleet, "d", url, honest()):
        if not kept:
            wait_until(lambda: any("is held" in line for line in how_it_is(settings, run)[1]))
            (why,) = {line for line in how_it_is(settings, run)[1] if "is held" in line}
            assert NAMED.get(attack, "was changed, or is damaged") in why
            assert "shoal run --config FILE" in why
            steer(settings, "stop")
            assert run_fleet(settings).status == "finished"
        else:
            wait_until(lambda: how_it_is(settings, run)[0] != "running")
            assert how_it_is(settings, run)[0] == "finished"
            (why,) = {line for line in how_it_is(settings, run)[1] if "is not used" in line}
            assert NAMED.get(attack, "was changed, or is damaged") in why
    assert untouched(evil)


def test_another_run_like_one_takes_nothing_from_the_database(url, config, fleet, evil):
    """A button of the page; it begins with what was kept, or is refused."""
    settings = config(broker={"url": url})
    with Serving(settings, url), Peer(fleet, "d", url, honest()):
        first = run_fleet(settings.model_copy(update={"seed": 5})).run
        document = json.loads(settings.model_dump_json())
        changed_in(settings.store, {**document, **attacks(document, evil)["entry point"]})
        again = steer(settings, "start", first)
        wait_until(lambda: how_it_is(settings, again)[0] == "finished")
        with contextlib.closing(Store(settings.store, read_only=True)) as store:
            assert FleetConfig.stored(store.run(again).config).seed == 5
        shutil.rmtree(settings.store / FOLDER)
        with pytest.raises(RunRejectedError, match=r"evaluation\.data\.entry_point"):
            steer(settings, "start", first)
    assert untouched(evil)


def test_a_run_of_another_file_goes_on_after_a_restart(url, config, fleet, tmp_path, test_set):
    """Also when the folder was moved in between, with the files that lie in it; what lies outside
    is found, too.
    """
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(test_set, folder / "mine.npz")
    data = {"kind": "npz", "path": folder / "mine.npz"}
    own = config(broker={"url": url}, store=folder / "store")
    changed = own.model_copy(
        update={
            "seed": 9,
            "evaluation": own.evaluation.model_validate({"data": data, "threads": 1}),
        }
    )
    held = threading.Event()
    with Serving(own, url) as serving, Peer(fleet, "d", url, lambda *_: held.set()):
        follower = threading.Thread(target=lambda: submit(changed))
        follower.start()
        assert held.wait(PATIENCE)
        serving.server.stop()
        follower.join(PATIENCE)
    moved = tmp_path / "moved"
    folder.rename(moved)
    own = own.model_copy(update={"store": moved / "store"})
    with Serving(own, url), Peer(fleet, "d", url, honest()):
        with contextlib.closing(Store(own.store, read_only=True)) as store:
            (run,) = store.runs()
        wait_until(lambda: how_it_is(own, run.id)[0] != "running")
    with contextlib.closing(Store(own.store, read_only=True)) as store:
        (run,) = store.runs()
        (_, judged) = store.versions(run.id)
    assert run.status == "finished"
    assert judged.evaluation is not None
    assert FleetConfig.stored(run.config).evaluation.data.path == moved / "mine.npz"
    assert FleetConfig.stored(run.config).seed == 9


@pytest.mark.parametrize("how", ["writable", "link"])
def test_a_kept_configuration_that_another_may_have_written_is_not_taken(
    how, url, config, fleet, evil
):
    """It is for its owner alone, and no link."""
    settings = config(broker={"url": url})
    run = cut_short(settings, url, fleet)
    path = settings.store / FOLDER / f"{run}.json"
    assert path.stat().st_mode & 0o777 == 0o600
    document = json.loads(settings.model_dump_json())
    path.write_text(json.dumps({**document, **attacks(document, evil)["entry point"]}))
    if how == "writable":
        path.chmod(0o666)
    else:
        path.rename(evil.parent / "elsewhere.json")
        path.symlink_to(evil.parent / "elsewhere.json")
        with pytest.raises(StorageError, match="has a link"), Serving(settings, url):
            pass
        assert untouched(evil)
        return
    with Serving(settings, url), Peer(fleet, "d", url, silent):
        wait_until(lambda: any(line.kind == "resume-failed" for line in events_of(settings)))
        assert how_it_is(settings, run)[0] == "running"
    assert untouched(evil)


def events_of(settings):
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        return list(store.events())


def renamed_in(store, run):
    """Give the only run of a store another id, as whoever can write the database may."""
    with contextlib.closing(sqlite3.connect(store / "shoal.db")) as database, database:
        database.execute("PRAGMA foreign_keys = OFF")
        database.execute("UPDATE runs SET id = ?, status = 'running', ended_at = NULL", (run,))


@pytest.mark.attack(
    "file",
    "A store folder from somebody else has its own saved configuration",
    "the server puts the run on hold, because the signature is not the user's",
    "2026-11-28",
)
@pytest.mark.parametrize("attack", ["entry point", "artifacts"])
def test_a_store_that_a_stranger_packed_runs_nothing(
    attack, url, config, fleet, evil, tmp_path, monkeypatch
):
    """Database and kept configuration say the same, by his own server; the run is held, and can be
    ended.
    """
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "stranger"))
    theirs = config(broker={"url": url}, store=tmp_path / "theirs")
    run = cut_short(theirs, url, fleet)
    document = json.loads(theirs.model_dump_json())
    text = json.dumps({**document, **attacks(document, evil)[attack]})
    changed_in(theirs.store, json.loads(text))
    save_config(theirs.store, run, text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "me"))
    settings = config(broker={"url": url}, store=tmp_path / "unpacked")
    shutil.copytree(theirs.store, settings.store)
    with Serving(settings, url), Peer(fleet, "d", url, honest()):
        wait_until(lambda: any("is held" in line for line in how_it_is(settings, run)[1]))
        (why,) = {line for line in how_it_is(settings, run)[1] if "is held" in line}
        assert "is not valid" in why
        assert NAMED[attack] in why
        steer(settings, "stop")
        assert run_fleet(settings).status == "finished"
    assert untouched(evil)


@pytest.mark.parametrize("name", ["../../../tmp/x", "", "_", "x" * 65, "a b", "+/#"], ids=repr)
def test_a_run_whose_id_is_no_name_is_left_out(name, url, config, fleet):
    """The server starts, says so, and does other runs; `shoal run` is as free."""
    settings = config(broker={"url": url})
    with Serving(settings, url), Peer(fleet, "d", url, honest()):
        assert run_fleet(settings).status == "finished"
    renamed_in(settings.store, name)
    with Serving(settings, url), Peer(fleet, "d", url, honest()):
        with pytest.raises(RunRejectedError, match="no run is in progress"):
            steer(settings, "stop")
        assert run_fleet(settings).status == "finished"
    (line,) = [line.detail for line in events_of(settings) if line.kind == "run-left-out"]
    assert f"run {name!r} has not ended" in line
    with Server(fleet, settings.store, settings.broker) as server, Peer(fleet, "d", url, honest()):
        assert server.run(settings).status == "finished"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
def test_a_pipe_in_place_of_a_kept_configuration_holds_the_run_alone(url, config, fleet):
    """The server serves, and stops."""
    settings = config(broker={"url": url})
    run = cut_short(settings, url, fleet)
    path = settings.store / FOLDER / f"{run}.json"
    path.unlink()
    os.mkfifo(path, 0o600)
    with Serving(settings, url) as serving:
        wait_until(lambda: any(line.kind == "resume-failed" for line in events_of(settings)))
        assert "is not a regular file; remove it" in how_it_is(settings, run)[1][-1]
        serving.server.stop()
        serving.thread.join(PATIENCE)
        assert not serving.thread.is_alive()


@pytest.mark.skipif(os.name != "posix", reason="rights of POSIX")
def test_the_folders_of_a_server_are_its_owners_alone(url, config, fleet):
    """Whatever the mask of new files says, and in a folder that was made before."""
    settings = config(broker={"url": url})
    settings.store.mkdir(mode=0o700, parents=True)
    (settings.store / "blobs").mkdir()
    for folder in (settings.store, settings.store / "blobs"):
        folder.chmod(0o777)
    before = os.umask(0)
    try:
        with Serving(settings, url), Peer(fleet, "d", url, honest()):
            assert run_fleet(settings).status == "finished"
    finally:
        os.umask(before)
    folders = [settings.store, *(path for path in settings.store.rglob("*") if path.is_dir())]
    assert {path.name for path in folders} >= {"blobs", "updates", "configurations"}
    assert not [path for path in folders if path.stat().st_mode & 0o022]


def test_a_server_without_a_key_does_runs_and_goes_on_by_its_own_file(
    url, config, fleet, tmp_path, monkeypatch
):
    """As one whose home can only be read; the log says what to set."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    settings = config(broker={"url": url})
    run = cut_short(settings, url, fleet)
    assert any(line.kind == "configuration-unsigned" for line in events_of(settings))
    with Serving(settings, url), Peer(fleet, "d", url, honest()):
        wait_until(lambda: how_it_is(settings, run)[0] == "finished")
    assert any("set XDG_CONFIG_HOME to a folder" in line for line in how_it_is(settings, run)[1])
