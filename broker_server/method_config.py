"""The tables of ``fleet.toml`` that choose the method: ``[strategy]``, one table a method, ``[server_optimizer]``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from broker_server.server_optimizer import OptimizerName, OptimizerSettings
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.sizing import WhaleSettings

__all__ = [
    "DropoutConfig",
    "FedProxConfig",
    "FedRolexConfig",
    "FmlConfig",
    "InclusiveConfig",
    "ServerOptimizerConfig",
    "StrategyConfig",
]


class FedProxConfig(FrozenModel):
    """``[strategy.fedprox]``.

    Attributes:
        mu: pull of a device's weights towards those the round started from.
    """

    mu: float = Field(default=0.01, gt=0)


class FedRolexConfig(FrozenModel):
    """``[strategy.fedrolex]``; the defaults are the paper's (METHODS 2).

    Attributes:
        window: ``rolling``, or ``static`` for the sibling that stays where it is.
        step: units a window moves in a round.
        direction: ``up`` as in the paper, ``down`` as in the released code.
        heads: whether a window stays inside its attention head.
        weighting: the paper's ablation: every device alike, or by the width of its layer.
    """

    window: Literal["rolling", "static"] = "rolling"
    step: int = Field(default=1, ge=1)
    direction: Literal["up", "down"] = "up"
    heads: Literal["preserving", "as_released"] = "preserving"
    weighting: Literal["avg", "width", "updates", "updates_width"] = "avg"


class DropoutConfig(FrozenModel):
    """``[strategy.federated_dropout]``.

    Attributes:
        draw: one draw for all layers of an axis, which keeps residual branches together, or one for each layer.
    """

    draw: Literal["tied", "per_layer"] = "tied"


class InclusiveConfig(FrozenModel):
    """``[strategy.inclusivefl]``.

    Attributes:
        beta: share of the momentum in the update of a shallow model's top layer; 0.2 for GLUE, 0.5 for NER.
        baseline: the method itself, or one that the paper compares it with (METHODS 3.7).
    """

    beta: float = Field(default=0.2, ge=0, le=1)
    baseline: Literal[
        "inclusive", "without_distillation", "distillation_only", "all_large", "all_small", "exclusive", "local"
    ] = "inclusive"


class FmlConfig(FrozenModel):
    """``[strategy.fml]`` (METHODS 5).

    Attributes:
        alpha: how much a personal model trusts the labels; the rest is trust in the meme.
        beta: how much the meme does; the rest is trust in the personal model.
        decays: closed rounds after which alpha falls and beta rises; usually those of the learning rate.
        shared: parts of the global model that are averaged, blocks (``stem``, ``block1`` ..., ``head``) or modules by
            path (``trunk``, ``fc1``); None for all. The rest is every device's own, and may have another shape there.
    """

    alpha: float = Field(default=0.5, ge=0, le=1)
    beta: float = Field(default=0.5, ge=0, le=1)
    decays: tuple[Annotated[int, Field(ge=1)], ...] = ()
    shared: tuple[str, ...] | None = Field(default=None, min_length=1)


class ServerOptimizerConfig(FrozenModel):
    """What the server does with a round's merge (METHODS 3.5).

    Attributes:
        name: ``plain`` takes the merge as it is, times the learning rate.
        learning_rate: None takes 1 for plain and fedavgm, 0.01 for the others.
        beta1: decay of the first moment.
        beta2: decay of the second.
        tau: added to the root of the second moment.
        second_start: what the second moment starts at.
        milestones: steps that start with fresh moments and multiply the learning rate.
        restart_factor: by what.
    """

    name: OptimizerName = "plain"
    learning_rate: float | None = Field(default=None, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    tau: float = Field(default=1e-3, gt=0)
    second_start: float = Field(default=0.0, ge=0)
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = ()
    restart_factor: float = Field(default=0.5, gt=0)

    @property
    def settings(self) -> OptimizerSettings:
        """The same for the optimizers."""
        return OptimizerSettings(**self.model_dump())


class StrategyConfig(FrozenModel):
    """How sub-models are cut and merged. A method's own keys are in a table of its name.

    Attributes:
        name: a file of ``broker_server/strategies``.
        plan: which units a narrower sub-model keeps.
        weighting: every update alike, or by its number of samples; None takes the strategy's own.
        label_rule: take rows of label axes only for labels the device holds; None takes the strategy's own.
        fedprox: keys of that method; likewise the others.
    """

    name: str = "heterofl"
    plan: Literal["static", "rolling", "random"] = "static"
    weighting: Literal["uniform", "samples"] | None = None
    label_rule: bool | None = None
    fedprox: FedProxConfig = FedProxConfig()
    fedrolex: FedRolexConfig = FedRolexConfig()
    federated_dropout: DropoutConfig = DropoutConfig()
    inclusivefl: InclusiveConfig = InclusiveConfig()
    whalefl: WhaleSettings = WhaleSettings()
    fml: FmlConfig = FmlConfig()

    @model_validator(mode="after")
    def _of_this_method(self) -> StrategyConfig:
        tables = {key for key in self.model_fields_set if isinstance(getattr(self, key), FrozenModel)}
        # A configuration that was written out has every table.
        for name in sorted(tables - {self.name}):
            if getattr(self, name) != type(getattr(self, name))():
                raise ValueError(f"the table strategy.{name} has no effect on strategy {self.name!r}; remove it")
        return self
