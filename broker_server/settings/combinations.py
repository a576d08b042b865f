"""Which settings go together, for fleets and simulations: the one place that refuses combinations.

Each feature of a run that touches updates states which traits of the run it needs, and which it
breaks. A run is refused where one feature needs what another one breaks. The features that
settings state are rows of `broker_server.settings.feature_table`; those of a method come from
`broker_server.settings.method_features`.

A default never conflicts with what a user adds: it is off then. What the user has written and
conflicts is refused, with both names and what to do.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from broker_server.settings.feature_table import TABLE, Settings
from broker_server.strategies.strategy import Average, StrategySettings
from broker_server.strategies.traits import Feature, Trait
from fleet_protocol.errors import PlanError


def features_of(run: Settings) -> tuple[Feature, ...]:
    """Return the features that a configuration states."""
    features = []
    for row in TABLE:
        if row.wanted(run):
            features.append(row.feature)
    return tuple(features)


def keeps(run: Settings, trait: Trait) -> bool:
    """Return whether a trait holds of a run, as far as its settings decide it."""
    return all(trait not in feature.breaks for feature in features_of(run))


def conflict(features: Iterable[Feature]) -> str:
    """Return why features do not go together, with both names and what to do; empty if they do."""
    features = tuple(features)
    for needing in features:
        for breaking in features:
            trait = _broken_trait(needing, breaking)
            if trait is not None:
                return (
                    f"{needing.name} and {breaking.name} do not go together: {needing.name} needs"
                    f" that {trait.value}; {needing.remedy}, or {breaking.remedy}"
                )
    return ""


def _broken_trait(needing: Feature, breaking: Feature) -> Trait | None:
    """Return a trait that one feature needs and another breaks; None if there is none."""
    broken = needing.needs & breaking.breaks
    # The first in the order of the traits, so that a message is the same in every run.
    for trait in Trait:
        if trait in broken:
            return trait
    return None


def require_together(features: Iterable[Feature]) -> None:
    """Check that no feature of a run breaks what another one needs.

    Raises:
        PlanError: one does.
    """
    problem = conflict(features)
    if problem:
        raise PlanError(problem)


def yielding_defaults(run: Settings) -> dict[str, Any]:
    """Return the tables of a configuration whose defaults conflict, with these switched off."""
    tables = {}
    for row in TABLE:
        default = row.default
        if default is None or not row.wanted(run):
            continue
        table = getattr(run, default.table)
        if default.asked_by & table.model_fields_set:
            continue
        # A feature never conflicts with itself, so it may stay in the list.
        if any(conflict((row.feature, feature)) for feature in features_of(run)):
            tables[default.table] = table.model_copy(update={default.key: default.off})
    return tables


def method_settings(run: Settings) -> StrategySettings[Any]:
    """Return what a run asks of its method, whose own defaults give way to other features."""
    robust = run.robust
    average: Average = "mean" if robust.merge == "krum" else robust.merge
    settings: StrategySettings[Any] = run.strategy.settings
    settings = replace(settings, average=average, faulty=robust.faulty)
    if any(Trait.LABELS_HIDDEN in feature.needs for feature in features_of(run)):
        # Where devices are hidden, labels and numbers of samples count for nothing unless somebody
        # says so.
        weighting = settings.weighting or "uniform"
        settings = replace(settings, label_rule=False, weighting=weighting)
    return settings
