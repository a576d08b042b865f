"""Each rule of what to do next speaks when its evidence is there, and not before."""

import time
from contextlib import closing

import pytest
from sqlalchemy import update

from broker_server.rounds.advice import find_advice
from broker_server.rounds.best import read_versions
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.method import StrategyConfig
from broker_server.store import Store, schema
from broker_server.store.task_records import Alternatives, alternative
from fleet_protocol.locks import held
from fleet_protocol.messages import DeviceProfile
from tests.broker_server.peer import profile
from tests.shoal.view.stores import RUN, evaluation, made

UNFAIR = "The model is much worse on some devices than on others"
AWAY = "1 of 6 devices do not take part"


@pytest.fixture
def unserved(tmp_path):
    with closing(Store(made(tmp_path, rounds=8))) as store:
        yield store


@pytest.fixture
def opened(unserved):
    """A store that a server works on."""
    with held(unserved.folder, "another server works here"):
        yield unserved


def change(store, table, where, **values):
    with store._begin() as connection:
        connection.execute(update(table).where(where).values(values))


def judge(store, number, accuracy):
    judged = evaluation(number, 8).model_copy(update={"accuracy": accuracy})
    change(
        store,
        schema.versions,
        schema.versions.c.number == number,
        evaluation=judged.model_dump_json(),
    )


def said(store, **named):
    return {item.title: item for item in find_advice(store, **named)}


def test_a_run_that_does_well_is_told_of_its_devices_alone(opened):
    """Of who is served worse, with figures, and of who is away, with the remedy."""
    change(opened, schema.tasks, schema.tasks.c.phase == "missed", phase="merged")
    found = said(opened)
    assert list(found) == [UNFAIR, AWAY]
    assert "(w0.50-d1) reaches 0.5000, while pi-" in found[UNFAIR].evidence
    assert found[AWAY].evidence == "For example pi-0004: offline."
    assert found[AWAY].remedy.startswith(
        "Check its power and network; on the board, run `shoal device doctor`"
    )


@pytest.mark.parametrize("end", ["narrowest", "widest"])
def test_a_choice_that_never_moves_is_named(opened, end):
    """With what devices measured it is said which Theta would fit; a single other choice is enough
    to say nothing.
    """
    title = f"Every device trains its {end} sub-model in every round"
    assert title not in said(opened)
    taken, other = ("w0.50-d1", "w1.00-d1") if end == "narrowest" else ("w1.00-d1", "w0.50-d1")
    task = next(task for task in opened.tasks(RUN, 8, "train") if task.metrics is not None)
    refused = alternative(other, task.artifact_set, task.weights, other)
    metrics = task.metrics.model_copy(update={"efficiency": 3.0})
    config = FleetConfig.stored(opened.run(RUN).config)
    strategy = StrategyConfig(name="whalefl")
    choosing = config.model_copy(update={"strategy": strategy}).model_dump_json()
    change(opened, schema.runs, schema.runs.c.id == RUN, config=choosing)
    change(
        opened,
        schema.tasks,
        schema.tasks.c.run == RUN,
        tier=taken,
        others=Alternatives(items=(refused,)).model_dump_json(),
        metrics=metrics.model_dump_json(),
    )
    found = said(opened)[title]
    assert found.kind == "bad"
    assert found.remedy == (
        'Set strategy.whalefl.theta = "auto" for the next run; 5 would fit the devices\' measurements'
        " in these rounds."
    )
    change(
        opened,
        schema.tasks,
        schema.tasks.c.id == task.id,
        tier=other,
        others=Alternatives(
            items=(alternative(taken, task.artifact_set, task.weights, taken),)
        ).model_dump_json(),
    )
    assert title not in said(opened)


def test_a_run_that_stands_still_suffers_first(opened):
    """Not within the deadline of 60 s, the waiting time of 60 s and a minute; afterwards before all
    else.
    """
    title = "The run is in progress, but does not advance"
    assert title not in said(opened, now=time.time() + 100)
    assert next(iter(said(opened, now=time.time() + 200))) == title
    change(opened, schema.runs, schema.runs.c.id == RUN, status="paused")
    assert title not in said(opened, now=time.time() + 200)


def test_a_run_without_a_server_is_named_at_once(unserved):
    """Also one that has just moved, until it ends or a server holds the store."""
    title = "The run has not ended, but no server is running it"
    advice = find_advice(unserved)[0]
    assert (advice.kind, advice.title) == ("bad", title)
    assert (
        advice.evidence
        == f"Round 9 is the newest; no process is using the store {unserved.folder}."
    )
    assert "`shoal run`" in advice.remedy
    assert "`shoal simulate`" in advice.remedy
    with held(unserved.folder, "another server works here"):
        assert title not in said(unserved)
    unserved.end_run(RUN, "finished", None)
    assert title not in said(unserved)


