"""A round from the offers to a new global version, over real brokers, with devices that behave."""

import contextlib
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

from broker_server.rounds import new_version
from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.evaluation import Evaluator, load_test_set
from broker_server.rounds.norm_statistics import batch_statistics
from broker_server.store import Store, TaskPhase
from fleet_protocol import control
from fleet_protocol.digests import blob_path
from fleet_protocol.errors import ConfigError, RefusalReason
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import UploadAck
from fleet_protocol.weights import encode_weights
from models.plan import compile_plan, make_plan
from shoal.cli.main import app
from tests.broker_server.artifacts import ARCH, export_tiny, tiny_layout, tiny_weights
from tests.broker_server.peer import Peer, honest, profile


def test_a_round_merges_two_widths_and_judges_the_result(broker_url, config, running, fleet):
    """Each device gets the widest tier it declares; entries both hold are averaged, the rest come
    from the wide one.
    """
    with (
        Peer(fleet, "wide", broker_url, honest(1.0)),
        Peer(fleet, "narrow", broker_url, honest(3.0), profile=profile(max_width=0.5)),
    ):
        server = running(config(round={"min_devices": 2}), broker_url)
        finished = server.wait()
    assert finished.status == "finished", finished.error
    closed = server.events_of(control.RoundClosed)[0]
    assert closed.merged == {"wide": "w1.00-d1", "narrow": "w0.50-d1"}
    assert closed.evaluation.examples == 40
    before = tiny_weights(tiny_layout())
    store = Store(server.config.store, read_only=True)
    version = store.version(finished.run)
    after = open_tensors(server.config.store / "blobs" / "objects" / blob_path(version.digest))
    np.testing.assert_allclose(
        after["hidden.weight"][:4], before["hidden.weight"][:4] + 2, rtol=1e-6
    )
    np.testing.assert_allclose(
        after["hidden.weight"][4:], before["hidden.weight"][4:] + 1, rtol=1e-6
    )
    np.testing.assert_allclose(
        after["head.weight"][:, 4:], before["head.weight"][:, 4:] + 1, rtol=1e-6
    )
    assert {task.phase for task in store.tasks(finished.run, 1, "train")} == {TaskPhase.MERGED}
    assert closed.payload_bytes > 0
    assert closed.wire_bytes > closed.payload_bytes
    assert not server.events_of(control.UpdateRefused)
    store.close()


def test_updates_are_folded_in_the_order_of_the_devices_ids(
    url, config, running, fleet, monkeypatch
):
    """In whatever order they join: the sum of floats depends on its order."""
    orders = []

    class Recording(new_version.Folding):
        def __init__(self, merge, order, *settings):
            orders.append(list(order))
            super().__init__(merge, order, *settings)

    monkeypatch.setattr(new_version, "Folding", Recording)
    with (
        Peer(fleet, "beech", url, honest(1.0)),
        Peer(fleet, "cedar", url, honest(2.0)),
        Peer(fleet, "alder", url, honest(3.0)),
    ):
        server = running(config(round={"min_devices": 3}), url)
        finished = server.wait()
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(server.config.store, read_only=True)) as store:
        devices = {task.id: task.device for task in store.tasks(finished.run, 1, "train")}
    assert [devices[task] for task in orders[0]] == ["alder", "beech", "cedar"]


def test_weights_are_published_once_for_all_who_wait(url, config, running, fleet, tmp_path):
    """Three devices of one tier cost the server's connection one copy of the weights, not three."""
    export_tiny(tmp_path / "large", tiny_layout(hidden=4000))
    settings = config(
        model={"artifacts": tmp_path / "large"},
        round={"min_devices": 3, "chunk_bytes": 8192},
        evaluation={"data": None},
    )
    with contextlib.ExitStack() as stack:
        for name in ("a", "b", "c"):
            stack.enter_context(Peer(fleet, name, url, honest()))
        finished = running(settings, url).wait()
    assert finished.status == "finished", finished.error
    weights = 4 * sum(value.size for value in tiny_weights(tiny_layout(hidden=4000)).values())
    # One down and three up, with one manifest; the wire has a little more for the words around
    # them.
    assert 4 * weights <= finished.payload_bytes <= 4.2 * weights
    assert finished.payload_bytes < finished.wire_bytes < 4.6 * weights


def test_a_device_downloads_every_version_once(url, config, running, fleet):
    """What statistics were asked of is what the next round trains: the same tensors, so the same
    blob, sent once.
    """
    with Peer(fleet, "a", url, honest()) as one, Peer(fleet, "b", url, honest()) as other:
        server = running(config(round={"rounds": 3, "min_devices": 2}), url)
        finished = server.wait()
    offered = [(offer.routine, offer.version, offer.choices[0].weights) for offer in one.offers]
    by_version = {}
    for _, version, ref in offered:
        by_version.setdefault(version, set()).add(ref.digest)
    assert len(offered) == 6
    assert [len(by_version[version]) for version in sorted(by_version)] == [1, 1, 1, 1]
    manifest = one.offers[0].choices[0].artifact_set
    wanted = manifest.chunks + sum({ref.digest: ref.chunks for _, _, ref in offered}.values())
    assert (one.chunks_received, other.chunks_received) == (wanted, wanted)
    assert finished.status == "finished"


