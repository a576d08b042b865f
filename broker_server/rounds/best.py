"""Which version of a run is the best by its metric, whether they still get better, and which keep
their weights.
"""

import math
from collections.abc import Collection, Mapping, Sequence
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
from fleet_protocol.recipe_spec import RecipeSpec


def kept_versions(
    versions: Sequence[VersionRecord], newest: int | None, judging: EvaluationKeys
) -> tuple[VersionRecord, ...]:
    """The versions of a run whose weights stay: the best, and so many of the newest, None for all.

    In order.

    Of versions that were judged equal, the newest counts as the best.
    """
    if newest is None:
        return tuple(versions)
    best = best_version(judging, versions)
    first = len(versions) - newest
    return tuple(item for index, item in enumerate(versions) if index >= first or item is best)


def drop_old_weights(
    versions: Sequence[VersionRecord],
    newest: int | None,
    blobs: BlobStore,
    used: Collection[str],
    judging: EvaluationKeys,
) -> None:
    """Remove the weights of versions, in order, that neither keep them (see `kept`) nor share them
    with `used` digests.

    What the store says about a version stays, and so do its batch norm statistics, which are small
    and may be used by the versions after it. Doing it again is no error.
    """
    staying = {*used, *(item.digest for item in kept_versions(versions, newest, judging))}
    for item in versions:
        if item.digest not in staying:
            blobs.remove(item.digest)


def score(config: EvaluationKeys, found: Evaluation) -> float:
    """How good a version is by the metric that counts; what is larger is better."""
    if config.metric is None:
        return found.rank
    values = {
        "loss": found.loss,
        "accuracy": found.accuracy,
        **{item.name: item.value for item in found.metrics},
    }
    value = values.get(config.metric)
    return -math.inf if value is None else -value if config.falling else value


def shown_score(config: EvaluationKeys, found: float) -> float:
    """A score as people know it, with the sign of its metric."""
    return abs(found) if config.metric is None else -found if config.falling else found


def best_version(config: EvaluationKeys, versions: Sequence[VersionRecord]) -> VersionRecord | None:
    """The version that was judged best, of equal ones the newest; None where none was judged."""
    judged = [
        (score(config, item.evaluation), item.number, item)
        for item in versions
        if item.evaluation is not None
    ]
    return max(judged, key=lambda entry: entry[:2])[2] if judged else None


def reason_to_stop(config: EvaluationKeys, versions: Sequence[VersionRecord]) -> str | None:
    """Why a run ends before its last round, from its versions in order; None while it goes on.

    It is a function of what is stored, so a server that is killed and started again decides alike.
    """
    if config.patience is None:
        return None
    best = -math.inf
    number = 0
    since = 0
    made_by = -1
    for version in versions:
        if version.evaluation is not None:
            value = score(config, version.evaluation)
            since = (
                since + 1 if version.round > made_by else 0
            )  # whoever goes back wants it tried again
            made_by = version.round
            if value > best + config.min_delta:
                best = value
                number = version.number
                since = 0
    if since < config.patience:
        return None
    by = f" by more than {config.min_delta:g}" if config.min_delta else ""
    name = config.metric or "the accuracy, or the loss where there is none,"
    said = f"the best was {shown_score(config, best):.4f} of version {number}"
    return f"{name} did not get better{by} in {since} evaluations; {said}"


def require_metric(config: EvaluationKeys, recipe: RecipeSpec) -> None:
    """See that evaluations with a recipe have the metric that counts.

    A ConfigError where they have not.
    """
    known = [
        "loss",
        *(["accuracy"] if "correct" in recipe.loss.metrics else []),
        *(item.name for item in recipe.metrics),
    ]
    if config.metric is not None and config.metric not in known:
        raise ConfigError(
            f"evaluation.metric: evaluations have no {config.metric!r}, but {', '.join(known)}; name one of these, or "
            "export with it among the metrics of [model.recipe]"
        )


@dataclass(frozen=True)
class VersionView:
    """A global version to choose.

    Attributes:
        kept: whether its weights are still there.
        bytes: size of them, where they are.
        score: by the rule of the run, larger is better; None where it was not judged.
        labels: accuracy of each label by tier, ``model`` for the whole one
            (`fleet_protocol.metrics.label_accuracies`).
    """

    version: VersionRecord
    kept: bool
    bytes: int | None
    score: float | None
    labels: Mapping[str, tuple[float | None, ...]]


def read_versions(store: Store, run: str | None = None) -> list[VersionView]:
    """The global versions of a run, by default the newest one, in order.

    A store without a run has none.

    Raises:
        ConfigError: there is no such run.
    """
    if run is None and not store.runs():
        return []
    record = find_run(store, run)
    blobs = store.folder / "blobs" / "objects"
    judging = FleetConfig.stored(record.config).evaluation
    views = []
    for item in store.versions(record.id):
        path = blobs / blob_path(item.digest)  # a `BlobStore` makes its folder, and this only looks
        kept = path.is_file()
        judged = item.evaluation
        views.append(
            VersionView(
                version=item,
                kept=kept,
                bytes=path.stat().st_size if kept else None,
                score=score(judging, judged) if judged else None,
                labels=_labels(judged) if judged else {},
            )
        )
    return views


def _labels(judged: VersionEvaluation) -> dict[str, tuple[float | None, ...]]:
    found = {"model": judged, **judged.tiers}
    return {name: shares for name, item in found.items() if (shares := label_accuracies(item))}
