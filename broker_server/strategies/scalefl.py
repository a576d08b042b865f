"""ScaleFL: sub-models cut by width and by depth, whose last exit teaches the others.

Fatih Ilhan, Gong Su, Ling Liu: "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous
Clients", CVPR 2023, https://github.com/git-disl/scale-fl. Specification 8.5.

A device trains the leading units of every layer up to its depth, with all exits on the way, which
`trainer_export.losses.last_exit_teaches` describes. The server averages every entry over the
devices that hold it, and sends the weight of the last exit's lessons with each task: they begin
after some rounds, when the last exit knows something.
"""

from dataclasses import replace

from pydantic import Field

from broker_server.strategies import heterofl
from broker_server.strategies.loss_numbers import instruct_numbers
from broker_server.strategies.strategy import Basis, Method, Strategy
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel


class ScaleFlSettings(FrozenModel):
    """``[strategy.scalefl]`` (specification 8.5).

    Attributes:
        distillation: weight of the loss through which exits learn from the last exit of their
            sub-model; 0 gives the baseline without this loss.
        begin_after: number of rounds before the distillation loss is used.
    """

    distillation: float = Field(default=0.05, ge=0, le=1e6)
    begin_after: int = Field(default=0, ge=0)

    def numbers_after(self, closed_rounds: int) -> dict[str, float]:
        """Return the numbers of the loss after some rounds."""
        has_begun = closed_rounds >= self.begin_after
        return {"distillation": self.distillation if has_begun else 0.0}


def build(basis: Basis[ScaleFlSettings]) -> Strategy:
    """Build the strategy from its settings.

    ``label_rule`` defaults to off: the paper averages every entry over all devices that hold it.

    Raises:
        PlanError: plans other than leading units are configured.
    """
    if basis.plan != "static":
        raise PlanError(
            f"{basis.name} keeps the leading units of every layer; remove plan = {basis.plan!r}"
        )
    selective = heterofl.build(replace(basis, label_rule=basis.label_rule is True))
    return replace(
        selective,
        name="scalefl",
        paper="https://github.com/git-disl/scale-fl",
        instruct=instruct_numbers(basis.options.numbers_after),
        sets_all_numbers=True,
    )


STRATEGIES = {"scalefl": Method(build, ScaleFlSettings)}
