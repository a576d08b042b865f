"""FML: devices keep a personal model of any shape and teach it through copies of the global one.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu, Chao Wu:
"Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765. Specification section 5.

This is the server's half: it receives only the copies of the global model (the memes), and takes
their plain mean, without weights by samples. With ``private.parts`` the global model is a trunk:
the rest, each device's adaptor and head, stays on its device, may have another shape there, and is
neither merged nor evaluated here. `trainer_export.routines.mutual` has the losses and the mutual
step, and `device_runtime.training.routines.mutual` the device's half.
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, model_validator

from broker_server.strategies import fedavg
from broker_server.strategies.strategy import Basis, Method, Strategy
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import STORED, FrozenModel
from fleet_protocol.messages import Instructions

# How alpha and beta move with each decay, and where alpha stops (specification 5.5).
_ALPHA_STEP = 0.2
_ALPHA_FLOOR = 0.5
_BETA_STEP = 0.4


class FmlSettings(FrozenModel):
    """``[strategy.fml]`` (specification 5).

    Attributes:
        alpha: weight of the labels in the loss of a personal model; the weight of the meme is 1 -
            alpha.
        beta: weight of the labels in the loss of the meme; the weight of the personal model is 1 -
            beta.
        decays: numbers of closed rounds after which alpha falls and beta rises; usually the
            milestones of the learning rate.
    """

    alpha: float = Field(default=0.5, ge=0, le=1)
    beta: float = Field(default=0.5, ge=0, le=1)
    decays: tuple[Annotated[int, Field(ge=1)], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_unset_trunk(cls, table: Any, info: ValidationInfo) -> Any:
        """Accept a stored configuration of an earlier version, which named a trunk as `shared`.

        Only an unset trunk is ignored: a trunk that is set changes what the devices send.
        """
        if info.context != STORED or not isinstance(table, dict):
            return table
        if "shared" not in table or table["shared"] is not None:
            return table
        return {key: value for key, value in table.items() if key != "shared"}

    def trust_after(self, closed_rounds: int) -> dict[str, float]:
        """Return alpha and beta after some rounds.

        With each decay alpha falls by 0.2 to 0.5, and beta rises by 0.4 to 1. An alpha that begins
        below 0.5 does not change.
        """
        decays = sum(closed_rounds >= decay for decay in self.decays)
        floor = min(self.alpha, _ALPHA_FLOOR)
        return {
            "alpha": max(self.alpha - _ALPHA_STEP * decays, floor),
            "beta": min(self.beta + _BETA_STEP * decays, 1.0),
        }


def build(basis: Basis[FmlSettings]) -> Strategy:
    """Build the strategy from its settings.

    Raises:
        PlanError: weights by samples are configured, which specification 5.2 leaves out for the
            devices' privacy.
    """
    if basis.weighting == "samples":
        raise PlanError("fml uses the plain mean of the memes; remove weighting")
    options = basis.options

    def instruct(instructions: Instructions, closed_rounds: int) -> Instructions:
        trust = options.trust_after(closed_rounds)
        return instructions.model_copy(update={"routine": "mutual", "settings": trust})

    plain_mean = fedavg.build(replace(basis, weighting="uniform", average="mean"))
    # Nothing says how memes of earlier versions would move a later one.
    mean_of_memes = replace(plain_mean.merge, deltas=False)
    # The mutual step computes two models on a whole batch.
    breaks = plain_mean.breaks | {Trait.PIECES, Trait.MEAN_OF_CHANGES}
    return replace(
        plain_mean,
        name="fml",
        paper="https://arxiv.org/abs/2006.16765",
        merge=mean_of_memes,
        instruct=instruct,
        breaks=breaks,
    )


STRATEGIES = {"fml": Method(build, FmlSettings, alike=True)}
