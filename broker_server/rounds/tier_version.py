"""A stored global version as one of its tiers, with all weights of the tier's computation."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from broker_server.rounds.artifacts import TierArtifacts, load_artifacts
from broker_server.rounds.contracts import FleetContracts
from broker_server.rounds.norm_statistics import batch_statistics
from broker_server.rounds.run_context import RunContext, prepare_run
from broker_server.rounds.tier_models import model_of
from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store
from broker_server.store.configurations import require_name, saved_config
from broker_server.store.export import ExportedVersion
from broker_server.store.queries import find_run
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import BlobError, ConfigError, ShoalError
from fleet_protocol.manifest import StatisticSpec, statistic_mean, statistic_variance
from models.own_class import OWN_CLASS, OwnClass, read_own_class
from models.slicing import Tensors


def stored_context(
    store: Store, run: str | None = None, artifacts: Path | None = None
) -> RunContext:
    """Return the fixed settings and plans of a stored run, by default the newest.

    Args:
        store: the store of the run.
        run: the run's id, or the beginning of it.
        artifacts: folder of exported sets; by default the folder of the run's server. If that is
            unknown, as in a store from a backup, this argument is required: the database is not
            trusted for paths.

    Raises:
        ConfigError: the run does not exist, its artifacts no longer exist, or their folder is
            unknown.
        PlanError: the artifacts have changed.
    """
    record = find_run(store, run)
    # The server's own copy beside the database. Anyone who can write the database could name other
    # folders in it.
    kept = saved_config(store.folder, record.id)
    if kept is None and artifacts is None:
        raise ConfigError(
            f"the folder of the artifact sets of run {record.id} is unknown, because its store is"
            " from a backup or an earlier Shoal: name the folder with `shoal export-weights"
            " --artifacts FOLDER`"
        )
    config = (kept or _numbers_of(record.config)).with_stored_contract(record.config)
    folder = artifacts or config.model.artifacts
    architecture = require_name("architecture", config.model.arch)
    return prepare_run(
        record.id,
        config,
        load_artifacts(folder, architecture, chunk_bytes=config.round.chunk_bytes),
    )


def _numbers_of(stored: str) -> FleetConfig:
    """Return the database's configuration without test sets.

    A changed database could name any file or function as a test set.
    """
    config = FleetConfig.stored(stored)
    judging = config.evaluation.model_copy(update={"data": None, "tier_data": {}})
    return config.model_copy(update={"evaluation": judging})


@dataclass(frozen=True)
class TierVersion:
    """An exported tier of a version.

    Attributes:
        exported: the version with the tier's weights, including frozen ones, and its statistics, if
            any.
        artifacts: the tier's set.
        config: configuration of the run.
        depth: number of blocks of the whole model.
        note: the source of the statistics, if it is not the store; otherwise empty.
        lacking: why statistics that the model needs are missing; empty if none are missing.
        untrained: parameters that boards keep for themselves: here they have initial values.
    """

    exported: ExportedVersion
    artifacts: TierArtifacts
    config: FleetConfig
    depth: int
    note: str = ""
    lacking: str = ""
    untrained: tuple[str, ...] = ()

    @property
    def remarks(self) -> str:
        """Return what a user of the weights must know; empty if there is nothing."""
        remarks = [self.note or self.lacking]
        if self.untrained:
            remarks.append(
                f"{', '.join(self.untrained)} have the fleet's initial values, because each board"
                " keeps its own ([private])"
            )
        return "; ".join(filter(None, remarks))

    @property
    def tensors(self) -> Tensors:
        """Return weights and statistics by the names of the exported model."""
        return {**self.exported.weights, **self.exported.statistics}

    @property
    def own_class(self) -> tuple[OwnClass, Tensors] | None:
        """Return the exporter's description of the user's class, with its constants.

        It is None for an older exporter.

        Raises:
            BlobError: the file is damaged, or outside the folder.
        """
        folder = self.artifacts.folder
        return read_own_class(folder) if os.path.lexists(folder / OWN_CLASS) else None

    def own_state(self) -> Tensors:
        """Return the state of the user's class, by its names for every parameter and buffer.

        Raises:
            ConfigError: a faithful state is not possible: statistics are missing, the class has no
                place for them, or an older exporter did not record what the class has.
            BlobError: the exporter's description is damaged, or does not fit the run's tensors.
        """
        described = self.own_class
        if described is None:
            self._require_no_statistics()
            return self.exported.weights
        own, constants = described
        if own.problem:
            raise ConfigError(f"{self._title}: {own.problem}")
        missing = own.missing(self.tensors)
        if missing:
            raise ConfigError(f"{self._title} lacks {', '.join(missing)} of the class: {self._why}")
        try:
            return own.values(self.tensors, constants, self.exported.record.number)
        except BlobError as error:
            path = self.artifacts.folder / OWN_CLASS
            raise BlobError(f"{path}: {error}; run `shoal export` again") from error

    def _require_no_statistics(self) -> None:
        # Without a description, nothing says how the class names its statistics.
        norms = self.artifacts.manifest.statistics
        if norms:
            raise ConfigError(
                f"{self.artifacts.folder} is from an older `shoal export`, which did not "
                "record the names that the model's class gives to the mean and variance of "
                f"{norms[0].name}; run the same `shoal export` again, and then this command"
            )

    def require_statistics(self) -> None:
        """Check that the statistics that the model needs are stored.

        Raises:
            ConfigError: they are missing; the message names them and the reason.
        """
        if self.lacking:
            missing: list[str] = []
            for spec in self.artifacts.manifest.statistics:
                missing += statistics_of(spec)
            raise ConfigError(f"{self._title} lacks {', '.join(missing)}: {self.lacking}")

    @property
    def _title(self) -> str:
        return f"version {self.exported.record.number}, {self.artifacts.tier.id}"

    @property
    def _why(self) -> str:
        return self.lacking or (
            f"{self.artifacts.folder} was exported from a class that is not the one that the run"
            " trained; "
            "run `shoal export` with that class again"
        )


def statistics_of(spec: StatisticSpec) -> tuple[str, str]:
    """Return the names of the mean and variance of a norm among the tensors of a graph."""
    return statistic_mean(spec.name), statistic_variance(spec.name)


def tier_version(
    store: Store,
    exported: ExportedVersion,
    tier: str | None,
    folder: Path | None = None,
) -> TierVersion:
    """Return an exported tier of a version; None means the whole model.

    Artifact sets are those of `stored_context`.

    For the evaluated tier, the statistics of static batch norms are those with which the version
    was evaluated. They fit only that tier: a narrow tier feeds its norms sums of fewer units, so a
    cut of the whole model's statistics does not fit. For another tier they are computed over the
    server's test set, as `evaluation.tiers` does, so that the tier scores what the run reports.

    Raises:
        ConfigError: the tier is not exported, or its artifacts no longer exist.
    """
    context = stored_context(store, exported.record.run, folder)
    artifacts = context.artifacts
    if tier is not None and tier not in artifacts.tiers:
        raise ConfigError(
            f"--tier: {tier!r} is not exported; the exported tiers are {', '.join(artifacts.tiers)}"
        )
    chosen = artifacts.full if tier is None else artifacts.tiers[tier]
    record = exported.record
    blobs = BlobStore(store.folder / "blobs")
    # Frozen tensors do not change in a run, so versions do not contain them.
    weights = {**chosen.base(), **model_of(context, chosen.tier, record, blobs)}
    # The statistics of the evaluated tier do not apply to another tier.
    if record.evaluation is not None and not _is_judged(context, chosen):
        # The score of the whole model would be wrong for another tier.
        record = replace(record, evaluation=record.evaluation.of_tier(chosen.tier.id))
    exported = replace(exported, record=record, weights=weights)
    stays = context.strategy.stays
    untrained = tuple(spec.name for spec in chosen.manifest.parameters if spec.name in stays)
    depth = artifacts.layout.depth
    version = TierVersion(exported, chosen, context.config, depth, untrained=untrained)
    return _with_statistics(version, context)


def _is_judged(context: RunContext, tier: TierArtifacts) -> bool:
    """Return whether a tier is the evaluated one; without an evaluation it need not exist."""
    judged = context.config.evaluation.tier or context.artifacts.layout.tier(1.0).id
    return tier.tier.id == judged


def _with_statistics(version: TierVersion, context: RunContext) -> TierVersion:
    """Return the version with the statistics that fit its tier."""
    tier = version.artifacts
    stored = version.exported.statistics if _is_judged(context, tier) else {}
    # Stored statistics fit, or the tier has no norms that need any.
    if stored or not tier.manifest.statistics:
        return replace(version, exported=replace(version.exported, statistics=stored))
    try:
        computed = _over_test_set(version, context)
    # The weights are useful without statistics, so a failure is only a note.
    except ShoalError as error:
        lacking = (
            "the store has no statistics for it, and they cannot be computed over the server's test"
            f" set: {error}"
        )
        return replace(version, exported=replace(version.exported, statistics={}), lacking=lacking)
    return replace(
        version,
        exported=replace(version.exported, statistics=dict(computed)),
        note=f"the batch norms of {tier.tier.id} have their statistics from the server's test set",
    )


def _over_test_set(version: TierVersion, context: RunContext) -> Tensors:
    """Compute statistics of the tier from its test samples, as `evaluation.tiers` does."""
    config = version.config
    if config.evaluation.data is None:
        raise ConfigError(
            "no test set is known: the run has no [evaluation.data], or its store is from a backup"
        )
    data = FleetContracts(context).test_set(version.artifacts)
    size = config.train.batch_size
    threads = config.evaluation.threads
    return batch_statistics(
        version.artifacts,
        version.exported.weights,
        data,
        batch_size=size,
        threads=threads,
    )
