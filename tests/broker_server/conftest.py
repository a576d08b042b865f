"""Brokers, artifacts and configurations for the server's tests."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import Self

from broker_server.service.embedded_broker import EmbeddedBroker
from broker_server.service.server import Server
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.control import RunEvent, RunFinished
from tests.broker_server.artifacts import ARCH, CLASSES, INPUTS, export_tiny
from tests.brokers import any_broker, free_port, mosquitto_broker


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported tiny architecture."""
    root = tmp_path_factory.mktemp("artifacts")
    export_tiny(root)
    return root


@pytest.fixture(scope="session")
def test_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty random samples."""
    path = tmp_path_factory.mktemp("data") / "test.npz"
    rng = np.random.default_rng(5)
    np.savez(path, x=rng.standard_normal((40, INPUTS), np.float32), y=rng.integers(0, CLASSES, 40))
    return path


@pytest.fixture(params=["embedded", "mosquitto"])
def broker_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A broker of either kind, in turn."""
    if request.param == "embedded":
        with EmbeddedBroker(tmp_path / "broker", port=free_port()) as broker:
            yield broker.url
    else:
        with mosquitto_broker(tmp_path) as outside:
            yield outside.url


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One broker for tests that each use a fleet name of their own."""
    with any_broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker.url


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> str:
    """A fleet name of the test's own, so that tests on one broker cannot meet."""
    return f"t{abs(hash(request.node.nodeid)) % 10**10}"


@pytest.fixture
def config(
    artifacts: Path, test_set: Path, tmp_path: Path, fleet: str
) -> Callable[..., FleetConfig]:
    """Builds a configuration for fast rounds; keywords replace keys of its tables."""

    def build(**tables: Any) -> FleetConfig:
        base: dict[str, Any] = {
            "fleet": fleet,
            "store": tmp_path / "store",
            "model": {"artifacts": artifacts, "arch": ARCH},
            "round": {
                "rounds": 1,
                "deadline_seconds": 20,
                "wait_seconds": 15,
                "nudge_seconds": 1.5,
                "chunk_bytes": 1024,
                "retries": 1,
            },
            "evaluation": {"data": {"kind": "npz", "path": test_set}, "threads": 1},
        }
        for name, table in tables.items():
            base[name] = {**base.get(name, {}), **table} if isinstance(table, dict) else table
        return FleetConfig.model_validate(base)

    return build


class Running:
    """A server doing a run in a thread, and what it told about it."""

    def __init__(self, config: FleetConfig, url: str) -> None:
        self.events: list[RunEvent] = []
        self.finished: RunFinished | None = None
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.config = config.model_copy(
            update={"broker": config.broker.model_copy(update={"url": url})}
        )
        self.server = Server(config.fleet, config.store, self.config.broker, listener=self._hear)
        self._thread = threading.Thread(target=self._work, name="server", daemon=True)

    def _hear(self, event: RunEvent) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def _work(self) -> None:
        try:
            self.finished = self.server.run(self.config)
        except BaseException as error:  # noqa: BLE001  (the test raises it again)
            self.error = error
        with self.changed:
            self.changed.notify_all()

    def __enter__(self) -> Self:
        self.server.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self._thread.join(20)
        self.server.__exit__(None, None, None)

    def events_of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_event(self, kind: type, count: int = 1, timeout_seconds: float = 60.0) -> Any:
        with self.changed:
            done = self.changed.wait_for(
                lambda: len(self.events_of(kind)) >= count or self.error, timeout_seconds
            )
        if self.error:
            raise self.error
        assert done, f"no {kind.__name__} in {[event.type for event in self.events]}"
        return self.events_of(kind)[count - 1]

    def wait(self, timeout_seconds: float = 120.0) -> RunFinished:
        self._thread.join(timeout_seconds)
        if self.error is not None:
            raise self.error
        assert self.finished is not None, f"still running: {self.events}"
        return self.finished


@pytest.fixture
def running() -> Iterator[Callable[..., Running]]:
    """Starts servers that are stopped at the end of the test."""
    stack = []

    def start(config: FleetConfig, url: str) -> Running:
        server = Running(config, url)
        server.__enter__()
        stack.append(server)
        return server

    yield start
    for server in reversed(stack):
        server.__exit__(None, None, None)
