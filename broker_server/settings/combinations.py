"""Refuses incompatible settings, for fleets and simulations: no other module does.

Each feature of a run that affects updates states which traits of the run it needs, and which it
breaks. A run is refused if one feature needs a trait that another one breaks. Features that
settings request are stages of an update's way, which state their traits in their own modules (see
`broker_server.strategies.stage`); those of a method come from
`broker_server.settings.method_features`.

A default never conflicts with the user's settings: it is then off. A conflict between the user's
own settings is refused, with both names and what to do.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from broker_server.strategies.stage import Settings, Stage
from broker_server.strategies.strategy import Average, StrategySettings
from broker_server.strategies.traits import Feature, Trait
from fleet_protocol.discovery import discover
from fleet_protocol.errors import PlanError

_TABLES = ("robust", "strategy", "upload", "download", "round", "privacy", "secure_sum")
"""Conflicts are reported in this order; tables that are not in it come last."""


def collect() -> tuple[Stage, ...]:
    """Return the stages that modules state, in the order in which conflicts are reported."""
    stages: list[Stage] = []
    for package in ("broker_server.stages", "broker_server.strategies"):
        stages += discover(package, "STAGES").values()
    return tuple(sorted(stages, key=_place))


def _place(stage: Stage) -> int:
    return _TABLES.index(stage.table) if stage.table in _TABLES else len(_TABLES)


STAGES = collect()


def features_of(run: Settings) -> tuple[Stage, ...]:
    """Return the features that a configuration requests."""
    return tuple(stage for stage in STAGES if stage.wanted(run))


def keeps(run: Settings, trait: Trait) -> bool:
    """Return whether a run has a trait, as far as its settings decide it."""
    return all(trait not in feature.breaks for feature in features_of(run))


def conflict(features: Iterable[Feature]) -> str:
    """Return why features are incompatible, with names and what to do; empty if they are not."""
    features = tuple(features)
    # Only the first conflict: its remedy may resolve the others, too.
    for needing in features:
        for breaking in features:
            trait = _broken_trait(needing, breaking)
            if trait is not None:
                return (
                    f"{needing.name} and {breaking.name} are incompatible: {needing.name} "
                    f"requires that {trait.value}; {needing.remedy}, or {breaking.remedy}"
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
        PlanError: a feature does.
    """
    problem = conflict(features)
    if problem:
        raise PlanError(problem)


def yielding_defaults(run: Settings) -> dict[str, Any]:
    """Return the tables of a configuration whose defaults conflict, with these switched off."""
    tables = {}
    for stage in STAGES:
        default = stage.default
        if default is None or not stage.wanted(run):
            continue
        table = getattr(run, stage.table)
        # Somebody wrote it: then the conflict is refused, and nothing is switched off.
        if default.asked_by & table.model_fields_set:
            continue
        # A feature never conflicts with itself, so it may stay in the list.
        conflicts = any(conflict((stage, feature)) for feature in features_of(run))
        if conflicts or default.gives_way(run):
            tables[stage.table] = table.model_copy(update={stage.key: default.off})
    return tables


def method_settings(run: Settings) -> StrategySettings[Any]:
    """Return a run's requirements for its method, whose defaults give way to other features."""
    robust = run.robust
    average: Average = "mean" if robust.merge == "krum" else robust.merge
    settings: StrategySettings[Any] = run.strategy.settings
    settings = replace(settings, average=average, faulty=robust.faulty)
    if any(Trait.LABELS_HIDDEN in feature.needs for feature in features_of(run)):
        # If devices are hidden, labels and numbers of samples are ignored unless the user enables
        # them.
        weighting = settings.weighting or "uniform"
        settings = replace(settings, label_rule=False, weighting=weighting)
    return settings
