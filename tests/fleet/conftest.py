"""A small real fleet: an exported model, digits on disk, and helpers to run it."""

import contextlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.evaluation import Evaluator, load_test_set
from broker_server.service.authority import enroll, found_fleet
from broker_server.service.new_fleet import NewFleet
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.evaluation import EvaluationConfig
from broker_server.settings.fleet import FleetConfig, ModelConfig, TrainConfig
from broker_server.settings.rounds import RoundConfig
from fleet_protocol import control
from fleet_protocol.data import NpzData
from models.plan import compile_plan, make_plan
from models.registry import Registry, infer_layout
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.datasets import load_dataset
from simulation.data.partition import dirichlet
from tests.brokers import free_port
from tests.fleet.boards import Board, board_of_source
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

WIDTHS = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Ground:
    """What a fleet stands on.

    Attributes:
        folder: of this test.
        artifacts: exported once for all tests.
        data: npz files of the devices and ``test.npz``.
        tiers: ids of the tiers, widest first.
    """

    folder: Path
    artifacts: Path
    data: Path
    tiers: tuple[str, ...]

    def devices(self) -> list[LocalDevice]:
        """One device per width."""
        return [
            LocalDevice(f"device-{i}", self.data / f"device-{i}.npz", width)
            for i, width in enumerate(WIDTHS)
        ]

    def fleet(self, broker: str, devices: list[LocalDevice] | None = None) -> LocalFleet:
        """Agents as processes."""
        return LocalFleet(
            self.folder / "devices", fleet="test", broker=broker, devices=devices or self.devices()
        )

    def config(self, broker: str, **rounds: object) -> FleetConfig:
        """A run of three rounds; ``rounds`` changes its ``[round]`` table."""
        settings = {
            "rounds": 3,
            "min_devices": len(WIDTHS),
            "deadline_seconds": 60.0,
            "nudge_seconds": 2.0,
            **rounds,
        }
        return FleetConfig(
            fleet="test",
            store=self.folder / "store",
            broker=BrokerConfig(url=broker, insecure=broker.startswith("memory:")),
            model=ModelConfig(artifacts=self.artifacts, arch="mlp"),
            round=RoundConfig.model_validate(settings),
            train=TrainConfig(learning_rate=0.1, epochs=2, batch_size=16),
            evaluation=EvaluationConfig(data=NpzData(path=self.data / "test.npz")),
        )


@dataclass
class Watcher:
    """Collects the events of a run and calls back on the first of a kind."""

    events: list[control.RunEvent] = field(default_factory=list)
    reactions: list[tuple[Callable[[control.RunEvent], bool], Callable[[], None]]] = field(
        default_factory=list
    )

    def once(self, when: Callable[[control.RunEvent], bool], do: Callable[[], None]) -> None:
        """Call ``do`` at the first event that ``when`` accepts."""
        self.reactions.append((when, do))

    def __call__(self, event: control.RunEvent) -> None:
        self.events.append(event)
        for reaction in list(self.reactions):
            if reaction[0](event):
                self.reactions.remove(reaction)
                reaction[1]()

    def events_of(self, kind: type) -> list:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]


def start_accuracy(config: FleetConfig) -> float:
    """Accuracy of the judged part of the initial weights on the test set, for models without batch
    norm.
    """
    artifacts = load_artifacts(
        config.model.artifacts, config.model.arch, chunk_bytes=config.round.chunk_bytes
    )
    layout = artifacts.layout
    judged = artifacts.tiers[config.evaluation.tier or artifacts.full.tier.id]
    weights = compile_plan(layout, make_plan(layout, judged.tier)).slice(
        artifacts.initial_weights()
    )
    data = load_test_set(config.evaluation.data, judged.manifest)
    return Evaluator(judged, data, batch_size=256, threads=1).evaluate(weights, {}).accuracy


def run(config: FleetConfig, watcher: Watcher) -> control.RunFinished:
    """A server for one run."""
    with Server(config.fleet, config.store, config.broker, listener=watcher) as server:
        return server.run(config)


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """Digits split among the devices, and an mlp exported at three widths."""
    data = load_dataset("digits")
    folder = tmp_path_factory.mktemp("ground")
    for index, part in enumerate(dirichlet(data.train_y, len(WIDTHS), 1.0, seed=5)):
        np.savez(folder / f"device-{index}.npz", x=data.train_x[part], y=data.train_y[part])
    np.savez(folder / "test.npz", x=data.test_x, y=data.test_y)
    architecture = Registry.zoo().get("mlp")
    settings = architecture.settings({"input_shape": (1, 8, 8)})
    layout = infer_layout(architecture, settings)
    tiers = tuple(layout.tier(width) for width in WIDTHS)
    export_architecture(
        ExportRequest(architecture, settings, tiers, Recipe()),
        folder / "artifacts",
        ExportOptions(formats=("onnx",)),
    )
    return folder, tuple(tier.id for tier in tiers)


@pytest.fixture
def ground(exported, tmp_path):
    """A folder of its own on the shared exports."""
    folder, tiers = exported
    return Ground(tmp_path, folder / "artifacts", folder, tiers)


@pytest.fixture
def lab(ground):
    """A server that is up, and the folder of its fleet."""
    with contextlib.ExitStack() as stack:
        folder = ground.folder / "lab"
        port = free_port()
        found_fleet(folder, NewFleet("test", "127.0.0.1", port, "mosquitto"))
        config = BrokerConfig(url="mosquitto", port=port, identity=folder / "server.enrolment")
        paths = [enroll(folder, f"device-{index}") for index in range(2)]

        def up(rounds=0):
            server = stack.enter_context(Server("test", ground.folder / "store", config))
            run = ground.config("embedded", rounds=rounds or 1, min_devices=1).model_copy(
                update={"broker": config}
            )

            def work():
                """Runs, one after the other: one ends where nobody is left who trains."""
                for seed in itertools.count():
                    if server.run(run.model_copy(update={"seed": seed})).status == "stopped":
                        return

            serving = threading.Thread(target=work if rounds else server.serve)
            serving.start()
            stack.callback(serving.join, 60)
            stack.callback(server.stop)
            return server

        def board(index, **options):
            made = ground.folder / f"board-{index}"
            board_of_source(made, paths[index], ground.data / f"device-{index}.npz", **options)
            return stack.enter_context(Board(made))

        yield folder, up, board
