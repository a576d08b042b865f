"""`shoal rename`, and where a run's name is shown and accepted."""

import json
from contextlib import closing

import pytest

from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store
from fleet_protocol.control import RunFinished
from shoal.cli import serving
from tests.shoal.view.stores import RUN, made


@pytest.fixture
def named(tmp_path, typed):
    """A store in the folder, whose run was given a name by the command."""
    made(tmp_path)
    answer = typed("rename", "newest", "baseline", "--store", "store")
    assert (answer.returncode, answer.stdout) == (0, f"run {RUN} has the name baseline\n")
    return tmp_path


def test_a_name_is_shown_and_accepted(named, typed):
    """In lists, in the state of the run and in a comparison; every command finds the run by it."""
    for command in ("runs", "status", "rounds", "versions", "devices", "log", "advice"):
        answer = typed(command, "--store", "store", "--run", "baseline")
        assert answer.returncode == 0, answer.stderr
    assert "baseline" in typed("runs", "--store", "store").stdout
    assert f"run baseline ({RUN})" in typed("status", "--store", "store").stdout
    compared = json.loads(typed("compare", "baseline", RUN, "--store", "store", "--json").stdout)
    assert {record["run"] for record in compared} == {"baseline"}
    listed = json.loads(typed("runs", "--store", "store", "--json").stdout)
    assert [run["run.name"] for run in listed] == ["baseline"]


def test_the_end_of_a_run_has_its_name(tmp_path, monkeypatch, capsys):
    """Users look for the name that they gave, not for an id."""
    ended = RunFinished(
        run=RUN,
        status="finished",
        version=2,
        rounds=2,
        wire_bytes=0,
        payload_bytes=0,
        exit_code=0,
        seconds=1.0,
    )
    monkeypatch.setattr(serving, "run_fleet", lambda *_args, **_options: ended)
    settings = FleetConfig.model_validate(
        {
            "fleet": "lab",
            "store": tmp_path / "store",
            "run_name": "baseline",
            "model": {"arch": "conv", "artifacts": tmp_path / "artifacts"},
        }
    )
    serving.do_run(settings, as_json=False)
    assert f"run baseline ({RUN}) finished after 2 rounds" in capsys.readouterr().out


def test_a_store_without_names_shows_no_column_for_them(tmp_path, typed):
    made(tmp_path)
    assert "name" not in typed("runs", "--store", "store").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("newest", "a b"), "a run's name has 1 to 64 letters"),
        (("newest", "newest"), "is not 'newest'"),
        (("nope", "other"), f"has no run nope; its runs: baseline ({RUN})"),
    ],
)
def test_a_name_that_cannot_be_given_is_refused(words, message, named, typed):
    """With the reason, and the run keeps the one that it has."""
    answer = typed("rename", *words, "--store", "store")
    assert answer.returncode == 2
    assert message in " ".join(answer.stderr.replace("│", " ").split())
    with closing(Store(named / "store", read_only=True)) as store:
        assert [run.name for run in store.runs()] == ["baseline"]


def test_a_loss_is_not_listed_as_an_accuracy(tmp_path, typed):
    """Of a run that learns numbers the list had said `accuracy 34541`."""
    made(tmp_path)
    assert "accuracy" not in typed("runs", "--store", "store").stdout
    with closing(Store(tmp_path / "store")) as store:
        newest = store.versions(RUN)[-1]
        evaluation = newest.evaluation.model_copy(update={"accuracy": None, "loss": 34541.5})
        store.judge_version(RUN, newest.number, evaluation=evaluation)
    assert "loss 34541.5" in " ".join(typed("runs", "--store", "store").stdout.split())
