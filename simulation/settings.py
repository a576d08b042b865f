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
from broker_server.store.queries.views import SIMULATED_FLEET
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

HOW_COMPUTED = frozenset({"out", "cache", "keep_versions", "engine"})
"""Keys that say where a simulation is computed and what stays of it.

Its figures do not depend on them.
"""

NO_DEADLINE = 1e8
"""Simulated seconds, more than three years, after which a round without a deadline ends."""


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
    """Everything in ``sim.toml``, beside what a run of a fleet has as well.

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
        if self.engine.backend != "torch":
            return self
        rate = self.train.rate
        onnx_only = {
            'train.optimizer_state = "keep"': self.train.optimizer_state == "keep",
            "train.micro_batch": self.train.micro_batch is not None,
            'train.rate.per = "step"': rate is not None and rate.per == "step",
            "evaluation.holdout": self.evaluation.holdout > 0,
        }
        for key, is_set in onnx_only.items():
            if is_set:
                raise ValueError(f'{key} is for engine.backend = "onnx"')
        return self

    @model_validator(mode="after")
    def _defaults_yield(self) -> "SimulationConfig":
        # A frozen value is changed while it is made alone: what yields never was set.
        self.__dict__.update(yielding_defaults(self))
        return self

    def fleet(self, *, artifacts: Path, weights: Path, test_set: Path) -> FleetConfig:
        """Return the configuration of the fleet that is simulated."""
        evaluation = self.evaluation.model_dump(include=set(EvaluationKeys.model_fields))
        data: NpzData | None = NpzData(path=test_set)
        own_models = () if self.own_models is None else self.own_models.models
        if any(model.labels is not None for model in own_models):
            # Devices have their own tasks, by none of which the global model could be judged.
            data = None
        return FleetConfig(
            fleet=SIMULATED_FLEET,
            store=self.out / "store",
            model=ModelConfig(artifacts=artifacts, arch=self.model.arch, weights=weights),
            round=RoundConfig(**self.round.model_dump()),
            evaluation=EvaluationConfig(data=data, statistics_quorum=1.0, **evaluation),
            **{key: getattr(self, key) for key in RunKeys.model_fields},
        )
