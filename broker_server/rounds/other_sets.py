"""Replaces the artifact sets of a run in progress, if updates keep their meaning."""

from pathlib import Path

from broker_server.rounds.artifacts import Artifacts, load_artifacts
from broker_server.rounds.run_context import RunContext, prepare_run
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import ConfigError


def load_other_sets(config: FleetConfig, root: Path) -> Artifacts:
    """Return the artifacts of a folder with which a run of this configuration can continue.

    Raises:
        ConfigError: it cannot, or nothing was exported there; the message gives the reason.
        PlanError: the run needs something that these artifacts lack.
    """
    # Both are prepared like a run, so that everything that a resumed server would refuse is refused
    # here.
    before = _prepare(config)
    model = config.model.model_copy(update={"artifacts": root})
    after = _prepare(config.model_copy(update={"model": model}))
    # Tiers that only the new folder has do not matter: the run does not train them.
    for tier_set in before.tiers:
        replacement = after.artifacts.tiers.get(tier_set.tier.id)
        if replacement is None:
            raise ConfigError(
                f"{root} has no tier {tier_set.tier.id}, which the run in progress trains; export"
                " it as well"
            )
        difference = before.set_difference(tier_set, replacement.manifest)
        if difference:
            raise ConfigError(
                f"{replacement.folder}: {difference} in the run in progress, so their updates"
                " could not be added; let the run end, and start another with these artifacts"
            )
    return after.artifacts


def _prepare(config: FleetConfig) -> RunContext:
    artifacts = load_artifacts(
        config.model.artifacts, config.model.arch, chunk_bytes=config.round.chunk_bytes
    )
    # Without an id: nothing of the run is read from a store here.
    return prepare_run("", config, artifacts)
