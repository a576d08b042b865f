"""The configuration of a simulation, ``sim.toml``, as frozen values.

The tables that say how a fleet runs are those of ``fleet.toml``: train, strategy, server_optimizer, tiers. What a fleet
has outside of its configuration - a model to export, data, devices - has tables here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from broker_server.config import (
    EvaluationConfig,
    FleetConfig,
    ModelConfig,
    NpzTestSet,
    RoundConfig,
    ServerOptimizerConfig,
    StrategyConfig,
    TiersConfig,
    TrainConfig,
)
from device_runtime.data import Augment
from fleet_protocol.frozen import FrozenModel
from simulation.clock import ClockConfig

__all__ = [
    "HOW_COMPUTED",
    "DataTable",
    "DeviceGroup",
    "DevicesTable",
    "EngineTable",
    "EvaluationTable",
    "ModelTable",
    "PartitionTable",
    "PersonalModel",
    "PersonalTable",
    "RecipeTable",
    "RoundTable",
    "SimulationConfig",
]

FLEET = "simulation"
HOW_COMPUTED = frozenset({"out", "cache", "keep_versions", "engine"})
"""Keys that say where and by whom a simulation is computed and what stays of it: its figures do not depend on them."""

_NO_DEADLINE = 1e8  # seconds of real time; how long a worker takes says nothing about the device it stands for

Width = Annotated[float, Field(gt=0, le=1)]


class RecipeTable(FrozenModel):
    """``[model.recipe]``: what a training step does beside the loss.

    Attributes:
        momentum: of SGD; 0 for none.
        weight_decay: added to the gradient.
        clip_norm: bound of the global gradient norm; 0 for none.
        proximal: whether the step has FedProx's proximal term.
    """

    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=5e-4, ge=0)
    clip_norm: float = Field(default=1.0, ge=0)
    proximal: bool = False


class ModelTable(FrozenModel):
    """``[model]``: what is trained.

    Attributes:
        arch: name of an architecture of the zoo, or of ``models``.
        settings: its settings; input shape, classes and vocabulary follow from the data unless they are given.
        models: Python file with architectures of your own.
        weights: safetensors file with global weights to start from; by default drawn with the seed.
        widths: of the tiers, relative to the global model.
        depths: of the tiers in blocks; None for the full depth alone.
        recipe: of a training step.
    """

    arch: str
    settings: Mapping[str, Any] = Field(default_factory=dict)
    models: Path | None = None
    weights: Path | None = None
    widths: tuple[Width, ...] = Field(default=(1.0,), min_length=1)
    depths: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(default=None, min_length=1)
    recipe: RecipeTable = RecipeTable()


class DataTable(FrozenModel):
    """``[data]``: a data set by name.

    Attributes:
        name: one of `simulation.datasets`.
        root: folder of the sets that are not shipped; by default what SHOAL_DATA names.
        options: of the loader, such as the window of ``watch``.
        train_limit: training samples to use at most, evenly spread; None for all.
        test_limit: the same for the test samples.
        augment: random changes to the training samples of every step; see ``docs/device.md``.
    """

    name: str
    root: Path | None = None
    options: Mapping[str, Any] = Field(default_factory=dict)
    train_limit: int | None = Field(default=None, ge=1)
    test_limit: int | None = Field(default=None, ge=1)
    augment: Augment = "none"


class PartitionTable(FrozenModel):
    """``[partition]``: who gets which samples.

    Attributes:
        kind: ``iid``, ``dirichlet``, ``shards`` (a number of labels per device, METHODS 1.8) or ``subject``.
        alpha: concentration of the Dirichlet split.
        per_device: shards of each device.
        as_released: with shards, the quirk of the released code.
        seed: of the split; None for the seed of the run.
    """

    kind: Literal["iid", "dirichlet", "shards", "subject"] = "iid"
    alpha: float = Field(default=1.0, gt=0)
    per_device: int = Field(default=2, ge=1)
    as_released: bool = False
    seed: int | None = Field(default=None, ge=0)


class PersonalModel(FrozenModel):
    """One entry of ``[[personal.models]]``.

    Attributes:
        arch: name of an architecture of the zoo, or of ``model.models``.
        settings: its settings; what follows from the data need not be given.
        labels: a task of the device's own: what each label of the data set is to it, from 0; -1 for labels that none of
            its samples has. Its personal model and its copy of the global model then have classes of their own, so
            ``strategy.fml.shared`` must leave out whatever depends on them.
    """

    arch: str
    settings: Mapping[str, Any] = Field(default_factory=dict)
    labels: tuple[Annotated[int, Field(ge=-1)], ...] | None = None

    @property
    def classes(self) -> int | None:
        """Labels of the task of its own, None without one."""
        return None if self.labels is None else max(self.labels) + 1

    @model_validator(mode="after")
    def _has_labels(self) -> PersonalModel:
        if self.labels is not None and set(self.labels) - {-1} != set(range(max(self.labels, default=-1) + 1)):
            raise ValueError("labels must use every label from 0 to its largest")
        if self.labels is not None and max(self.labels, default=-1) < 1:
            raise ValueError("labels must leave a task of at least two labels")
        return self


class PersonalTable(FrozenModel):
    """``[personal]``: the devices' own models, for mutual learning (METHODS 5).

    Attributes:
        models: dealt to the devices in turn.
    """

    models: tuple[PersonalModel, ...] = Field(min_length=1)


class DeviceGroup(FrozenModel):
    """One entry of ``[[devices.types]]``: devices that are alike.

    Attributes:
        type: name in the clock's table.
        link: name of a link in the clock's table, or its speed in Mbit/s.
        count: devices of this kind; None shares the rest evenly among the entries without one.
        max_width: widest sub-model they can train.
        max_depth: deepest, None for any.
    """

    type: str = "MacBookPro2018"
    link: str | float = "wifi"
    count: int | None = Field(default=None, ge=0)
    max_width: Width = 1.0
    max_depth: int | None = Field(default=None, ge=1)


class DevicesTable(FrozenModel):
    """``[devices]``.

    Attributes:
        count: virtual devices.
        types: their kinds in the order of the devices' ids; one kind that can train everything by default.
    """

    count: int = Field(ge=1)
    types: tuple[DeviceGroup, ...] = Field(default=(DeviceGroup(),), min_length=1)

    @model_validator(mode="after")
    def _counts_add_up(self) -> DevicesTable:
        given = sum(item.count or 0 for item in self.types)
        if given > self.count or (given < self.count and all(item.count is not None for item in self.types)):
            raise ValueError(f"the types count {given} devices, devices.count is {self.count}")
        return self

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the devices; their order as text is their order as numbers."""
        digits = len(str(self.count - 1))
        return tuple(f"device-{index:0{digits}d}" for index in range(self.count))

    @property
    def kinds(self) -> tuple[DeviceGroup, ...]:
        """The kind of every device."""
        open_entries = [index for index, item in enumerate(self.types) if item.count is None]
        left = self.count - sum(item.count or 0 for item in self.types)
        share, more = divmod(left, len(open_entries)) if open_entries else (0, 0)
        counts = [
            item.count if item.count is not None else share + (open_entries.index(index) < more)
            for index, item in enumerate(self.types)
        ]
        return tuple(item for item, count in zip(self.types, counts, strict=True) for _ in range(count))


