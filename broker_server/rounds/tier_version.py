"""A stored global version as one of its tiers: all weights that the tier's devices compute with, by their names."""

from dataclasses import replace
from pathlib import Path

from broker_server.rounds.artifacts import TierArtifacts, load_artifacts
from broker_server.rounds.run_context import RunContext, prepare_run
from broker_server.rounds.tier_models import model_of
from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store
from broker_server.store.configurations import kept_config, one_name
from broker_server.store.export import ExportedVersion
from broker_server.store.queries import find_run
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ConfigError


def stored_context(store: Store, run: str | None = None, artifacts: Path | None = None) -> RunContext:
    """What was fixed for a stored run, by default the newest.

    Args:
        store: where it is.
        run: its id, or the beginning of it.
        artifacts: folder of exported sets; by default the one that the run's server was given. Where that is not known,
            as in a store from a backup, nothing but this says it: the database's word is not taken.

    Raises:
        ConfigError: there is no such run, its artifacts are no longer there, or nobody says where they are.
        PlanError: the artifacts are others now.
    """
    record = find_run(store, run)
    kept = kept_config(store.folder, record.id)
    if kept is None and artifacts is None:
        raise ConfigError(
            f"nobody has said here where the artifact sets of run {record.id} lie, as its store is from a backup, or of"
            " an earlier Shoal: `shoal export-weights --artifacts FOLDER` takes them from a folder of yours"
        )
    config = kept or FleetConfig.stored(record.config)
    folder = artifacts or config.model.artifacts
    architecture = one_name("architecture", config.model.arch)
    return prepare_run(record.id, config, load_artifacts(folder, architecture, chunk_bytes=config.round.chunk_bytes))


def tier_version(
    store: Store, exported: ExportedVersion, tier: str | None, folder: Path | None = None
) -> tuple[ExportedVersion, TierArtifacts, FleetConfig]:
    """An exported tier of a version; None is the whole model. The artifact sets are those of `stored_context`.

    Returns:
        The version with the tier's weights, those that are frozen among them, and with the statistics that fit it; the
        tier's artifact set; the configuration of the run.

    Raises:
        ConfigError: the tier is not exported, or its artifacts are no longer there.
    """
    context = stored_context(store, exported.record.run, folder)
    artifacts = context.artifacts
    if tier is not None and tier not in artifacts.tiers:
        raise ConfigError(f"--tier: {tier!r} is not exported; exported are {', '.join(artifacts.tiers)}")
    found = artifacts.full if tier is None else artifacts.tiers[tier]
    weights = {**found.base(), **model_of(context, found.tier, exported.record, BlobStore(store.folder / "blobs"))}
    wanted = {spec.name: spec.shape for spec in found.manifest.graphs["onnx/infer"].inputs}
    statistics = {name: value for name, value in exported.statistics.items() if wanted.get(name) == value.shape}
    record = exported.record
    if record.evaluation is not None and found is not context.judged:  # of this tier, or nothing is known of it
        record = replace(record, evaluation=record.evaluation.of(found.tier.id))
    return replace(exported, record=record, weights=weights, statistics=statistics), found, context.config
