"""The configuration of a run, ``fleet.toml``, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from broker_server.assignment import parse_mix, scheduled_rate
from broker_server.method_config import ServerOptimizerConfig, StrategyConfig
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Name

__all__ = [
    "BrokerConfig",
    "EvaluationConfig",
    "FleetConfig",
    "IdxTestSet",
    "ModelConfig",
    "NpzTestSet",
    "RoundConfig",
    "ServerOptimizerConfig",
    "StrategyConfig",
    "TestSetConfig",
    "TiersConfig",
    "TrainConfig",
]

Share = Annotated[float, Field(gt=0, le=1)]


class BrokerConfig(FrozenModel):
    """Which broker carries the fleet.

    Attributes:
        url: ``embedded``, or ``mqtt[s]://[user:password@]host[:port]``.
        port: of the embedded broker.
        listen: address the embedded broker listens on; ``0.0.0.0`` lets boards on the network in.
        ca_file: certificates to trust instead of the system's.
        cert_file: client certificate of the server.
        key_file: its key.
        connect_timeout_seconds: how long to try the first connection.
    """

    url: str = "embedded"
    port: int = Field(default=1883, ge=1, le=65535)
    listen: str = "127.0.0.1"
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    connect_timeout_seconds: float = Field(default=30.0, gt=0)


class ModelConfig(FrozenModel):
    """Which model is trained.

    Attributes:
        artifacts: folder that ``shoal export`` wrote.
        arch: name of the architecture in it.
        weights: safetensors file to start from instead of the exported initial weights.
    """

    artifacts: Path = Path("artifacts")
    arch: str
    weights: Path | None = None


class RoundConfig(FrozenModel):
    """How rounds go.

    Attributes:
        rounds: rounds to close.
        fraction: share of the eligible online devices that is asked, rounded up.
        min_devices: devices that must be online and eligible before a round starts, and are asked at least.
        quorum: share of the asked devices, rounded up, whose updates make a round.
        deadline_seconds: time from the offers to the close.
        wait_seconds: how long to wait for ``min_devices``.
        nudge_seconds: a device silent for this long is sent its offer again.
        retries: abandoned rounds in a row before the run fails.
        chunk_bytes: payload bytes of a chunk; hosted brokers cap a packet at 128 kB.
    """

    rounds: int = Field(default=20, ge=1)
    fraction: Share = 1.0
    min_devices: int = Field(default=1, ge=1)
    quorum: Share = 0.5
    deadline_seconds: float = Field(default=120.0, gt=0)
    wait_seconds: float = Field(default=60.0, gt=0)
    nudge_seconds: float = Field(default=10.0, gt=0)
    retries: int = Field(default=3, ge=1)
    chunk_bytes: int = Field(default=96 * 1024, ge=1024, le=15 * 1024 * 1024)


class TrainConfig(FrozenModel):
    """How devices train.

    Attributes:
        learning_rate: before the first milestone.
        epochs: passes over a device's data in one round.
        steps: instead of whole passes exactly so many steps in one round, over as many passes as they take.
        batch_size: samples per step.
        mask_labels: zero the logits of labels a device does not hold (METHODS 1.5).
        milestones: rounds at which the learning rate is multiplied by ``factor``.
        factor: of the multi-step schedule.
        schedule: a milestone acts ``after`` its round (METHODS 1.2, step 6), or already in it (``before``, 2.6).
    """

    learning_rate: float = Field(default=0.05, gt=0)
    epochs: int = Field(default=3, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=32, ge=1)
    mask_labels: bool = True
    milestones: tuple[int, ...] = ()
    factor: float = Field(default=0.1, gt=0)
    schedule: Literal["after", "before"] = "after"

    def rate_after(self, closed_rounds: int) -> float:
        """The learning rate of the round that follows ``closed_rounds`` closed ones."""
        return scheduled_rate(self.learning_rate, self.milestones, self.factor, closed_rounds + 1, self.schedule)


class TiersConfig(FrozenModel):
    """Which device gets which tier.

    Attributes:
        assign: ``capacity``: the largest tier a device declares itself able to train. ``fix`` and ``dynamic``: the
            level it is given by ``levels``, once or before every round (METHODS 1.1), but never more than that.
        levels: a mix of levels such as ``a1-b1-e2``; the first level is the global model's.
        allowed: ids of the tiers in use; None for every exported one.
        exclude_smaller: only devices able to train the full model take part (the Exclusive baseline).
        memory_share: share of a board's free memory that training may take.
    """

    assign: Literal["capacity", "fix", "dynamic"] = "capacity"
    levels: str | None = None
    allowed: tuple[str, ...] | None = Field(default=None, min_length=1)
    exclude_smaller: bool = False
    memory_share: Share = 0.8

    @model_validator(mode="after")
    def _levels_are_for_assigning(self) -> TiersConfig:
        if (self.levels is None) != (self.assign == "capacity"):
            raise ValueError('levels go with assign = "fix" or "dynamic", and these need levels')
        if self.levels is not None:
            parse_mix(self.levels)
        return self


class _TestSet(FrozenModel):
    """What every test set has: the same keys, with the same meaning, as a device's ``[data]`` table.

    A sample becomes ``(x * scale - mean) / std``; tokens stay as they are.

    Attributes:
        path: the file with the samples.
        shape: shape of one sample to give to flat or squeezed samples; by default the model's.
        scale: factor of every value.
        mean: subtracted after scaling; a number, or one per channel (the first axis of a sample).
        std: divides last; a number, or one per channel.
        limit: use only the first samples; None for all.
    """

    path: Path
    shape: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    scale: float = Field(default=1.0, gt=0)
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    limit: int | None = Field(default=None, ge=1)


class NpzTestSet(_TestSet):
    """Arrays in one npz file.

    Attributes:
        x_key: array of samples, one per row.
        y_key: array of labels.
    """

    kind: Literal["npz"] = "npz"
    x_key: str = "x"
    y_key: str = "y"


class IdxTestSet(_TestSet):
    """Two IDX files as MNIST has them, plain or gzip.

    Attributes:
        labels: the file with the labels.
        scale: factor of every value; pixels are 0 to 255.
    """

    kind: Literal["idx"] = "idx"
    labels: Path
    scale: float = Field(default=1 / 255, gt=0)


TestSetConfig = Annotated[NpzTestSet | IdxTestSet, Field(discriminator="kind")]


def _moved(data: TestSetConfig, folder: Path) -> TestSetConfig:
    """The same test set with relative paths taken from ``folder``."""
    paths = {"path": folder / data.path}
    if isinstance(data, IdxTestSet):
        paths["labels"] = folder / data.labels
    return data.model_copy(update=paths)


class EvaluationConfig(FrozenModel):
    """How the global model is judged.

    Attributes:
        data: the server's test set; None evaluates nothing.
        tier: id of the tier that is judged; None judges the whole model. A run that trains only smaller tiers has
            trained nothing else.
        tiers: ids of tiers that are judged beside it, each as the model that its devices are sent; where plans move or
            are drawn, at the leading units.
        tier_data: test sets of tiers that have labels of their own; the others are judged on ``data``.
        batch_size: samples per call of the eval graph.
        every: closed rounds between evaluations; the last round is always evaluated.
        statistics: where static batch norm gets its statistics: asked from the devices, or taken over the batches
            of the server's test set.
        combine: how the devices' variances become one: ``pooled`` adds the variance between the devices' means,
            ``per_client`` does not (METHODS 1.6, vector H8).
        statistics_every: evaluations between statistics queries; in between the last answer is used.
        statistics_fraction: share of the devices with data that a statistics query asks, rounded up.
        statistics_quorum: share of the asked devices that must answer a statistics query.
        threads: for onnxruntime; 0 takes every core.
    """

    data: TestSetConfig | None = None
    tier: str | None = None
    tiers: tuple[str, ...] = ()
    tier_data: Mapping[str, TestSetConfig] = Field(default_factory=dict)
    batch_size: int = Field(default=256, ge=1)
    every: int = Field(default=1, ge=1)
    statistics: Literal["query", "server-batch"] = "query"
    combine: Literal["pooled", "per_client"] = "pooled"
    statistics_every: int = Field(default=1, ge=1)
    statistics_fraction: Share = 1.0
    statistics_quorum: Share = 0.5
    threads: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _tiers_have_data(self) -> EvaluationConfig:
        if (self.tiers or self.tier_data) and self.data is None:
            raise ValueError("evaluation.tiers and tier_data go with evaluation.data, the test set of the whole model")
        stray = self.tier_data.keys() - {self.tier, *self.tiers}
        if stray:
            raise ValueError(f"evaluation.tier_data: {min(stray)} is not judged; name it in evaluation.tiers")
        return self


class FleetConfig(FrozenModel):
    """Everything ``fleet.toml`` says.

    Attributes:
        fleet: name of the fleet, first part of every topic.
        store: folder of the server's database and blobs.
        keep_versions: how many of the newest global versions keep their weights in the store, beside the one that was
            judged best; None for all of them.
        seed: of sampling, plans and the devices' shuffling.
        broker: which broker.
        model: which model.
        round: how rounds go.
        train: how devices train.
        strategy: how sub-models are cut and merged.
        server_optimizer: what the server does with a merge; None for what the strategy does by itself.
        tiers: which device gets which tier.
        evaluation: how the global model is judged.
    """

    fleet: Name
    store: Path = Path("runs/store")
    keep_versions: int | None = Field(default=None, ge=1)
    seed: int = Field(default=1, ge=0)
    broker: BrokerConfig = BrokerConfig()
    model: ModelConfig
    round: RoundConfig = RoundConfig()
    train: TrainConfig = TrainConfig()
    strategy: StrategyConfig = StrategyConfig()
    server_optimizer: ServerOptimizerConfig | None = None
    tiers: TiersConfig = TiersConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _consistent(self) -> FleetConfig:
        if list(self.train.milestones) != sorted(set(self.train.milestones)):
            raise ValueError("train.milestones must ascend")
        if self.server_optimizer is not None:
            _ = self.server_optimizer.settings  # refuses what does not go together
        return self

    def relative_to(self, folder: Path) -> FleetConfig:
        """The same configuration with its relative paths taken from ``folder``.

        Args:
            folder: usually where the file lies.
        """
        evaluation = self.evaluation
        if evaluation.data is not None:
            moved = {tier: _moved(data, folder) for tier, data in evaluation.tier_data.items()}
            evaluation = evaluation.model_copy(update={"data": _moved(evaluation.data, folder), "tier_data": moved})
        files = {
            key: folder / value
            for key in ("ca_file", "cert_file", "key_file")
            if (value := getattr(self.broker, key)) is not None
        }
        model = {"artifacts": folder / self.model.artifacts}
        if self.model.weights is not None:
            model["weights"] = folder / self.model.weights
        return self.model_copy(
            update={
                "store": folder / self.store,
                "broker": self.broker.model_copy(update=files),
                "model": self.model.model_copy(update=model),
                "evaluation": evaluation,
            }
        )
