"""With keep_versions a store holds the newest global versions and the best one, whatever happens to
the server.
"""

import contextlib
import os
import signal

import numpy as np
import pytest

from broker_server.rounds.best import drop_old_weights, kept_versions
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.evaluation import EvaluationKeys
from broker_server.store import Store, VersionRecord
from broker_server.store.export import load_version
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.errors import ConfigError
from fleet_protocol.weights import encode_weights
from tests.broker_server.peer import Peer, honest, profile
from tests.broker_server.test_resume import start_dying


def version(number, accuracy=None, digest=None):
    found = (
        None if accuracy is None else VersionEvaluation(loss=1.0, accuracy=accuracy, examples=10)
    )
    return VersionRecord("run", number, number, digest or f"{number:064x}", None, None, 0.0, found)


@pytest.mark.parametrize(
    ("accuracies", "newest", "wanted"),
    [
        ((None, 0.1, 0.2), None, [0, 1, 2]),
        ((None, 0.1, 0.2), 1, [2]),
        ((None, 0.3, 0.2, 0.1), 1, [1, 3]),
        ((None, 0.3, 0.2, 0.1), 2, [1, 2, 3]),
        ((None, 0.3, None, 0.3, None), 1, [3, 4]),  # equally good: the newer one
        ((None, None, None), 2, [1, 2]),
        ((None,), 3, [0]),
    ],
)
def test_the_newest_and_the_best_are_kept(accuracies, newest, wanted):
    versions = [version(number, accuracy) for number, accuracy in enumerate(accuracies)]
    assert [item.number for item in kept_versions(versions, newest, EvaluationKeys())] == wanted


def test_weights_that_a_kept_version_shares_stay(tmp_path):
    """Two versions may have the same bytes; dropping one must not take them from the other, and may
    be repeated.
    """
    blobs = BlobStore(tmp_path)
    same = blobs.put(b"same")
    other = blobs.put(b"other")
    versions = [version(0, digest=same), version(1, digest=other), version(2, digest=same)]
    for _ in range(2):
        drop_old_weights(versions, 1, blobs, (), EvaluationKeys())
        assert blobs.read(same) == b"same"
        assert not blobs.has(other)


def best_in_round_1(frequent, rare):
    """The model answers with the test set's most frequent label after round 1, with a rare one
    after the others.
    """

    def script(peer, work):
        if work.offer.routine == "statistics":
            return honest()(peer, work)
        tensors = {name: np.array(value) for name, value in work.weights.items()}
        tensors["head.bias"][frequent if work.offer.round == 1 else rare] += (
            1e3 * work.offer.round**2
        )
        return peer.send(work, encode_weights(tensors, work.metadata()))

    return script


@pytest.mark.parametrize(
    "killed_at", [None, ("advance_round", 8)], ids=["undisturbed", "killed when round 2 closed"]
)
def test_a_run_keeps_what_it_was_told_to(
    killed_at, url, config, running, fleet, tmp_path, test_set
):
    """Dropped versions stay in the tables; exporting one says which are there. A killed server is
    tidied after.
    """
    settings = config(round={"rounds": 4}, keep_versions=1)
    with np.load(test_set) as file:
        counts = np.bincount(file["y"])
    with Peer(fleet, "d", url, best_in_round_1(counts.argmax(), counts.argmin())):
        if killed_at is not None:
            assert start_dying(settings, url, *killed_at, tmp_path).wait(60) == -signal.SIGKILL
        finished = running(settings, url).wait()
    store = Store(settings.store, read_only=True)
    versions = store.versions(finished.run)
    assert [item.number for item in versions] == [0, 1, 2, 3, 4]
    objects = {
        path.name for path in (settings.store / "blobs" / "objects").rglob("*") if path.is_file()
    }
    statistics = {item.statistics_digest for item in versions if item.statistics_digest is not None}
    assert objects - statistics == {versions[1].digest, versions[4].digest}
    assert statistics <= objects
    assert all(np.isfinite(value).all() for value in load_version(store).weights.values())
    with pytest.raises(
        ConfigError, match=r"weights of version 0 .* those of 1, 4 are \(keep_versions"
    ):
        load_version(store, version=0)
    store.close()


def test_a_server_that_starts_finds_what_nobody_needs(url, config, fleet, tmp_path):
    """The slices of a round that was never closed had stayed for ever, as had copies of backups
    that were killed.
    """
    settings = config(round={"rounds": 2}, evaluation={"data": None})
    with Peer(fleet, "half", url, honest(), profile=profile(max_width=0.5)):
        assert start_dying(settings, url, "advance_round", 2, tmp_path).wait(60) == -signal.SIGKILL
    blobs = BlobStore(settings.store / "blobs")
    with contextlib.closing(Store(settings.store)) as store:
        (run,) = store.runs()
        (task,) = store.tasks(run.id, 1, "train")
        old, young = (settings.store / f".shoal-backup-{name}" for name in ("old", "young"))
        for folder in (old, young):
            (folder / "blobs").mkdir(parents=True)
        os.utime(old, (0, 0))
        with Server(fleet, settings.store, BrokerConfig(url=url)):
            assert blobs.has(task.weights.digest)  # its run may go on
            assert [young.exists(), old.exists()] == [True, False]
        store.end_run(run.id, "stopped", "stopped by its operator")
        with Server(fleet, settings.store, BrokerConfig(url=url)):
            needed = {item.digest for item in store.versions(run.id)}
            assert {
                path.name for path in (blobs.root / "objects").rglob("*") if path.is_file()
            } == needed
    (settings.store / "shoal.db").rename(tmp_path / "lost.db")
    with Server(fleet, settings.store, BrokerConfig(url=url)):
        assert all(map(blobs.has, needed))  # of which a database that is found again knows


def test_a_run_goes_on_when_only_keep_versions_has_changed(url, config, running, fleet, tmp_path):
    """How much is kept is no part of what is trained: the run that was cut short is continued, not
    begun again.
    """
    settings = config(round={"rounds": 2}, evaluation={"data": None})
    with Peer(fleet, "d", url, honest()):
        assert start_dying(settings, url, "advance_round", 4, tmp_path).wait(60) == -signal.SIGKILL
        finished = running(settings.model_copy(update={"keep_versions": 1}), url).wait()
    store = Store(settings.store, read_only=True)
    assert [(run.id, run.status) for run in store.runs()] == [(finished.run, "finished")]
    blobs = BlobStore(settings.store / "blobs")
    assert [blobs.has(item.digest) for item in store.versions(finished.run)] == [False, False, True]
    store.close()
