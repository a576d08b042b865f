"""Rounds of a simulation do not wait for devices that drop out, and go by the emulated clock."""

import contextlib
import itertools

import pytest

from broker_server.rounds.stopping import StopRequested
from broker_server.store import Store, TaskPhase
from broker_server.store.machine import RoundEvent
from simulation.runner import simulate
from simulation.virtual_dispatcher import VirtualDispatcher
from tests.simulation.simulations import settings, tensors


def rounds_of(result):
    """Each round with its training tasks."""
    with contextlib.closing(Store(result.folder / "store", read_only=True)) as store:
        return [
            (item, store.tasks(result.run, item.number, "train"))
            for item in store.rounds(result.run)
        ]


def sent(result):
    """Bytes both ways, weights that several devices of a round share once."""
    with contextlib.closing(Store(result.folder / "store", read_only=True)) as store:
        asked = [store.tasks(result.run, item.number) for item in store.rounds(result.run)]
    weights = [{task.weights.digest: task.weights.size for task in tasks} for tasks in asked]
    return sum(sum(item.values()) for item in weights) + sum(
        task.update_size or 0 for tasks in asked for task in tasks
    )


@pytest.mark.slow
def test_nobody_waits_for_devices_that_dropped_out(tmp_path, cache):
    """It ends a quarter of the slowest's time after the last one left; the same seed drops the same
    devices.
    """
    unsteady = {"count": 6, "types": [{"dropout": 0.3}]}
    found = [
        simulate(
            settings(
                tmp_path / str(workers),
                cache,
                devices=unsteady,
                engine={"workers": workers},
                round={"fraction": 1.0},
            )
        )
        for workers in (1, 2)
    ]
    missed = 0
    for record, tasks in rounds_of(found[0]):
        answered = [task.timing.answered for task in tasks if task.phase is TaskPhase.MERGED]
        gone = [task for task in tasks if task.phase is TaskPhase.MISSED]
        missed += len(gone)
        assert record.ending is (RoundEvent.REST_AWAY if gone else RoundEvent.ANSWERED)
        left = [task.timing.left for task in gone]
        # A device that leaves later than the others answer was there until then, and waited for.
        assert record.collect_seconds >= max(answered)
        latest = max([*answered, *(at + 0.25 * max(answered) for at in left)])
        assert record.collect_seconds <= latest + 1e-9
    assert missed
    assert [row.simulated_seconds for row in found[0].rounds] == [
        r.collect_seconds for r, _ in rounds_of(found[0])
    ]
    one, two = (tensors(result.folder, result.run) for result in found)
    assert all((a[name] == b[name]).all() for a, b in zip(one, two, strict=True) for name in a)


@pytest.mark.slow
def test_a_round_that_is_gone_on_with_takes_as_long(tmp_path, cache, monkeypatch):
    """Who left before answers that are stored left then, and not when the simulation was started
    again.
    """
    found = []
    for name in ("whole", "parts"):
        # After the last answer of the first round, when others have left before it.
        stop = (
            sum(task.phase is TaskPhase.MERGED for task in rounds_of(found[0])[0][1])
            if found
            else 0
        )
        finished = VirtualDispatcher._receive_update
        count = itertools.count(1)

        def stopping(self, task, result, *, finished=finished, count=count, stop=stop):
            finished(self, task, result)
            if next(count) == stop:
                raise StopRequested

        with monkeypatch.context() as patch:
            patch.setattr(VirtualDispatcher, "_receive_update", stopping)
            devices = {"count": 6, "types": [{"dropout": 0.4}]}
            steps = {"rounds": 2, "fraction": 1.0}
            given = settings(tmp_path / name, cache, devices=devices, round=steps)
            found.append(simulate(given))
            while found[-1].finished.status == "stopped" and len(found) < 4:
                found.append(simulate(given))
    whole, stopped, resumed = found
    assert stopped.finished.status == "stopped"
    assert rounds_of(whole)[0][0].ending is RoundEvent.REST_AWAY
    assert [row.simulated_seconds for row in resumed.rounds] == [
        row.simulated_seconds for row in whole.rounds
    ]


@pytest.mark.slow
def test_what_an_abandoned_round_took_and_sent_is_counted(tmp_path, cache):
    """Who waits for a model waits for the rounds that came to nothing, and pays for what they
    sent.
    """
    unsteady = {"count": 6, "types": [{"dropout": 0.3}]}
    rule = {"rounds": 8, "fraction": 1.0, "quorum": 0.6}
    result = simulate(settings(tmp_path / "out", cache, devices=unsteady, round=rule))
    records = [record for record, _ in rounds_of(result)]
    assert len(records) > len(result.rounds) == 8
    for record, tasks in rounds_of(result):
        came = [task.timing.answered or task.timing.left for task in tasks]
        # Without a deadline it is over with the last that answers or leaves, and a share of grace.
        assert 0 < max(came) <= record.collect_seconds <= 1.25 * max(came)
    assert result.rounds[-1].simulated_total == pytest.approx(
        sum(record.collect_seconds for record in records)
    )
    assert sum(row.payload_bytes for row in result.rounds) == sent(result)


@pytest.mark.slow
def test_the_fastest_make_the_round_where_more_are_asked(tmp_path, cache):
    """With half more asked than wanted it ends with the last that is wanted, by the clock and not
    by the workers.
    """
    kinds = [{"type": "RaspberryPi4", "count": 1}, {"type": "MacBookPro2018", "count": 5}]
    result = simulate(
        settings(
            tmp_path / "out",
            cache,
            devices={"count": 6, "types": kinds},
            round={"rounds": 3, "fraction": 0.5, "over_selection": 1.0},
            tiers={"assign": "capacity", "levels": None},
        )
    )
    for record, tasks in rounds_of(result):
        assert (len(tasks), record.wanted, record.ending) == (6, 3, RoundEvent.ENOUGH)
        merged = [task.timing.answered for task in tasks if task.phase is TaskPhase.MERGED]
        assert record.collect_seconds == max(merged)
        assert tasks[0].phase is TaskPhase.MISSED  # the slow board


@pytest.mark.slow
def test_a_deadline_is_one_of_emulated_time(tmp_path, cache):
    """What would take longer on the emulated board is missed, however fast this machine is."""
    kinds = [{"type": "RaspberryPi4", "count": 1}, {"type": "MacBookPro2018", "count": 5}]
    free = {"count": 6, "types": kinds}
    plain = {"assign": "capacity", "levels": None}
    whole = simulate(
        settings(
            tmp_path / "whole", cache, devices=free, tiers=plain, round={"rounds": 1, "fraction": 1}
        )
    )
    ((record, tasks),) = rounds_of(whole)
    assert record.collect_seconds == tasks[0].timing.answered  # the slow board decides
    keys = {"rounds": 1, "fraction": 1, "deadline_seconds": record.collect_seconds / 2}
    cut = simulate(settings(tmp_path / "cut", cache, devices=free, tiers=plain, round=keys))
    ((record, tasks),) = rounds_of(cut)
    assert (record.ending, record.collect_seconds) == (
        RoundEvent.DEADLINE,
        keys["deadline_seconds"],
    )
    assert [task.phase for task in tasks] == [TaskPhase.MISSED, *[TaskPhase.MERGED] * 5]
