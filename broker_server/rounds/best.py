"""Finds the best version of a run by its metric, and decides which versions keep their weights."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from broker_server.settings.evaluation import EvaluationKeys
from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store, VersionRecord
from broker_server.store.queries import find_run
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.digests import blob_path
from fleet_protocol.errors import ConfigError
from fleet_protocol.messages import Evaluation
from fleet_protocol.metrics import label_accuracies

# Scores.


def score(config: EvaluationKeys, evaluation: Evaluation) -> float:
    """Return the score of a version by the configured metric: larger is better."""
    if config.metric is None:
        return evaluation.rank
    values = {"loss": evaluation.loss, "accuracy": evaluation.accuracy}
    for metric in evaluation.metrics:
        values[metric.name] = metric.value
    value = values.get(config.metric)
    if value is None:
        return -math.inf
    return -value if config.falling else value


def shown_score(config: EvaluationKeys, value: float) -> float:
    """Return the value of the metric from a score."""
    if config.metric is None:
        return abs(value)
    return -value if config.falling else value


def best_version(config: EvaluationKeys, versions: Sequence[VersionRecord]) -> VersionRecord | None:
    """Return the best of the evaluated versions, the newest of equal ones; None without any."""
    best: VersionRecord | None = None
    best_key = (-math.inf, -1)
    for version in versions:
        if version.evaluation is None:
            continue
        # The number breaks ties: the newest version wins.
        key = (score(config, version.evaluation), version.number)
        if best is None or key > best_key:
            best = version
            best_key = key
    return best


def reason_to_stop(config: EvaluationKeys, versions: Sequence[VersionRecord]) -> str | None:
    """Return why a run ends before its last round; None while it continues.

    The result depends only on the store, so a restarted server decides the same.

    Args:
        config: configuration with the patience.
        versions: versions of the run, in order.
    """
    if config.patience is None:
        return None
    best = -math.inf
    best_number = 0
    since = 0  # evaluations since the best one
    last_round = -1
    for version in versions:
        if version.evaluation is None:
            continue
        value = score(config, version.evaluation)
        # A promoted version starts the count again: the operator wants training to continue from
        # it.
        since = since + 1 if version.round > last_round else 0
        last_round = version.round
        if value > best + config.min_delta:
            best = value
            best_number = version.number
            since = 0
    if since < config.patience:
        return None
    by = f" by more than {config.min_delta:g}" if config.min_delta else ""
    name = config.metric or "the accuracy, or the loss if there is none,"
    record = f"the best was {shown_score(config, best):.4f} of version {best_number}"
    return f"{name} did not improve{by} in {since} evaluations; {record}"


def metric_names(counts: Collection[str], further: Iterable[str]) -> list[str]:
    """Return the names of the values that an evaluation reports.

    Args:
        counts: the unit that the loss sums over samples.
        further: metrics of the recipe besides the loss, by name.
    """
    accuracy = ["accuracy"] if "correct" in counts else []
    return ["loss", *accuracy, *further]


def require_metric(config: EvaluationKeys, metrics: Sequence[str]) -> None:
    """Check that evaluations include the configured metric.

    Args:
        config: names the metric.
        metrics: names of the values that an evaluation reports.

    Raises:
        ConfigError: it does not report the metric.
    """
    if config.metric is not None and config.metric not in metrics:
        raise ConfigError(
            f"evaluation.metric: evaluations do not report {config.metric!r}, only "
            f"{', '.join(metrics)}; name one of these, or export with {config.metric!r} "
            "among the metrics of [model.recipe]"
        )


# Versions whose weights are kept.


def kept_versions(
    versions: Sequence[VersionRecord], newest: int | None, judging: EvaluationKeys
) -> tuple[VersionRecord, ...]:
    """Return the versions of a run whose weights are kept, in order: the newest ones, and the best.

    Args:
        versions: versions of the run, in order.
        newest: how many of the newest are kept; None for all.
        judging: the metric. The newest of versions with equal scores counts as the best.
    """
    if newest is None:
        return tuple(versions)
    best = best_version(judging, versions)
    first = len(versions) - newest
    kept = []
    for index, version in enumerate(versions):
        if index >= first or version is best:
            kept.append(version)
    return tuple(kept)


def drop_old_weights(
    versions: Sequence[VersionRecord],
    newest: int | None,
    blobs: BlobStore,
    used: Collection[str],
    judging: EvaluationKeys,
) -> None:
    """Remove the weights of versions that are not in `kept_versions`.

    The store's records of a version stay, and so do its batch norm statistics, which are small and
    may be used by later versions. The function may be called repeatedly.

    Args:
        versions: versions of the run, in order.
        newest: how many of the newest keep their weights; None for all.
        blobs: blobs that hold the weights.
        used: digests that are kept in any case.
        judging: the metric.
    """
    kept = {version.digest for version in kept_versions(versions, newest, judging)}
    for version in versions:
        if version.digest not in kept and version.digest not in used:
            blobs.remove(version.digest)


# Versions to choose from.


@dataclass(frozen=True)
class VersionView:
    """A global version to choose.

    Attributes:
        kept: whether the store still has the version's weights.
        bytes: size of the version's weights in bytes, if they are stored.
        score: score of the version by the run's metric, where larger is better; None if the version
            was not evaluated.
        labels: accuracy on each label, by tier; ``model`` means the whole model
            (`fleet_protocol.metrics.label_accuracies`).
    """

    version: VersionRecord
    kept: bool
    bytes: int | None
    score: float | None
    labels: Mapping[str, tuple[float | None, ...]]


def read_versions(store: Store, run: str | None = None) -> list[VersionView]:
    """Read the global versions of a run, by default the newest run, in order.

    A store without a run has none.

    Raises:
        ConfigError: no such run exists.
    """
    if run is None and not store.runs():
        return []
    record = find_run(store, run)
    judging = FleetConfig.stored(record.config).evaluation
    return [_view(store, judging, version) for version in store.versions(record.id)]


def _view(store: Store, judging: EvaluationKeys, version: VersionRecord) -> VersionView:
    # Not a `BlobStore`, which creates its folder: reading a store must not write.
    path = store.folder / "blobs" / "objects" / blob_path(version.digest)
    kept = path.is_file()
    evaluation = version.evaluation
    return VersionView(
        version=version,
        kept=kept,
        bytes=path.stat().st_size if kept else None,
        score=score(judging, evaluation) if evaluation else None,
        labels=_label_accuracies(evaluation) if evaluation else {},
    )


def _label_accuracies(evaluation: VersionEvaluation) -> dict[str, tuple[float | None, ...]]:
    labels = {}
    for name, judged in {"model": evaluation, **evaluation.tiers}.items():
        shares = label_accuracies(judged)
        if shares:
            labels[name] = shares
    return labels
