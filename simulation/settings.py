"""The configuration of a simulation, ``sim.toml``, as frozen values.

The tables of a fleet's run are those of ``fleet.toml``. The tables for what a fleet has outside its
configuration are in `simulation.model_tables`, `simulation.data_tables`, `simulation.device_tables`
and `simulation.clock_settings`.
"""

from pathlib import Path

from pydantic import Field, model_validator

from broker_server.settings.combinations import yielding_defaults
from broker_server.settings.evaluation import EvaluationConfig, EvaluationKeys
from broker_server.settings.fleet import FleetConfig, ModelConfig, RunKeys
from broker_server.settings.private import kept_of
from broker_server.settings.rounds import RoundConfig, RoundKeys
from broker_server.store.queries.views import SIMULATED_FLEET
from fleet_protocol.data import NpzData
from simulation.clock_settings import ClockConfig
from simulation.data_tables import DataTable, PartitionTable
from simulation.device_tables import DevicesTable, EngineTable
from simulation.model_tables import ModelTable, OwnModelsTable

HOW_COMPUTED = frozenset({"out", "cache", "keep_versions", "run_name", "engine"})
"""Keys of the computation and the output of a simulation.

Results do not depend on them.
"""

NO_DEADLINE = 1e8
"""Simulated seconds, more than three years, after which a round without a deadline ends."""


class EvaluationTable(EvaluationKeys):
    """``[evaluation]``: evaluation of the global model; further keys are those of ``fleet.toml``.

    Attributes:
        local: whether to also evaluate the global model on every device's part of the test set,
            with the device's label mask (specification 1.6). If devices have personal models, these
            are evaluated instead.
        matthews: whether to also compute the Matthews correlation between predictions and labels;
            requires exactly two labels.
        perplexity: number of test samples in each chunk over which the perplexity of the global
            model is computed; 0 to skip the perplexity.
        holdout: share of every device's samples that is held out to evaluate the device's sub-model
            after training.
        tiers: ids of additional tiers to evaluate, each as the model that its devices receive.
    """

    tiers: tuple[str, ...] = ()
    local: bool = False
    matthews: bool = False
    perplexity: int = Field(default=0, ge=0)
    holdout: float = Field(default=0.0, ge=0, lt=1)


class RoundTable(RoundKeys):
    """``[round]``: the course of a round, in seconds of the emulated clock.

    Further keys are those of ``fleet.toml``.

    Attributes:
        deadline_seconds: seconds from the offers until the round closes.
    """

    deadline_seconds: float = Field(default=NO_DEADLINE, gt=0, le=NO_DEADLINE)


class SimulationConfig(RunKeys):
    """All keys of ``sim.toml``, in addition to those of a fleet's run.

    Attributes:
        out: folder of the results.
        cache: folder for exported artifacts and prepared data, which several simulations can share;
            by default, the folder ``out``.
        model: the model to train; the seed draws its initial weights.
        data: the data set.
        partition: assignment of samples to devices.
        devices: the virtual devices.
        round: the course of a round.
        evaluation: evaluation of the global model.
        engine: the compute engine.
        clock: emulated times of the devices.
        own_models: personal models of the devices; None for methods without them.
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
        # The torch backend lacks these features.
        onnx_only = {
            'train.optimizer_state = "keep"': self.train.optimizer_state == "keep",
            "train.micro_batch": self.train.micro_batch is not None,
            'train.rate.per = "step"': rate is not None and rate.per == "step",
            "evaluation.holdout": self.evaluation.holdout > 0,
        }
        for key, is_set in onnx_only.items():
            if is_set:
                raise ValueError(f'{key} requires engine.backend = "onnx"')
        return self

    @model_validator(mode="after")
    def _tiers_are_judged(self) -> "SimulationConfig":
        if self.evaluation.tiers and not self._global_is_judged:
            raise ValueError(
                "evaluation.tiers evaluates models of the server, but here devices keep parts of"
                " the model, or have different tasks; remove it"
            )
        return self

    @model_validator(mode="after")
    def _defaults_yield(self) -> "SimulationConfig":
        # The only change of a frozen value, during its creation.
        self.__dict__.update(yielding_defaults(self))
        return self

    @property
    def devices_judge(self) -> bool:
        """Return whether devices evaluate their models, because only they have them."""
        return self.own_models is not None or kept_of(self.private).keeps_values

    @property
    def _global_is_judged(self) -> bool:
        """Return whether the global model can be judged by one test set.

        It cannot if devices have different tasks, or keep parts of the model.
        """
        own_models = () if self.own_models is None else self.own_models.models
        if any(model.labels is not None for model in own_models):
            return False
        return not kept_of(self.private).parts

    def fleet(self, *, artifacts: Path, weights: Path, test_set: Path) -> FleetConfig:
        """Return the configuration of the simulated fleet."""
        # The server's table has fewer keys than that of a simulation.
        evaluation = self.evaluation.model_dump(include=set(EvaluationKeys.model_fields))
        data = NpzData(path=test_set) if self._global_is_judged else None
        return FleetConfig(
            fleet=SIMULATED_FLEET,
            store=self.out / "store",
            model=ModelConfig(artifacts=artifacts, arch=self.model.arch, weights=weights),
            round=RoundConfig(**self.round.model_dump()),
            evaluation=EvaluationConfig(
                data=data, tiers=self.evaluation.tiers, statistics_quorum=1.0, **evaluation
            ),
            **{key: getattr(self, key) for key in RunKeys.model_fields},
        )
