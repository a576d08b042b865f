"""Artifact sets that take the place of a run's, which can go on if updates still mean the same."""

from pathlib import Path

from broker_server.rounds.artifacts import Artifacts, load_artifacts
from broker_server.rounds.run_context import RunContext, prepare_run
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import ConfigError


def load_other_sets(config: FleetConfig, root: Path) -> Artifacts:
    """Return the artifacts of a folder, with which a run of this configuration can go on.

    Raises:
        ConfigError: it cannot, or nothing was exported there; the message says why.
        PlanError: the run asks for what these do not have.
    """
    before = _prepare(config)
    model = config.model.model_copy(update={"artifacts": root})
    after = _prepare(config.model_copy(update={"model": model}))
    for tier_set in before.tiers:
        replacement = after.artifacts.tiers.get(tier_set.tier.id)
        if replacement is None:
            raise ConfigError(
                f"{root} has no tier {tier_set.tier.id}, which the run in progress trains; export "
                f"it,"
                " too"
            )
        difference = before.set_difference(tier_set, replacement.manifest)
        if difference:
            raise ConfigError(
                f"{replacement.folder}: {difference} in the run in progress, whose updates would no"
                " longer add up; let it end, and begin another with these"
            )
    return after.artifacts


def _prepare(config: FleetConfig) -> RunContext:
    artifacts = load_artifacts(
        config.model.artifacts, config.model.arch, chunk_bytes=config.round.chunk_bytes
    )
    return prepare_run("", config, artifacts)
