"""What systemd hears of an agent: one that reaches its broker is ready, one that lives says so, one
that ends, too.
"""

import contextlib
import os
import socket
import time

import numpy as np

from device_runtime.agent.machine import State
from device_runtime.agent.systemd import ServiceNotifier
from tests.brokers import free_port, mosquitto_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.tiny_set import samples


@contextlib.contextmanager
def systemd(path):
    """The socket that a unit's process talks to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        listening.settimeout(20)
        yield listening


def device(folder, url, **environment):
    x, y = samples(50)
    np.savez(folder / "data.npz", x=x, y=y)
    process = DeviceProcess(
        folder, url, {"kind": "npz", "path": "data.npz"}, connect_timeout_seconds=1
    )
    process.start(["env", *(f"{key}={value}" for key, value in environment.items())])
    return process


def test_an_agent_tells_that_it_is_ready_alive_and_ends(tmp_path):
    """It is ready once it has reached the broker, says what it does, and lives while it waits for
    offers.
    """
    with mosquitto_broker(tmp_path) as broker, systemd(tmp_path / "notify") as listening:
        process = device(
            tmp_path, broker.url, NOTIFY_SOCKET=tmp_path / "notify", WATCHDOG_USEC=400_000
        )
        try:
            heard = []
            while heard.count("WATCHDOG=1") < 5:
                heard.append(listening.recv(4096).decode())
            process.terminate()
            while not heard[-1].startswith("STOPPING"):
                heard.append(listening.recv(4096).decode())
        finally:
            process.kill()
    told = [text for text in heard if text != "WATCHDOG=1"]
    assert told == [
        "STATUS=starting",
        "STATUS=probing",
        "READY=1\nSTATUS=idle",
        "STOPPING=1\nSTATUS=stopped",
    ]
    assert heard.index("WATCHDOG=1") > heard.index("READY=1\nSTATUS=idle")


def test_an_agent_without_a_broker_is_never_ready(tmp_path):
    """It ends with the broker's exit code, and systemd starts it again."""
    with systemd(tmp_path / "notify") as listening:
        process = device(
            tmp_path, f"mqtt://127.0.0.1:{free_port()}", NOTIFY_SOCKET=tmp_path / "notify"
        )
        try:
            assert process.wait_exit() == 5
        finally:
            process.kill()
        listening.settimeout(0)
        heard = []
        with contextlib.suppress(BlockingIOError):
            while True:
                heard.append(listening.recv(4096).decode())
    assert heard == ["STATUS=starting", "STATUS=probing"]


def test_the_watchdog_is_fed_no_more_than_it_needs(tmp_path):
    """Of thousands of turns a few are told; another process's watchdog is none of ours."""
    path = str(tmp_path / "notify")
    with systemd(path) as listening:
        for pid, expected in ((os.getpid(), 1), (os.getpid() + 1, 0)):
            service = ServiceNotifier(
                {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(pid)}
            )
            assert service.alive_seconds == (30 if expected else float("inf"))
            for _ in range(1000):
                service.alive()
            service.entered(State.TRAINING, 7)
            assert [listening.recv(99) for _ in range(expected + 1)][
                -1
            ] == b"READY=1\nSTATUS=training, round 7"


def test_without_systemd_nothing_is_said_and_a_dead_socket_is_no_error(tmp_path):
    """The agent is the same wherever it was started."""
    for environment in (
        {},
        {"NOTIFY_SOCKET": str(tmp_path / "none")},
        {"NOTIFY_SOCKET": f"@shoal-{time.time_ns()}"},
    ):
        service = ServiceNotifier(environment)
        assert service.alive_seconds == float("inf")
        service.entered(State.IDLE, None)
        service.alive()
