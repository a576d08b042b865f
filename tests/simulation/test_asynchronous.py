"""Simulated rounds that do not wait: by the emulated clock, the same whoever computes, and the same
after a kill.
"""

import contextlib
import signal
import subprocess
import sys

import pytest

from broker_server.store import Store, TaskPhase
from simulation.runner import simulate
from simulation.virtual_fleet import VirtualBoard
from tests.simulation.simulations import as_a_fleet, settings, tensors
from tests.simulation.test_drop_outs import sent
from tests.simulation.test_runner import KILLED, same

pytestmark = pytest.mark.slow
TABLES = {
    "devices": {
        "count": 6,
        "types": [
            {"type": "RaspberryPi4", "link": "wifi", "count": 1},
            {"type": "MacBookPro2018", "link": "wifi"},
        ],
    },
    "round": {"rounds": 14, "fraction": 1.0, "buffer": 3},
    "tiers": {"assign": "capacity", "levels": None},
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory, cache):
    return simulate(settings(tmp_path_factory.mktemp("straight"), cache, **TABLES))


def stored(result):
    with contextlib.closing(Store(result.folder / "store", read_only=True)) as store:
        rounds = store.rounds(result.run)
        return rounds, [
            task for item in rounds for task in store.tasks(result.run, item.number, "train")
        ]


def test_a_slow_device_answers_after_its_own_time(straight):
    """However many versions were made meanwhile: the rounds in which it was at work add up to what
    it takes.
    """
    rounds, tasks = stored(straight)
    took = {item.number: item.collect_seconds for item in rounds}
    merged = [task for task in tasks if task.phase is TaskPhase.MERGED]
    late = [task for task in merged if task.screening.round > task.round]
    slow = [task for task in late if task.device == tasks[0].device]
    assert slow
    assert len(slow) < len(late) < len(merged)
    alone = {}  # a device takes the same time whenever it is asked
    for task in merged:
        whole = (
            sum(took[number] for number in range(task.round, task.screening.round))
            + task.timing.answered
        )
        assert alone.setdefault(task.device, whole) == pytest.approx(whole)
    assert alone[tasks[0].device] > 4 * max(
        seconds for name, seconds in alone.items() if name != tasks[0].device
    )
    assert [row.devices for row in straight.rounds] == [
        sum(task.screening.round == item.number for task in merged) for item in rounds
    ]
    assert all(row.devices >= 3 for row in straight.rounds)
    assert straight.rounds[-1].accuracy > straight.rounds[0].accuracy


def test_a_fixed_level_stays_a_devices_own(tmp_path, cache):
    """Specification 1.1, whoever else is at work for an earlier round when levels are dealt."""
    tables = {**TABLES, "tiers": {"assign": "fix", "levels": "a1-b1-c1"}}
    _, tasks = stored(simulate(settings(tmp_path, cache, **tables)))
    tiers = {(task.device, task.tier) for task in tasks}
    assert len(tiers) == len({task.device for task in tasks}) == 6
    assert {tier for _, tier in tiers} == {"w1.00-d1", "w0.50-d1", "w0.25-d1"}


def test_what_is_sent_is_counted_once(straight):
    """Weights in the round that sent them, an update in that whose version it is in."""
    answered = sum(task.phase is TaskPhase.MERGED for task in stored(straight)[1])
    assert sum(row.devices for row in straight.rounds) == answered
    assert sum(row.payload_bytes for row in straight.rounds) == sent(straight)


def test_workers_change_nothing(straight, cache, tmp_path):
    """One that computes alone takes the updates in the same order of emulated time."""
    other = simulate(settings(tmp_path / "out", cache, engine={"workers": 1}, **TABLES))
    same(tensors(other.folder, other.run), tensors(straight.folder, straight.run))


@pytest.mark.parametrize(
    ("kind", "number", "count"),
    [
        ("round-started", 3, 1),
        ("update-received", 4, 1),
        ("round-closed", 5, 1),
        ("update-received", 6, 2),
    ],
)
def test_a_killed_simulation_goes_on_to_the_same_bits(
    kind, number, count, straight, cache, tmp_path
):
    """What devices at work would have answered is computed again, and comes when it would have
    come.
    """
    config = settings(tmp_path / "out", cache, **TABLES)
    script = [sys.executable, "-c", KILLED, config.model_dump_json(), kind, str(number), str(count)]
    killed = subprocess.run(script, timeout=300, check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    result = simulate(config)
    same(tensors(result.folder, result.run), tensors(straight.folder, straight.run))
    assert [row.simulated_total for row in result.rounds] == [
        row.simulated_total for row in straight.rounds
    ]


def test_devices_that_drop_out_come_back_to_their_task(cache, tmp_path):
    """They are not asked anew, nothing of what they did is dropped before the run ends, and no time
    away is work.
    """
    tables = {**TABLES, "devices": {"count": 6, "types": [{"dropout": 0.4}]}}
    config = settings(tmp_path / "out", cache, **tables)
    result = simulate(config)
    assert result.finished.status == "finished"
    rounds, tasks = stored(result)
    took = {item.number: item.collect_seconds for item in rounds}
    alone = {}
    left = []
    for task in (task for task in tasks if task.phase is TaskPhase.MERGED):
        share = VirtualBoard(task.device, 0, 0, 1.0, None, 0.4).leaving_share(
            config.seed, task.round
        )
        later = (
            sum(took[number] for number in range(task.round + 1, task.screening.round))
            + task.timing.answered
        )
        if share is None:
            first = took[task.round] if task.screening.round > task.round else 0.0
            assert alone.setdefault(task.device, first + later) == pytest.approx(first + later)
        else:
            left.append((task.device, share, took[task.round], later))
    for device, share, first, later in left:
        assert min(first, share * alone[device]) + later == pytest.approx(alone[device])
    assert any(share * alone[device] < 0.9 * first for device, share, first, _ in left)
    over = [task for task in tasks if task.phase is TaskPhase.MISSED]
    assert len({task.device for task in over}) == len(over)
    assert any(task.screening.weight < 1 for task in tasks if task.phase is TaskPhase.MERGED)


def test_agents_go_on_beyond_a_round_and_all_count(cache, tmp_path):
    """With a server, a broker and a process for each device: what comes while a version is judged
    is not lost.
    """
    plain = {"assign": "capacity", "levels": None}
    config = settings(
        tmp_path / "out",
        cache,
        round={"rounds": 12, "fraction": 1.0, "buffer": 2},
        tiers=plain,
        evaluation={"every": 1},
    )
    finished = as_a_fleet(config, tmp_path)
    assert (finished.status, finished.rounds) == ("finished", 12)
    with contextlib.closing(Store(tmp_path / "fleet" / "store", read_only=True)) as store:
        tasks = [
            task
            for item in store.rounds(finished.run)
            for task in store.tasks(finished.run, item.number, "train")
        ]
    merged = [task for task in tasks if task.phase is TaskPhase.MERGED]
    assert {task.device for task in merged} == {f"device-{number}" for number in range(6)}
    assert any(task.screening.weight < 1 for task in merged)
