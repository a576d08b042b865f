"""How the global model is judged, ``[evaluation]``: shared keys, and the test sets of a fleet."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from fleet_protocol.data import DataConfig
from fleet_protocol.frozen import STORED, FrozenModel

_MOST_THREADS = 1024
_FALLING = frozenset({"loss", "mae", "rmse", "perplexity"})
Share = Annotated[float, Field(gt=0, le=1)]


class EvaluationKeys(FrozenModel):
    """How a global model is judged, wherever its test set comes from.

    Attributes:
        tier: id of the tier that is judged; None judges the whole model. A run that trains only
            smaller tiers has trained nothing else.
        batch_size: samples per call of the eval graph.
        every: closed rounds between evaluations; the last round is always evaluated.
        statistics: where static batch norm gets its statistics: asked from the devices, or taken
            over the batches of the server's test set.
        combine: how the devices' variances become one: ``pooled`` adds the variance between the
            devices' means, ``per_client`` does not (specification 1.6, vector H8).
        statistics_every: evaluations between statistics queries; in between the last answer is
            used.
        statistics_fraction: share of the devices with data that a statistics query asks, rounded
            up.
        threads: for onnxruntime; 0 takes every core.
        metric: what says which version is best: ``accuracy``, ``loss``, or a metric of the recipe;
            None for the accuracy, or the loss where there is none.
        direction: whether it is better to be ``higher`` or ``lower``; None for lower of ``loss``,
            ``mae``, ``rmse`` and ``perplexity``, and higher of everything else.
        patience: evaluations in a row that are not better, after which the run ends before its last
            round; None for all rounds.
        min_delta: by how much an evaluation must exceed the best to be better.
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
            return self.metric in _FALLING
        return self.direction == "lower"

    @property
    def awaited(self) -> bool:
        """Return whether a round waits for the judgement of the version before it.

        The judgement may end the run.
        """
        return self.patience is not None

    @model_validator(mode="after")
    def _keys_go_together(self, info: ValidationInfo) -> "EvaluationKeys":
        if self.threads > _MOST_THREADS and info.context != STORED:
            raise ValueError(f"evaluation.threads is {_MOST_THREADS} at most; 0 is for all cores")
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
    """How the global model of a fleet is judged.

    Attributes:
        data: the server's test set; None evaluates nothing.
        tiers: ids of tiers that are judged beside it, each as the model that its devices are sent;
            where plans move or are drawn, at the leading units.
        tier_data: test sets of tiers that have labels of their own; the others are judged on
            ``data``.
        statistics_quorum: share of the asked devices that must answer a statistics query.
    """

    data: DataConfig | None = None
    tiers: tuple[str, ...] = ()
    tier_data: Mapping[str, DataConfig] = Field(default_factory=dict)
    statistics_quorum: Share = 0.5

    @model_validator(mode="after")
    def _tiers_have_data(self) -> "EvaluationConfig":
        if self.patience is not None and self.data is None:
            raise ValueError(
                "evaluation.patience goes with evaluation.data, by which versions are judged"
            )
        if (self.tiers or self.tier_data) and self.data is None:
            raise ValueError(
                "evaluation.tiers and tier_data go with evaluation.data, the test set of the whole"
                " model"
            )
        stray = self.tier_data.keys() - {self.tier, *self.tiers}
        if stray:
            raise ValueError(
                f"evaluation.tier_data: {min(stray)} is not judged; name it in evaluation.tiers"
            )
        return self
