"""`shoal promote` and `rollback`: which version is exported, and which one the next round starts
from.
"""

import contextlib
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from broker_server.rounds.best import reason_to_stop
from broker_server.service.launch import steer
from broker_server.settings.evaluation import EvaluationKeys
from broker_server.store import Store, queries
from broker_server.store.export import load_version
from broker_server.store.promotion import marked_versions, promote, roll_back
from fleet_protocol.errors import ConfigError
from shoal.cli.commands.promote import missing_parts
from shoal.cli.main import main
from tests.broker_server.peer import Peer, honest
from tests.broker_server.test_launch import Serving
from tests.broker_server.test_steering import Followed, stored


@pytest.fixture
def shoal(monkeypatch, capsys):
    """A command in this process: its exit code and all it said."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, "".join(capsys.readouterr())

    return run


def test_a_held_run_goes_on_from_an_earlier_version(url, config, fleet, shoal, monkeypatch):
    """Each round adds 1 to the weights: gone back after the first, the second adds to the initial
    ones.
    """
    settings = config(
        evaluation={"data": None}, broker={"url": url}, round={"rounds": 3, "wait_seconds": 60}
    )
    store = str(settings.store)
    asked = []

    def pausing(peer, work):
        if not asked:
            asked.append(steer(settings, "pause"))
            code, said = shoal("rollback", 0, "--store", store)  # in mid-round
            assert (code, "hold it with `shoal pause`" in " ".join(said.split())) == (2, True)
        honest()(peer, work)

    with Serving(settings, url), Peer(fleet, "d", url, pausing):
        run = Followed(settings)
        with run.heard:
            assert run.heard.wait_for(lambda: "round-closed" in run.events, 30)
        steer(settings, "pause")  # answered once the round is closed
        assert stored(settings).run.status == "paused"
        code, said = shoal("rollback", 0, "--store", store, "--json")
        assert code == 0, said
        made = json.loads(said)
        assert (made["number"], made["round"]) == (2, 0)
        steer(settings, "go")
        finished = run.finished()
        assert (finished.status, finished.version, finished.rounds) == ("finished", 3, 2)
    with contextlib.closing(Store(settings.store, read_only=True)) as opened:
        first, second, third, last = (
            load_version(opened, version=number).weights for number in range(4)
        )
        assert [item.version for item in opened.rounds(made["run"])] == [0, 2]
        assert marked_versions(opened, made["run"]) == {"newest": 3}
        assert queries.status(opened).closed == queries.runs(opened)[0].closed == 2
    assert all(np.array_equal(first[name], third[name]) for name in first)
    assert all(np.array_equal(second[name], last[name]) for name in first)
    assert shoal("rollback", 1, "--store", store)[1].endswith(
        "has the weights of version 1; the run has ended, so no round starts from it, and"
        " `shoal export-weights` writes it unless another version is promoted\n"
    )
    assert "2 of 3 rounds closed (rolled back 2 times)" in shoal("status", "--store", store)[1]
    assert "newest 4, repeats 1" in shoal("runs", "--store", store)[1]
    assert "no version 9" in shoal("rollback", 9, "--store", store)[1]


def test_the_promoted_version_is_exported_and_keeps_its_weights(
    url, config, fleet, running, shoal, tmp_path
):
    """By default, until another is; also where a store keeps one version alone."""
    settings = config(evaluation={"data": None}, round={"rounds": 4}, keep_versions=1)
    store = str(settings.store)

    def promoting(peer, work):
        if work.offer.round == 3:
            assert shoal("promote", 2, "--store", store) == (
                0,
                f"version 2 of run {work.offer.run} is promoted\n",
            )
        honest()(peer, work)

    with Peer(fleet, "d", url, promoting):
        run = running(settings, url).wait().run
    with contextlib.closing(Store(settings.store)) as opened:
        assert load_version(opened).record.number == 2
        assert marked_versions(opened, run) == {"newest": 4, "promoted": 2}
        promote(opened, opened.version(run))
        assert load_version(opened).record.number == 4
        with pytest.raises(ConfigError, match="no longer in"):
            load_version(opened, version=3)
    code, said = shoal(
        "export-weights", "--store", store, "--version", 2, "--out", tmp_path / "weights", "--json"
    )
    assert (code, json.loads(said)["number"]) == (0, 2)
    assert "promoted 4" in shoal("runs", "--store", store)[1]


def test_a_version_whose_state_is_gone_is_not_gone_back_to(url, config, fleet, running):
    """The moments of a server optimizer are kept for the newest version alone; the remedy does
    without them.
    """
    settings = config(
        evaluation={"data": None},
        round={"rounds": 3},
        server_optimizer={"name": "fedavgm", "learning_rate": 1.0},
    )
    with Peer(fleet, "d", url, honest()):
        run = running(settings, url).wait().run
    with contextlib.closing(Store(settings.store)) as store:
        with pytest.raises(ConfigError, match=r"--version 1`, and model\.weights"):
            roll_back(store, store.version(run, 1))
        before = store.versions(run)
        assert roll_back(store, store.version(run, 3)).state_digest == before[-1].state_digest
        assert store.versions(run)[:-1] == before
    shutil.rmtree(settings.store)


def test_patience_begins_again_where_one_went_back(url, config, fleet, running):
    """Otherwise the run would be over at once: that it got no better is why one went back."""
    settings = config(round={"rounds": 3})
    with Peer(fleet, "d", url, honest()):
        run = running(settings, url).wait().run
    with contextlib.closing(Store(settings.store)) as store:
        keys = EvaluationKeys(patience=1, min_delta=9.0)
        assert reason_to_stop(keys, store.versions(run))
        roll_back(store, store.version(run, 1))
        assert reason_to_stop(keys, store.versions(run)) is None


@pytest.mark.parametrize(
    ("private", "names_parts"),
    [({"parts": ["head", "fc1"]}, True), ({"copy_model": True}, False), (None, False)],
)
def test_a_chosen_version_says_which_parts_it_lacks(config, private, names_parts):
    """Boards keep private parts; a copy of the model is missing nowhere."""
    settings = config(private=private, evaluation={"data": None})
    text = missing_parts(SimpleNamespace(config=settings.model_dump_json()))
    assert ("initial values of head, fc1 ([private])" in text) == names_parts
    assert bool(text) == names_parts
