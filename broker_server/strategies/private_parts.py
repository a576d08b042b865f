"""Private parts: what each device trains for itself, with every method (specification 6).

- FedPer keeps the last layers on the devices: Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya
  Kumar Singh, Sunav Choudhary: "Federated Learning with Personalization Layers", 2019,
  https://arxiv.org/abs/1912.00818.
- LG-FedAvg keeps the first layers: Paul Pu Liang, Terrance Liu, Liu Ziyin, Nicholas B. Allen, Randy
  P. Auerbach, David Brent, Ruslan Salakhutdinov, Louis-Philippe Morency: "Think Locally, Act
  Globally: Federated Learning with Local and Global Representations", 2020,
  https://arxiv.org/abs/2001.01523.
- FedRep trains the last layers before the others: Liam Collins, Hamed Hassani, Aryan Mokhtari,
  Sanjay Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
  2021, https://arxiv.org/abs/2102.07078.
- FedBN keeps the batch norms: Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp, Qi Dou:
  "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
  https://arxiv.org/abs/2102.07623.
- Ditto keeps a copy of the whole model: Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith:
  "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
  https://arxiv.org/abs/2012.04221.

The server's half is here: a strategy that leaves some parameters on the devices. Their updates lack
these parameters, so that the sums have no coverage for them, and the global model keeps its initial
values there. The devices' half is `device_runtime.training.routines.private`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.strategy import Strategy
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FiniteJson
from fleet_protocol.messages import Instructions
from models.layout import Layout
from models.parts import parameters_in
from models.shares import frozen_parameters

ROUTINE = "private"

COMMON_ROUTINES = frozenset({"train", ROUTINE})
"""The routines of devices whose method does not have another one."""

# A head that stays on a board may have other labels than the fleet, and is not there to be judged.
STAGES = stated(
    Stage(
        name="private.parts",
        remedy="remove [private]",
        setting="private.parts",
        wanted=lambda run: run.private is not None and bool(run.private.parts),
        needs=frozenset({Trait.LABELS_HIDDEN}),
        breaks=frozenset({Trait.ALL_MERGED}),
    ),
    Stage(
        name="private.copy_model",
        remedy="remove [private]",
        setting="private.copy_model",
        wanted=lambda run: run.private is not None and run.private.copy_model,
        needs=frozenset({Trait.COMMON_ROUTINE}),
    ),
    Stage(
        name="private.private_epochs",
        remedy="remove private.private_epochs",
        setting="private.private_epochs",
        wanted=lambda run: run.private is not None and run.private.private_epochs is not None,
        needs=frozenset({Trait.COMMON_ROUTINE}),
    ),
    Stage(
        name="private.compare",
        remedy="remove private.compare",
        setting="private.compare",
        wanted=lambda run: run.private is not None and run.private.compare,
        needs=frozenset({Trait.EVALUATIONS, Trait.COMMON_ROUTINE}),
    ),
    Stage(
        name="private.adapt_epochs",
        remedy="remove private.adapt_epochs",
        setting="private.adapt_epochs",
        wanted=lambda run: run.private is not None and run.private.adapt_epochs is not None,
        needs=frozenset({Trait.EVALUATIONS, Trait.COMMON_ROUTINE}),
    ),
)


@dataclass(frozen=True)
class PrivateModel:
    """The private parts of devices, and how they train them.

    Attributes:
        parts: blocks, modules or patterns that stay on the devices.
        private_epochs: passes in which only the private parts are trained, before the others; None
            trains all parameters together.
        copy_model: whether devices keep a copy of the whole model.
        mu: strength of the pull of this copy towards the global model.
        adapt_epochs: passes over the samples before a device evaluates its model; None for none.
        compare: whether devices also evaluate the model without what is their own.
    """

    parts: tuple[str, ...] = ()
    private_epochs: int | None = None
    copy_model: bool = False
    mu: float = 0.0
    adapt_epochs: int | None = None
    compare: bool = False

    @property
    def keeps_values(self) -> bool:
        """Return whether devices keep any values private."""
        return bool(self.parts) or self.copy_model

    @property
    def pulls(self) -> dict[str, float]:
        """Return the strength of the proximal term of a copy, by its setting."""
        return {"private.mu": self.mu} if self.copy_model else {}

    @property
    def settings(self) -> dict[str, FiniteJson]:
        """Return the settings of the routine."""
        settings: dict[str, FiniteJson] = {
            "private_epochs": self.private_epochs,
            "copy_model": self.copy_model,
            "mu": self.mu,
        }
        # Older devices refuse settings that they do not know, so the others go out if they are set.
        if self.adapt_epochs is not None:
            settings["adapt_epochs"] = self.adapt_epochs
        if self.compare:
            settings["compare"] = True
        return settings


def keep_private(strategy: Strategy, layout: Layout, kept: PrivateModel) -> Strategy:
    """Return a strategy whose devices keep something for themselves.

    A method whose devices train by a routine of their own decides how they train what stays. If
    nothing is kept, the strategy is the same.

    Raises:
        PlanError: the model lacks a part, no tier trains it, nothing would be left to merge, or the
            method changes the meaning of what is kept.
    """
    if not kept.keeps_values:
        return strategy
    # The method may leave parameters on the devices, too.
    stays = parameters_in(layout, {*strategy.stays, *kept.parts})
    if len(stays) == len(layout.parameters):
        raise PlanError(
            f"private.parts: {', '.join(kept.parts)} are all parameters of {layout.arch}, so"
            " that nothing is left to merge; name fewer parts"
        )
    keeps = frozenset(stays)
    if kept.copy_model:
        keeps = frozenset(parameter.name for parameter in layout.parameters)
    _require_lasting_units(strategy, layout, keeps)
    _require_effect(strategy, layout, kept.parts, stays)

    def instruct(instructions: Instructions, closed_rounds: int) -> Instructions:
        asked = strategy.instruct(instructions, closed_rounds)
        if asked.routine not in COMMON_ROUTINES:
            return asked
        return asked.model_copy(update={"routine": ROUTINE, "settings": kept.settings})

    return replace(strategy, stays=stays, keeps=keeps, instruct=instruct)


def _require_lasting_units(
    strategy: Strategy,
    layout: Layout,
    names: Collection[str],
) -> None:
    """Check that what devices keep has the same meaning in every round.

    Raises:
        PlanError: it does not, so that values of some units would be used for others.
    """
    if not strategy.renews_units:
        return
    for parameter in layout.parameters:
        if parameter.name in names and any(map(layout.is_cut, parameter.dims)):
            raise PlanError(
                f"[private]: devices keep {parameter.name}, but strategy {strategy.name} gives its"
                " units another meaning in each round, so that values of some units would be used"
                " for others; use another strategy, such as heterofl, or keep only parameters"
                " without a width"
            )


def _require_effect(
    strategy: Strategy,
    layout: Layout,
    parts: Sequence[str],
    stays: Collection[str],
) -> None:
    """Check that the tiers in use train every private part, and something that is merged.

    Raises:
        PlanError: they do not.
    """
    trained = _trained_in_use(strategy, layout)
    tiers = ", ".join(tier.id for tier in strategy.tiers)
    for part in parts:
        if trained.isdisjoint(parameters_in(layout, (part,))):
            raise PlanError(
                f"private.parts: none of the tiers in use ({tiers}) trains {part}, so that boards"
                " would keep its initial values; remove it, or use a tier that trains it"
            )
    if trained <= set(stays):
        raise PlanError(
            f"private.parts: the tiers in use ({tiers}) train only {', '.join(parts)}, so that"
            " nothing is left to merge; name fewer parts, or use a tier that trains more"
        )


def _trained_in_use(strategy: Strategy, layout: Layout) -> set[str]:
    """Return the parameters that some tier in use trains, at any place of its trained blocks."""
    trained: set[str] = set()
    for tier in strategy.tiers:
        for placed in strategy.places(tier):
            held = {parameter.name for parameter in layout.kept(placed)}
            trained |= held.difference(frozen_parameters(layout, placed))
    return trained