def test_a_version_is_judged_when_it_is_due(url, config, running, fleet):
    """Every second version and the last one; statistics are asked for again only where they are
    due.
    """
    settings = config(round={"rounds": 5}, evaluation={"every": 2, "statistics_every": 2})
    with Peer(fleet, "d", url, honest()) as peer:
        server = running(settings, url)
        finished = server.wait()
    judged = [event.version for event in server.events_of(control.RoundJudged)]
    judged += [
        event.version for event in server.events_of(control.RoundClosed) if event.evaluation
    ]  # the last
    assert judged == [2, 4, 5]
    # Version 2 is the first evaluation and has nothing to reuse, 4 the second, 5 the last.
    assert [offer.version for offer in peer.offers if offer.routine == "statistics"] == [2, 4, 5]
    assert finished.evaluation == server.events_of(control.RoundClosed)[-1].evaluation


def test_the_next_round_begins_while_a_version_is_judged(url, config, running, fleet, monkeypatch):
    """The judge of the first version waits for a device that trains in the second round."""
    went_on = threading.Event()
    evaluate = Evaluator.evaluate

    def waiting(*given):
        assert went_on.wait(60)
        return evaluate(*given)

    def script(peer, work):
        if work.offer.round == 2:
            went_on.set()
        honest()(peer, work)

    monkeypatch.setattr(Evaluator, "evaluate", waiting)
    with Peer(fleet, "d", url, script):
        server = running(config(round={"rounds": 2}), url)
        assert server.wait(90).status == "finished"
    kinds = (control.RoundStarted, control.RoundClosed, control.RoundJudged)
    told = [(event.type, event.round) for event in server.events if isinstance(event, kinds)]
    assert told == [
        ("round-started", 1),
        ("round-closed", 1),
        ("round-started", 2),
        ("round-judged", 1),
        ("round-closed", 2),
    ]
    assert [event.evaluation is None for event in server.events_of(control.RoundClosed)] == [
        True,
        False,
    ]


def test_a_version_is_judged_while_the_devices_of_the_next_round_are_awaited(
    url, config, running, fleet
):
    """One of its devices leaves during the round before: the judgement had to wait for it, too."""
    left = threading.Event()

    def after_it_left(peer, work):
        assert left.wait(60)
        honest()(peer, work)

    settings = config(round={"rounds": 2, "min_devices": 2, "wait_seconds": 60})
    with Peer(fleet, "stays", url, after_it_left):
        with Peer(fleet, "leaves", url, honest()) as leaving:
            server = running(settings, url)
            leaving.wait_for(lambda peer: peer.got(UploadAck))
        # Its farewell arrives before the other's update, so the round cannot close without it.
        left.set()
        assert server.wait_event(control.RoundJudged, timeout_seconds=30).evaluation is not None
    assert not any(event.round == 2 for event in server.events_of(control.RoundStarted))


def test_a_run_that_may_end_by_a_judgement_waits_for_it(url, config, running, fleet):
    """With patience no round begins before the version before it is judged."""
    with Peer(fleet, "d", url, honest()):
        server = running(config(round={"rounds": 2}, evaluation={"patience": 2}), url)
        server.wait()
    assert all(event.evaluation is not None for event in server.events_of(control.RoundClosed))
    assert not server.events_of(control.RoundJudged)


def test_old_statistics_serve_until_new_ones_are_due(url, config, running, fleet):
    """With a query every third evaluation the ones between use the last answer."""
    settings = config(round={"rounds": 4}, evaluation={"statistics_every": 3})
    with Peer(fleet, "d", url, honest()) as peer:
        server = running(settings, url)
        server.wait()
    assert [event.version for event in server.events_of(control.RoundJudged)] == [1, 2, 3]
    assert [offer.version for offer in peer.offers if offer.routine == "statistics"] == [1, 3, 4]


def test_statistics_can_come_from_the_servers_own_batches(url, config, running, fleet):
    """No device is asked; the version is judged with the test set's statistics."""
    settings = config(evaluation={"statistics": "server-batch"})
    with Peer(fleet, "d", url, honest()) as peer:
        server = running(settings, url)
        finished = server.wait()
    assert finished.evaluation is not None
    assert {offer.routine for offer in peer.offers} == {"train"}


def test_a_version_without_statistics_is_kept_and_says_why_it_was_not_judged(
    url, config, running, fleet
):
    """Devices that cannot run the whole model decline the query; the round closes all the same."""

    def declines_queries(peer, work):
        if work.offer.routine == "statistics":
            peer.refuse(work, RefusalReason.NO_SPACE)
        else:
            honest()(peer, work)

    with Peer(fleet, "d", url, declines_queries):
        server = running(config(), url)
        finished = server.wait()
    closed = server.events_of(control.RoundClosed)[0]
    assert (closed.version, closed.evaluation) == (1, None)
    assert "batch norm statistics: 0 of 1 updates" in closed.note
    assert finished.status == "finished"


