"""What anybody at the broker asks of a server: no message names a path, a program or an address for it to use."""

import contextlib
import json
import queue
import threading
import time

import pytest

from broker_server.service.server import Server
from broker_server.store import Store
from fleet_protocol.link import Link
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress

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
        "tier data": {"evaluation": {"data": test, "tiers": ["w0.50-d1"], "tier_data": {"w0.50-d1": python}}},
        "test set": {"evaluation": {"data": {**test, "path": f"{evil}/evil.py"}}},
        "weights": {"model": {**config["model"], "weights": f"{evil}/evil.py"}},
        "artifacts": {"model": {**config["model"], "artifacts": str(evil)}},
        "store": {"store": str(evil / "store")},
        "broker": {"broker": {"url": "mqtt://127.0.0.1:9"}},
        "receivers": {"broker": {"url": "mqtt://127.0.0.1:9", "receivers": 1, "receiver_hosts": ["evil"]}},
        "page": {"view": {"port": 0, "token_file": str(evil / "token"), "actions": True}},
        "fleet": {"fleet": "another"},
    }


def whole_configuration(fleet, number, document):
    """A request as it was when one carried a configuration."""
    said = {"type": "run-request", "request": f"r{number}", "fleet": fleet, "config": json.dumps(document)}
    return json.dumps(said).encode()


@pytest.mark.parametrize("insecure", [False, True])
def test_a_configuration_in_a_message_is_never_read(url, config, fleet, evil, insecure):
    """Each is refused and counted, nothing of it is opened or run, and the run beside them ends as ever."""
    settings = config(broker={"url": url, "insecure": insecure})
    document = json.loads(settings.model_dump_json())
    link = Link(BrokerAddress.parse(url), f"evil-{fleet}", queue.SimpleQueue())
    with Server(fleet, settings.store, settings.broker) as server, contextlib.closing(link):
        serving = threading.Thread(target=server.serve)
        serving.start()
        link.connect(10)
        for number, change in enumerate(attacks(document, evil).values()):
            payload = whole_configuration(fleet, number, {**document, **change})
            link.publish(Topics(fleet).server_control, payload)
        link.drain(time.monotonic() + 10)
        give_up = time.monotonic() + 20
        with contextlib.closing(Store(settings.store, read_only=True)) as store:
            while sum(line.count for line in store.refusals()) < len(attacks(document, evil)):
                assert not (evil / "marker").exists()
                assert time.monotonic() < give_up, store.refusals()
                threading.Event().wait(0.1)
            assert not store.runs()
        server.stop()
        serving.join(20)
    assert sorted(path.name for path in evil.iterdir()) == ["evil.py"]