class RoundTable(FrozenModel):
    """``[round]``; a simulated device always answers, so there are no deadlines.

    Attributes:
        rounds: rounds to close.
        fraction: share of the devices that is asked, rounded up.
        min_devices: but at least so many.
    """

    rounds: int = Field(default=20, ge=1)
    fraction: float = Field(default=1.0, gt=0, le=1)
    min_devices: int = Field(default=1, ge=1)


class EvaluationTable(FrozenModel):
    """``[evaluation]``: how the global model is judged; the keys are those of ``fleet.toml``.

    Attributes:
        local: also judge it on every device's own part of the test set, with the device's label mask (METHODS 1.6);
            with personal models those are judged there instead.
        matthews: also correlate its predictions with the labels, of which there must be two.
        perplexity: also compute its perplexity over chunks of so many test samples; 0 for none.
        holdout: share of every device's samples on which its sub-model is judged after training.
        tier: see `broker_server.config.EvaluationConfig`, as the rest.
        batch_size: samples per call.
        every: closed rounds between evaluations.
        statistics: where static batch norm gets its statistics.
        combine: how the devices' variances become one.
        statistics_every: evaluations between statistics queries.
        statistics_fraction: share of the devices that a statistics query asks.
        threads: for onnxruntime; 0 takes every core.
    """

    local: bool = False
    matthews: bool = False
    perplexity: int = Field(default=0, ge=0)
    holdout: float = Field(default=0.0, ge=0, lt=1)
    tier: str | None = None
    batch_size: int = Field(default=256, ge=1)
    every: int = Field(default=1, ge=1)
    statistics: Literal["query", "server-batch"] = "query"
    combine: Literal["pooled", "per_client"] = "pooled"
    statistics_every: int = Field(default=1, ge=1)
    statistics_fraction: float = Field(default=1.0, gt=0, le=1)
    threads: int = Field(default=0, ge=0)


