"""The configuration of a simulation, ``sim.toml``, as frozen values.

The tables that say how a fleet runs are those of ``fleet.toml``. What a fleet has outside of its
configuration has tables in `simulation.tables`.
"""

from pathlib import Path

from pydantic import Field, model_validator

from broker_server.settings.combinations import yielding_defaults
from broker_server.settings.evaluation import EvaluationConfig, EvaluationKeys
from broker_server.settings.fleet import FleetConfig, ModelConfig, RunKeys
from broker_server.settings.rounds import RoundConfig, RoundKeys
from fleet_protocol.data import NpzData
from simulation.clock import ClockConfig
from simulation.tables import (
    DataTable,
    DevicesTable,
    EngineTable,
    ModelTable,
    OwnModelsTable,
    PartitionTable,
)

FLEET = "simulation"
HOW_COMPUTED = frozenset({"out", "cache", "keep_versions", "engine"})
"""Keys that say where and by whom a simulation is computed and what stays of it: its figures do not
depend on them.
"""

NO_DEADLINE = 1e8
"""Seconds of simulated time after which a round ends where no deadline is set: more than three
years.
"""


class EvaluationTable(EvaluationKeys):
    """``[evaluation]``: how the global model is judged; further keys are those of ``fleet.toml``.

    Attributes:
        local: also judge it on every device's own part of the test set, with the device's label
            mask (specification 1.6); where devices have models of their own, those are judged there
            instead.
        matthews: also correlate its predictions with the labels, of which there must be two.
        perplexity: also compute its perplexity over chunks of so many test samples; 0 for none.
        holdout: share of every device's samples on which its sub-model is judged after training.
    """

    local: bool = False
    matthews: bool = False
    perplexity: int = Field(default=0, ge=0)
    holdout: float = Field(default=0.0, ge=0, lt=1)


class RoundTable(RoundKeys):
    """``[round]``: how rounds go, in seconds of the emulated clock.

    Further keys are those of ``fleet.toml``.

    Attributes:
        deadline_seconds: time from the offers to the close.
    """

    deadline_seconds: float = Field(default=NO_DEADLINE, gt=0, le=NO_DEADLINE)


class SimulationConfig(RunKeys):
    """Everything ``sim.toml`` says, beside what a run is in a fleet, too.

    Attributes:
        out: folder of the results.
        cache: folder for exported artifacts and prepared data, which simulations can share; ``out``
            by default.
        model: what is trained; its initial weights are drawn with the seed.
        data: on what.
        partition: who gets which samples.
        devices: the virtual devices.
        round: how rounds go.
        evaluation: how the global model is judged.
        engine: what computes.
        clock: how long the devices would take.
        own_models: the devices' own models, None for methods without.
    """

    out: Path = Path("runs/simulation")
    cache: Path | None = None
    model: ModelTable
    data: DataTable
    partition: PartitionTable = PartitionTable()
    devices: DevicesTable
    round: RoundTable = RoundTable()
    evaluation: EvaluationTable = EvaluationTable()
    engine: EngineTable = EngineTable()
    clock: ClockConfig = ClockConfig()
    own_models: OwnModelsTable | None = None

    @model_validator(mode="after")
    def _backend_can(self) -> "SimulationConfig":
        given = {
            'train.optimizer_state = "keep"': self.train.optimizer_state == "keep",
            "train.micro_batch": self.train.micro_batch is not None,
            'train.rate.per = "step"': self.train.rate is not None
            and self.train.rate.per == "step",
            "evaluation.holdout": self.evaluation.holdout > 0,
        }
        if self.engine.backend == "torch" and (
            here := [key for key, there in given.items() if there]
        ):
            raise ValueError(f'{here[0]} is for engine.backend = "onnx"')
        return self

    @model_validator(mode="after")
    def _defaults_yield(self) -> "SimulationConfig":
        # A frozen value is changed while it is made alone: what yields never was set.
        self.__dict__.update(yielding_defaults(self))
        return self

    def fleet(self, *, artifacts: Path, weights: Path, test_set: Path) -> FleetConfig:
        """The configuration of the fleet that is simulated."""
        evaluation = self.evaluation.model_dump(include=set(EvaluationKeys.model_fields))
        # Where devices have tasks of their own, the global model has none that it could be judged
        # by.
        tasks = self.own_models is not None and any(
            item.labels is not None for item in self.own_models.models
        )
        data = None if tasks else NpzData(path=test_set)
        return FleetConfig(
            fleet=FLEET,
            store=self.out / "store",
            model=ModelConfig(artifacts=artifacts, arch=self.model.arch, weights=weights),
            round=RoundConfig(**self.round.model_dump()),
            evaluation=EvaluationConfig(data=data, statistics_quorum=1.0, **evaluation),
            **{key: getattr(self, key) for key in RunKeys.model_fields},
        )
