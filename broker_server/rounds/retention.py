"""Which global versions of a run keep their weights: the newest, and the one that was judged best."""

from collections.abc import Collection, Sequence

from broker_server.rounds.best import best_of
from broker_server.settings.evaluation import EvaluationKeys
from broker_server.store import VersionRecord
from fleet_protocol.blob_store import BlobStore


def kept(versions: Sequence[VersionRecord], newest: int | None, judging: EvaluationKeys) -> tuple[VersionRecord, ...]:
    """The versions of a run whose weights stay: the best, and so many of the newest, None for all; in order.

    Of versions that were judged equal, the newest counts as the best.
    """
    if newest is None:
        return tuple(versions)
    best = best_of(judging, versions)
    first = len(versions) - newest
    return tuple(item for index, item in enumerate(versions) if index >= first or item is best)


def drop_old_weights(
    versions: Sequence[VersionRecord],
    newest: int | None,
    blobs: BlobStore,
    used: Collection[str],
    judging: EvaluationKeys,
) -> None:
    """Remove the weights of versions, in order, that neither keep them (see `kept`) nor share them with `used` digests.

    What the store says about a version stays, and so do its batch norm statistics, which are small and may be used by
    the versions after it. Doing it again is no error.
    """
    staying = {*used, *(item.digest for item in kept(versions, newest, judging))}
    for item in versions:
        if item.digest not in staying:
            blobs.remove(item.digest)
