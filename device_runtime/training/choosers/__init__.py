"""Chooses a device's tier by the rule that an offer names.

A new rule needs one file and one row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from device_runtime.training.choosers import whalefl
from device_runtime.training.choosers.rule import Decision, Rule, Situation
from device_runtime.training.own_settings import read_settings
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Instructions

__all__ = ["RULES", "Decision", "Rule", "Situation", "TierChooser", "chooser_of"]

RULES: Mapping[str, Rule[Any, Any]] = MappingProxyType(
    {rule.name: rule for rule in (whalefl.RULE,)}
)


@dataclass(frozen=True)
class TierChooser:
    """A rule with an offer's settings. Its memory is a value that the caller keeps."""

    rule: Rule[Any, Any]
    settings: FrozenModel

    def choose(self, memory: FrozenModel | None, situation: Situation) -> Decision:
        """Decide for one of the situation's tiers in the coming round.

        The memory is None before the first round.
        """
        return self.rule.choose(self.settings, memory, situation)

    def learn(
        self,
        memory: FrozenModel | None,
        number: int,
        loss: float,
    ) -> FrozenModel:
        """Return the memory after a round, from that before it (None before the first)."""
        learnt: FrozenModel = self.rule.learn(self.settings, memory, number, loss)
        return learnt


def chooser_of(instructions: Instructions) -> TierChooser | None:
    """Return the rule by which a task lets a device choose its tier, if it does.

    Raises:
        RefusedError: this board does not support the rule or its settings.
    """
    chooser = instructions.chooser
    if chooser is None:
        return None
    rule = RULES.get(chooser.rule)
    if rule is None:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"this board has no rule {chooser.rule!r} for choosing a tier (it has "
            f"{', '.join(RULES)}); update Shoal on this board",
        )
    return TierChooser(rule, read_settings(rule.settings, chooser.settings, f"chooser {rule.name}"))