def test_the_end_of_a_run_is_named_with_its_reason(opened):
    """A failure suffers; an end that the operator wished is only reported."""
    opened.end_run(RUN, "failed", "1 eligible device after 20 s, 2 needed")
    advice = find_advice(opened)[0]
    assert (advice.kind, advice.title) == ("bad", "The run failed")
    assert advice.evidence == "1 eligible device after 20 s, 2 needed"
    assert "`shoal run` starts a new run" in advice.remedy
    change(opened, schema.runs, schema.runs.c.id == RUN, status="stopped", detail="by Ada")
    stopped = said(opened)["The run was stopped before its last round"]
    assert (stopped.kind, stopped.evidence) == ("info", "by Ada")


def test_rounds_that_are_abandoned_or_missed_are_named(opened):
    """An abandoned one with its reason; missed tasks with those who missed most, from a fifth on,
    of the last five.
    """
    change(
        opened,
        schema.rounds,
        schema.rounds.c.number == 7,
        state="abandoned",
        reason="1 of 2 updates",
    )
    change(opened, schema.tasks, schema.tasks.c.phase == "missed", phase="merged")
    found = said(opened)
    assert found["Rounds are abandoned"].evidence == "Round 7: 1 of 2 updates."
    assert "shoal rounds show 7" in found["Rounds are abandoned"].remedy
    title = "Many devices do not answer in time"
    for number, expected in ((3, False), (4, True)):
        change(opened, schema.tasks, schema.tasks.c.round == number, phase="missed")
        assert (title in said(opened)) is expected, number
    assert said(opened)[title].evidence.startswith("4 of 20 tasks of the last 5 rounds were missed")
    change(opened, schema.rounds, schema.rounds.c.number == 7, state="closed")
    assert "Rounds are abandoned" not in said(opened)


def test_versions_are_judged_by_the_best(opened):
    """Much worse than it, no better for long, or the best of a run that has ended; the remedy names
    the store.
    """
    kept = [view.kept for view in read_versions(opened)]
    assert not any(kept)
    judge(opened, 8, 0.5)
    found = said(opened)["The newest version is much worse than an earlier one"]
    assert found.kind == "bad"
    assert found.evidence == "The newest has 0.5000; version 7 has 0.8250."
    assert found.remedy.startswith("Its weights were deleted")
    for number in range(1, 9):
        judge(opened, number, 0.8 if number == 3 else 0.79)
    assert (
        "There have been 5 evaluations" in said(opened)["The model has stopped improving"].evidence
    )
    for number in range(1, 9):
        judge(opened, number, 0.8 - 0.01 * (8 - number))
    assert not [title for title in said(opened) if "ersion" in title]
    change(opened, schema.runs, schema.runs.c.id == RUN, status="finished", ended_at=time.time())
    digest = next(view.version.digest for view in read_versions(opened) if view.version.number == 8)
    place = opened.folder / "blobs" / "objects" / digest[:2] / digest
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"")
    found = said(opened)
    assert AWAY not in found
    assert (
        f"shoal export-weights --store {opened.folder} --run {RUN} --version 8"
        in found["Use version 8"].remedy
    )


def test_a_store_without_a_run_has_nothing_to_say(tmp_path):
    with closing(Store(tmp_path)) as empty:
        assert find_advice(empty) == []


def test_data_that_looks_wrong_is_named_with_its_board(opened):
    """Each board with all its sentences; of many boards the number."""
    title = "The data of {} of 6 devices may be faulty"
    assert not [name for name in said(opened) if "may be faulty" in name]
    for number in range(1, 5):
        sentences = (
            ("values range from 0 to 255", "column 3 is 7")
            if number == 1
            else ("samples have shape [3]",)
        )
        name = f"pi-000{number}"
        opened.record_device(
            DeviceProfile(fleet="lab", device=name, profile=profile(findings=sentences))
        )
        opened.flush()
        found = said(opened)[title.format(number)]
        assert found.kind == "bad"
        assert found.evidence.startswith("pi-0001: values range from 0 to 255; column 3 is 7.")
        assert (f"{name}: " in found.evidence) is (number < 4)
    assert found.evidence.endswith("1 more, see `shoal devices`.")
    assert "[evaluation.data]" in found.remedy
