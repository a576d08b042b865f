"""How the global model is evaluated, ``[evaluation]``: shared keys, and a fleet's test sets."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from fleet_protocol.data import DataConfig
from fleet_protocol.frozen import STORED, FrozenModel

_MOST_THREADS = 1024
_FALLING = frozenset({"loss", "mae", "rmse", "perplexity"})
Share = Annotated[float, Field(gt=0, le=1)]


class EvaluationKeys(FrozenModel):
    """How a global model is evaluated, wherever its test set comes from.

    Attributes:
        tier: id of the tier that is evaluated; None evaluates the whole model. Name a tier if a run
            trains only smaller tiers, because the rest of the model then stays untrained.
        batch_size: number of samples per call of the eval graph.
        every: number of closed rounds from one evaluation to the next; the last round is always
            evaluated.
        statistics: source of the statistics of static batch norms: ``query`` requests the
            statistics from the devices, and ``server-batch`` computes them over batches of the
            server's test set.
        combine: how the devices' variances are combined: ``pooled`` adds the variance between the
            devices' means, and ``per_client`` does not (specification 1.6, vector H8).
        statistics_every: number of evaluations from one statistics query to the next; evaluations
            in between use the last statistics.
        statistics_fraction: share of the devices with data that a statistics query selects, rounded
            up.
        threads: number of threads for onnxruntime; 0 uses every core.
        metric: metric that determines the best version: ``accuracy``, ``loss``, or a metric of the
            recipe. None means the accuracy, or the loss if the model has no accuracy.
        direction: whether ``higher`` or ``lower`` values of the metric are better; None means
            ``lower`` for ``loss``, ``mae``, ``rmse`` and ``perplexity``, and ``higher`` for all
            other metrics.
        patience: number of consecutive evaluations without improvement after which the run ends
            before its last round; None runs all rounds.
        min_delta: amount by which an evaluation must improve on the best one to count as an
            improvement.
    """

    tier: str | None = None
    batch_size: int = Field(default=256, ge=1)
    every: int = Field(default=1, ge=1)
    statistics: Literal["query", "server-batch"] = "query"
    combine: Literal["pooled", "per_client"] = "pooled"
    statistics_every: int = Field(default=1, ge=1)
    statistics_fraction: Share = 1.0
    threads: int = Field(default=0, ge=0)
    metric: str | None = None
    direction: Literal["higher", "lower"] | None = None
    patience: int | None = Field(default=None, ge=1)
    min_delta: float = Field(default=0.0, ge=0)

    @property
    def falling(self) -> bool:
        """Return whether a smaller value of the metric is better."""
        if self.direction is None:
            # Errors fall; all other metrics rise.
            return self.metric in _FALLING
        return self.direction == "lower"

    @property
    def awaited(self) -> bool:
        """Return whether a round waits for the evaluation of the previous version.

        The evaluation may end the run.
        """
        return self.patience is not None

    @model_validator(mode="after")
    def _keys_go_together(self, info: ValidationInfo) -> "EvaluationKeys":
        if self.threads > _MOST_THREADS and info.context != STORED:
            raise ValueError(
                f"evaluation.threads must be at most {_MOST_THREADS}; 0 uses every core"
            )
        if self.direction is not None and self.metric is None:
            raise ValueError("evaluation.direction goes with evaluation.metric")
        self.refuse_idle(
            info,
            "min_delta",
            self.patience is not None,
            where="without patience, which ends a run early",
            instead="patience",
        )
        return self


class EvaluationConfig(EvaluationKeys):
    """How the global model of a fleet is evaluated.

    Attributes:
        data: the server's test set; None disables evaluation.
        tiers: ids of additional tiers to evaluate. Each is evaluated as the model that its devices
            receive or, if plans move or are random, as the sub-model with the leading units.
        tier_data: test sets of tiers that have separate labels; the others are evaluated on
            ``data``.
        statistics_quorum: share of the selected devices that must answer a statistics query.
    """

    data: DataConfig | None = None
    tiers: tuple[str, ...] = ()
    tier_data: Mapping[str, DataConfig] = Field(default_factory=dict)
    statistics_quorum: Share = 0.5

    @model_validator(mode="after")
    def _tiers_have_data(self) -> "EvaluationConfig":
        if self.patience is not None and self.data is None:
            raise ValueError(
                "evaluation.patience needs evaluation.data, on which versions are evaluated"
            )
        if (self.tiers or self.tier_data) and self.data is None:
            raise ValueError(
                "evaluation.tiers and tier_data need evaluation.data, the test set of the "
                "whole model"
            )
        # A test set that nothing is evaluated on is a mistake in a name.
        stray = self.tier_data.keys() - {self.tier, *self.tiers}
        if stray:
            raise ValueError(
                f"evaluation.tier_data: {min(stray)} is not evaluated; name it in evaluation.tiers"
            )
        return self