class EngineTable(FrozenModel):
    """``[engine]``: what computes; the results do not depend on the number of workers.

    Attributes:
        kind: ``local`` (processes of this machine) or ``ray``.
        workers: processes or actors; 0 for one per core.
        address: of a running Ray cluster; None starts one on this machine.
        backend: ``onnx`` (the graphs the devices run) or ``torch``.
        device: of the torch backend: ``cpu`` or ``cuda``.
        group: virtual devices of one tier that the torch backend trains together.
    """

    kind: Literal["local", "ray"] = "local"
    workers: int = Field(default=0, ge=0)
    address: str | None = None
    backend: Literal["onnx", "torch"] = "onnx"
    device: Literal["cpu", "cuda"] = "cpu"
    group: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _go_together(self) -> EngineTable:
        if self.backend == "onnx" and (self.device != "cpu" or self.group != 1):
            raise ValueError('device and group are for backend = "torch"')
        if self.kind == "local" and self.address is not None:
            raise ValueError('address is for kind = "ray"')
        return self


class SimulationConfig(FrozenModel):
    """Everything ``sim.toml`` says.

    Attributes:
        out: folder of the results.
        cache: folder for exported artifacts and prepared data, which simulations can share; ``out`` by default.
        keep_versions: how many of the newest global versions keep their weights, beside the one that was judged best;
            None for all of them.
        seed: of the initial weights, the split, sampling, plans and shuffling.
        model: what is trained.
        data: on what.
        partition: who gets which samples.
        devices: the virtual devices.
        round: how rounds go.
        train: how devices train.
        strategy: how sub-models are cut and merged.
        server_optimizer: what the server does with a merge.
        tiers: which device gets which tier.
        evaluation: how the global model is judged.
        engine: what computes.
        clock: how long the devices would take.
        personal: the devices' own models, None for methods without.
    """

    out: Path = Path("runs/simulation")
    cache: Path | None = None
    keep_versions: int | None = Field(default=None, ge=1)
    seed: int = Field(default=1, ge=0)
    model: ModelTable
    data: DataTable
    partition: PartitionTable = PartitionTable()
    devices: DevicesTable
    round: RoundTable = RoundTable()
    train: TrainConfig = TrainConfig()
    strategy: StrategyConfig = StrategyConfig()
    server_optimizer: ServerOptimizerConfig | None = None
    tiers: TiersConfig = TiersConfig()
    evaluation: EvaluationTable = EvaluationTable()
    engine: EngineTable = EngineTable()
    clock: ClockConfig = ClockConfig()
    personal: PersonalTable | None = None

    def relative_to(self, folder: Path) -> SimulationConfig:
        """The same configuration with its relative paths taken from ``folder``.

        Args:
            folder: usually where the file lies.
        """
        model = {
            key: folder / value for key in ("models", "weights") if (value := getattr(self.model, key)) is not None
        }
        data = {} if self.data.root is None else {"root": folder / self.data.root}
        return self.model_copy(
            update={
                "out": folder / self.out,
                "cache": None if self.cache is None else folder / self.cache,
                "model": self.model.model_copy(update=model),
                "data": self.data.model_copy(update=data),
                "clock": self.clock.relative_to(folder),
            }
        )

    def fleet(self, *, artifacts: Path, weights: Path, test_set: Path) -> FleetConfig:
        """The configuration of the fleet that is simulated.

        Args:
            artifacts: folder that was exported.
            weights: safetensors file with the initial global weights.
            test_set: npz file.
        """
        evaluation = self.evaluation.model_dump(exclude={"local", "matthews", "perplexity", "holdout"})
        # Where devices have tasks of their own, the global model has none that it could be judged by.
        tasks = self.personal is not None and any(item.labels is not None for item in self.personal.models)
        data = None if tasks else NpzTestSet(path=test_set)
        return FleetConfig(
            fleet=FLEET,
            store=self.out / "store",
            keep_versions=self.keep_versions,
            seed=self.seed,
            model=ModelConfig(artifacts=artifacts, arch=self.model.arch, weights=weights),
            round=RoundConfig(**self.round.model_dump(), quorum=1.0, deadline_seconds=_NO_DEADLINE),
            train=self.train,
            strategy=self.strategy,
            server_optimizer=self.server_optimizer,
            tiers=self.tiers,
            evaluation=EvaluationConfig(data=data, statistics_quorum=1.0, **evaluation),
        )
