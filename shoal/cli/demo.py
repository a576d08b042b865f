"""Trains a fleet on this machine in three ways on the same data, and writes a report."""

import socket
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.evaluation import EvaluationConfig
from broker_server.settings.fleet import FleetConfig, ModelConfig, TiersConfig, TrainConfig
from broker_server.settings.rounds import RoundConfig
from broker_server.store import RoundRecord, Store, TaskRecord, queries
from broker_server.store.machine import RoundState
from fleet_protocol import control
from fleet_protocol.configuration import load_config, parse_config
from fleet_protocol.data import NpzData
from fleet_protocol.errors import TransportError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.recipe import RecipeTable
from fleet_protocol.spelling import without_login
from models.registry import Registry, infer_layout
from shoal.cli.console import error_console, print_rows, print_text, seconds_text
from shoal.cli.progress import RunDisplay, export_bar
from shoal.cli.report import (
    Arm,
    DevicePoint,
    Heading,
    Report,
    RoundPoint,
    arm_rows,
    write_report,
)
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.dataset import Dataset
from simulation.data.datasets import load_dataset
from simulation.data.partition import dirichlet, iid
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

FLEET = "demo"


def _device(task: TaskRecord) -> DevicePoint | None:
    if task.metrics is None:
        return None
    return DevicePoint(
        device=task.device,
        tier=task.tier,
        examples=task.metrics.weight,
        train_loss=task.metrics.train_loss,
        local_accuracy=task.metrics.evaluation.accuracy if task.metrics.evaluation else None,
        train_seconds=task.metrics.train_seconds,
    )


def _round(record: RoundRecord, tasks: list[TaskRecord]) -> RoundPoint:
    devices = []
    for task in tasks:
        point = _device(task)
        if point is not None:
            devices.append(point)
    return RoundPoint(
        number=record.number,
        accuracy=record.evaluation.accuracy if record.evaluation else None,
        loss=record.evaluation.loss if record.evaluation else None,
        metrics={m.name: m.value for m in record.evaluation.metrics} if record.evaluation else {},
        # A round without a recorded end counts 0 seconds.
        seconds=(record.ended_at or record.planned_at) - record.planned_at,
        devices=tuple(devices),
    )


def summarise(store_folder: Path, run: str, heading: Heading, seconds: float) -> Arm:
    """Read a run; raise a ConfigError if the store does not have it."""
    with closing(Store(store_folder, read_only=True)) as store:
        view = queries.status(store, run)
        # An abandoned round has made no version.
        # Only these have figures to show.
        closed = [record for record in store.rounds(run) if record.state is RoundState.CLOSED]
        points = tuple(
            _round(record, store.tasks(run, record.number, "train")) for record in closed
        )
    return Arm(
        **vars(heading),
        rounds=points,
        wire_bytes=view.run.wire_bytes if view.run else 0,
        payload_bytes=view.run.payload_bytes if view.run else 0,
        seconds=seconds,
        refusals=view.refusals,
    )


