"""Artifact sets that take the place of those of a run in progress: the same model, computed by other graphs.

What a device sends back goes into one sum with what others send, so all that says what a number means must be the same;
how it is computed may differ: another exporter, other operators, another optimizer or clipping.
"""

from pathlib import Path

from broker_server.rounds.artifacts import Artifacts, load_artifacts
from broker_server.rounds.run_context import prepare_run
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import ConfigError


def load_others(config: FleetConfig, root: Path) -> Artifacts:
    """The artifacts of a folder, with which a run of this configuration can go on.

    Raises:
        ConfigError: it cannot, or nothing was exported there; the message says why.
        PlanError: the run asks for what these do not have.
    """
    arch, chunk_bytes = config.model.arch, config.round.chunk_bytes
    model = config.model.model_copy(update={"artifacts": root})
    artifacts = load_artifacts(root, arch, chunk_bytes=chunk_bytes)
    new = prepare_run("", config.model_copy(update={"model": model}), artifacts)
    old = prepare_run("", config, load_artifacts(config.model.artifacts, arch, chunk_bytes=chunk_bytes))
    for item in old.tiers:
        other = new.artifacts.tiers.get(item.tier.id)
        if other is None:
            raise ConfigError(f"{root} has no tier {item.tier.id}, which the run in progress trains; export it, too")
        why = old.why_other(item, other.manifest)
        if why:
            raise ConfigError(
                f"{other.folder}: {why} in the run in progress, whose updates would no longer add up; let it end, and"
                " begin another with these"
            )
    return artifacts