def test_updates_whose_sum_is_no_number_are_refused(url, config, running, fleet):
    """Finite one by one they may not be in sum: each is refused by name, and without another there
    is no version.
    """

    def enormous(peer, work):
        tensors = {name: np.full_like(value, 3e38) for name, value in work.weights.items()}
        peer.send(work, encode_weights(tensors, work.metadata()))

    with Peer(fleet, "a", url, enormous), Peer(fleet, "b", url, enormous):
        server = running(config(round={"min_devices": 2, "retries": 1}), url)
        finished = server.wait()
    assert server.events_of(control.RoundAbandoned)[0].reason == "every update was refused"
    assert {event.device for event in server.events_of(control.UpdateRefused)} == {"a", "b"}
    assert (finished.status, finished.version) == ("failed", 0)


def test_a_run_of_the_smallest_tier_is_judged_by_that_tier(url, config, running, fleet):
    """AllSmall: everybody trains and measures the small sub-model, and it alone is evaluated."""
    small = "w0.50-d1"
    settings = config(tiers={"allowed": (small,)}, evaluation={"tier": small})
    with Peer(fleet, "d", url, honest()) as peer:
        server = running(settings, url)
        finished = server.wait()
    assert {offer.choices[0].tier for offer in peer.offers} == {small}
    assert {offer.routine for offer in peer.offers} == {"train", "statistics"}
    assert finished.evaluation is not None
    store = Store(settings.store, read_only=True)
    versions = store.versions(finished.run)
    store.close()
    kept = {
        path.name for path in (settings.store / "blobs" / "objects").rglob("*") if path.is_file()
    }
    assert kept == {item.digest for item in versions} | {versions[1].statistics_digest}


def test_further_tiers_are_judged_beside_the_whole_model(
    url, config, running, fleet, tmp_path, test_set
):
    """Each as its devices are sent it, one on samples of its own; the record, the events and `shoal
    rounds` tell.
    """
    small = "w0.50-d1"
    with np.load(test_set) as file:
        np.savez(tmp_path / "few.npz", x=file["x"][:7], y=file["y"][:7])
    own = {"kind": "npz", "path": tmp_path / "few.npz"}
    settings = config(
        evaluation={
            "statistics": "server-batch",
            "tiers": ("w1.00-d1", small),
            "tier_data": {small: own},
        }
    )
    with Peer(fleet, "d", url, honest()):
        finished = running(settings, url).wait()
    found = finished.evaluation.tiers
    assert {tier: item.examples for tier, item in found.items()} == {"w1.00-d1": 40, small: 7}
    assert found["w1.00-d1"].accuracy == finished.evaluation.accuracy
    artifacts = load_artifacts(settings.model.artifacts, ARCH, chunk_bytes=1024)
    tier = artifacts.tiers[small]
    data = load_test_set(settings.evaluation.tier_data[small], tier.manifest)
    store = Store(settings.store, read_only=True)
    digest = store.version(finished.run).digest
    (record,) = store.rounds(finished.run)
    store.close()
    weights = open_tensors(settings.store / "blobs" / "objects" / blob_path(digest))
    cut = compile_plan(artifacts.layout, make_plan(artifacts.layout, tier.tier)).slice(weights)
    statistics = batch_statistics(tier, cut, data, batch_size=settings.train.batch_size, threads=1)
    assert found[small] == Evaluator(tier, data, batch_size=256, threads=1).evaluate(
        cut, statistics
    )
    assert record.evaluation == finished.evaluation
    shown = (
        CliRunner(env={"COLUMNS": "200"})
        .invoke(app, ["rounds", "--store", str(settings.store)])
        .stdout
    )
    assert small in shown
    assert f"{found[small].accuracy:.4f}" in shown


def test_only_the_newest_state_of_a_server_optimizer_is_kept(url, config, running, fleet):
    """Every global version stays; what the optimizer carries is needed for the next round alone."""
    settings = config(
        round={"rounds": 3}, evaluation={"data": None}, server_optimizer={"name": "fedadam"}
    )
    with Peer(fleet, "d", url, honest()):
        finished = running(settings, url).wait()
    store = Store(settings.store, read_only=True)
    versions = store.versions(finished.run)
    store.close()
    kept = {
        path.name for path in (settings.store / "blobs" / "objects").rglob("*") if path.is_file()
    }
    assert kept == {item.digest for item in versions} | {versions[-1].state_digest}
    assert len({item.state_digest for item in versions}) == len(versions)


def test_statistics_are_asked_for_one_tier_alone(url, config, running, fleet):
    """To judge several tiers of a model with static batch norm the server's own batches have to
    do.
    """
    server = running(config(evaluation={"tiers": ("w0.50-d1",)}), url)
    with pytest.raises(ConfigError, match=r'evaluation\.statistics = "server-batch"'):
        server.wait()


def test_judging_a_tier_that_is_not_exported_is_an_error(url, config, running, fleet):
    """Before anything is trained, with the tiers there are."""
    server = running(config(evaluation={"tier": "w0.25-d1"}), url)
    with pytest.raises(
        ConfigError,
        match=r"'w0\.25-d1' is not exported; the exported tiers are w1\.00-d1, w0\.50-d1",
    ):
        server.wait()