class Preset(FrozenModel):
    """One demo.

    Attributes:
        arch: architecture of the zoo.
        settings: its settings; input shape and classes follow from the data.
        devices: number of agents to start.
        widths: widths of the tiers, widest first; the tiers are assigned evenly, the widest to the
            first devices.
        partition: how the training data is split.
        alpha: concentration of a Dirichlet split.
        rounds: number of rounds of every run.
        epochs: local epochs.
        batch_size: samples per step.
        learning_rate: learning rate of the optimizer.
        baselines: whether to run AllSmall and Exclusive, too.
        evaluate_every: rounds between evaluations; each asks every device for a pass over its data
            (specification 1.6).
        deadline_seconds: deadline of a round.
    """

    arch: str
    settings: Mapping[str, Any] = Field(default_factory=dict)
    devices: int = Field(ge=1)
    widths: tuple[float, ...] = Field(min_length=1)
    partition: Literal["dirichlet", "iid"]
    alpha: float = Field(default=1.0, gt=0)
    rounds: int = Field(ge=1)
    epochs: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    recipe: RecipeTable = RecipeTable()
    baselines: bool
    evaluate_every: int = Field(default=1, ge=1)
    deadline_seconds: float = Field(gt=0)

    def width_of(self, index: int) -> float:
        """Return the widest tier that device ``index`` can hold."""
        # Equal shares of the devices, without a remainder for the narrowest tier.
        return self.widths[index * len(self.widths) // self.devices]


class DemoConfig(FrozenModel):
    """The file ``demo.toml``: a demo without files, and one that reads MNIST from SHOAL_DATA."""

    seed: int = Field(ge=0)
    digits: Preset
    mnist: Preset


def read_demos(path: Path | None) -> DemoConfig:
    """Read the presets of the demos from a file, by default ``shoal/cli/demo.toml``.

    Raises a ConfigError if it is invalid.
    """
    if path is not None:
        return load_config(path, DemoConfig)
    text = files("shoal.cli").joinpath("demo.toml").read_text(encoding="utf-8")
    return parse_config(text, DemoConfig, source="demo.toml")


@dataclass(frozen=True)
class _Prepared:
    """The files that exist before the fleet starts."""

    folder: Path
    test_set: Path
    devices: tuple[LocalDevice, ...]
    tiers: Mapping[float, str]


def _export(preset: Preset, data: Dataset, seed: int, out: Path) -> Mapping[float, str]:
    architecture = Registry.zoo().get(preset.arch)
    settings = architecture.settings(
        {**preset.settings, "input_shape": data.input_shape, "classes": data.classes}
    )
    layout = infer_layout(architecture, settings)
    tiers = {width: layout.tier(width) for width in preset.widths}
    with export_bar(error_console(), f"exporting {preset.arch}") as progress:
        export_architecture(
            ExportRequest(
                architecture,
                settings,
                tuple(tiers.values()),
                Recipe.from_table(preset.recipe),
                seed=seed,
                layout=layout,
            ),
            out,
            ExportOptions(formats=("onnx",), progress=progress, others="replace"),
        )
    return {width: tier.id for width, tier in tiers.items()}


def _prepare(data_name: str, preset: Preset, seed: int, folder: Path) -> _Prepared:
    data = load_dataset(data_name)
    count = preset.devices
    dealt = preset.partition == "dirichlet"
    samples_by_device = (
        dirichlet(data.train_y, count, preset.alpha, seed)
        if dealt
        else iid(len(data.train_y), count, seed)
    )
    (folder / "data").mkdir(parents=True)
    devices = []
    for index, samples in enumerate(samples_by_device):
        path = folder / "data" / f"device-{index}.npz"
        np.savez(path, x=data.train_x[samples], y=data.train_y[samples])
        devices.append(LocalDevice(f"device-{index}", path.resolve(), preset.width_of(index)))
    test_set = folder / "data" / "test.npz"
    np.savez(test_set, x=data.test_x, y=data.test_y)
    return _Prepared(
        folder,
        test_set,
        tuple(devices),
        _export(preset, data, seed, folder / "artifacts"),
    )


def _fleet_config(
    prepared: _Prepared, preset: Preset, seed: int, broker: BrokerConfig
) -> FleetConfig:
    folder = prepared.folder.resolve()
    return FleetConfig(
        fleet=FLEET,
        store=folder / "store",
        seed=seed,
        broker=broker,
        model=ModelConfig(artifacts=folder / "artifacts", arch=preset.arch, recipe=preset.recipe),
        round=RoundConfig(
            rounds=preset.rounds,
            # Every device takes part in every round.
            min_devices=preset.devices,
            deadline_seconds=preset.deadline_seconds,
        ),
        train=TrainConfig(
            learning_rate=preset.learning_rate,
            epochs=preset.epochs,
            batch_size=preset.batch_size,
        ),
        evaluation=EvaluationConfig(
            data=NpzData(path=prepared.test_set.resolve(), scale=1.0),
            every=preset.evaluate_every,
        ),
    )


def _arms(
    base: FleetConfig, prepared: _Prepared, preset: Preset
) -> list[tuple[Heading, FleetConfig]]:
    """Name and configuration of every run, the main one first."""
    smallest = prepared.tiers[min(preset.widths)]
    widest = prepared.tiers[max(preset.widths)]
    arms = [
        (
            Heading(
                "global",
                "Shoal",
                "every device trains the largest sub-model that it can hold",
            ),
            base,
        )
    ]
    # With one width the baselines would be the run itself.
    if preset.baselines and len(preset.widths) > 1:
        large = sum(device.max_width >= max(preset.widths) for device in prepared.devices)
        small_only = base.model_copy(
            update={
                "tiers": TiersConfig(allowed=(smallest,)),
                # The numbers outside this tier stay random, so the whole model says nothing.
                "evaluation": base.evaluation.model_copy(update={"tier": smallest}),
            }
        )
        large_only = base.model_copy(
            update={
                # Devices that hold only smaller tiers are not selected.
                "tiers": TiersConfig(allowed=(widest,), exclude_smaller=True),
                # Only these devices can take part, so a round must not wait for more.
                "round": base.round.model_copy(update={"min_devices": large}),
            }
        )
        small = Heading(
            "all_small",
            "AllSmall",
            f"every device trains {smallest}, the smallest sub-model",
        )
        exclusive = Heading(
            "exclusive",
            "Exclusive",
            f"only the {large} devices that can hold {widest} take part",
        )
        arms += [(small, small_only), (exclusive, large_only)]
    return arms


def _run_arm(
    server: Server, config: FleetConfig, title: str, shown: list[RunDisplay]
) -> control.RunFinished:
    with RunDisplay(error_console(), title) as display:
        # The server informs one listener about all its runs; the display shows the run in progress.
        shown.append(display)
        finished = server.run(config)
        shown.clear()
    if finished.status != "finished":
        raise TransportError(f"the run {title} {finished.status}: {finished.error}")
    return finished


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        # The port is free again once the socket closes; the broker takes it a moment later.
        return int(probe.getsockname()[1])


def run_demo(data: str, preset: Preset, seed: int, runs: Path, broker: str = "embedded") -> Report:
    """Export, start and train a fleet on this machine, and write a report to a folder of `runs`.

    Raises:
        ShoalError: a requirement of the demo is missing, or a run failed.
    """
    started = time.monotonic()
    folder = runs / f"demo-{data}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-seed{seed}"
    prepared = _prepare(data, preset, seed, folder)
    broker_config = BrokerConfig(url=broker, port=_free_port())
    base = _fleet_config(prepared, preset, seed, broker_config)
    shown: list[RunDisplay] = []  # of the run in progress

    def show(event: control.RunEvent) -> None:
        for display in shown:
            display.show(event)

    arms: list[Arm] = []
    with Server(FLEET, base.store, broker_config, listener=show) as server:
        devices = LocalFleet(
            folder / "devices",
            fleet=FLEET,
            broker=str(server.address),
            devices=prepared.devices,
        )
        with devices:
            for heading, config in _arms(base, prepared, preset):
                began = time.monotonic()
                finished = _run_arm(server, config, heading.title, shown)
                # An agent that ended must fail the demo rather than lower its number of devices.
                devices.check()
                arms.append(summarise(base.store, finished.run, heading, time.monotonic() - began))
    report = Report(
        title=f"Shoal demo: {preset.arch} on {data}",
        data=data,
        arch=preset.arch,
        devices={device.name: prepared.tiers[device.max_width] for device in prepared.devices},
        seed=seed,
        seconds=time.monotonic() - started,
        settings=_settings(preset, broker),
        arms=tuple(arms),
    )
    page, numbers = write_report(report, folder)
    _print(report, page, numbers)
    return report


def _settings(preset: Preset, broker: str) -> dict[str, str]:
    return {
        "model": ", ".join(
            [
                preset.arch,
                *(f"{name} = {value}" for name, value in preset.settings.items()),
            ]
        ),
        "split": f"Dirichlet({preset.alpha})" if preset.partition == "dirichlet" else "IID",
        "rounds": str(preset.rounds),
        "local epochs": str(preset.epochs),
        "batch size": str(preset.batch_size),
        "learning rate": str(preset.learning_rate),
        "broker": without_login(broker),
    }


def _print(report: Report, page: Path, numbers: Path) -> None:
    print_rows(report.title, arm_rows(report), empty="no run")
    print_text("\n".join(f"{arm.title}: {arm.about}" for arm in report.arms))
    print_text(f"seed {report.seed}, {seconds_text(report.seconds)} in all")
    print_text(f"page: {page}\nnumbers: {numbers}")
