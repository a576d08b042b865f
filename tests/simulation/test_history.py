"""The history of a simulation: what is written is read back, a kill leaves whole rounds, and going
on continues it.
"""

import math
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from fleet_protocol.errors import DataError
from simulation.results.history import (
    DEVICES,
    METRICS,
    HistoryWriter,
    read_devices,
    read_history,
    write_history,
)
from simulation.results.rounds import DeviceRow, RoundRow, first_reaching


def a_round(number: int, accuracy: float | None = None) -> RoundRow:
    return RoundRow(
        round=number,
        version=number + 1,
        accuracy=accuracy,
        loss=None if accuracy is None else 1 - accuracy,
        train_loss=0.1 * number,
        devices=2,
        tiers={"w1.00-d1": 1, "w0.50-d1": 1},
        simulated_seconds=2.5,
        simulated_total=2.5 * number,
        seconds=0.25,
        payload_bytes=1000 + number,
        local_accuracy=None,
    )


def its_devices(number: int) -> list[DeviceRow]:
    return [
        DeviceRow(
            round=number,
            device=f"d{place}",
            tier=tier,
            examples=10 + place,
            train_loss=0.1 * number,
            local_accuracy=None if place else 0.5,
            simulated_seconds=1.5 + place,
            seconds=0.1,
            payload_bytes=500,
        )
        for place, tier in enumerate(("w1.00-d1", "w0.50-d1"))
    ]


class Clock:
    """Time that passes when told to; writing takes `cost`, two looks at the clock apart."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cost = 0.0

    def __call__(self) -> float:
        self.now += self.cost
        return self.now


def test_rounds_come_back(tmp_path):
    """All fields survive, with what is unknown still unknown and what is not finite as it was."""
    rows = (a_round(1), a_round(3, 0.875), replace(a_round(4, 0.5), loss=math.inf, tiers={}))
    write_history(tmp_path / "run", rows)
    assert read_history(tmp_path / "run") == rows
    assert pq.read_table(tmp_path / "run" / METRICS).column("round").to_pylist() == [1, 3, 4]


def test_devices_come_back_as_one_table(tmp_path, monkeypatch):
    """However many parts were written, the folder reads as one table, here and by others."""
    monkeypatch.setattr("simulation.results.history._PART_ROWS", 5)
    with HistoryWriter(tmp_path) as writer:
        for number in range(1, 9):
            writer.add(a_round(number), its_devices(number))
    expected = [row for number in range(1, 9) for row in its_devices(number)]
    assert list(read_devices(tmp_path)) == expected
    assert len(list((tmp_path / DEVICES).iterdir())) == 3
    assert pq.read_table(tmp_path / DEVICES).column("device").to_pylist() == [
        row.device for row in expected
    ]
    assert read_history(tmp_path) == writer.rows


def test_a_killed_run_leaves_whole_rounds_and_goes_on(tmp_path):
    """Without the last write, what is there is rounds with all of their devices; the next writer
    goes on from it.
    """
    clock = Clock()
    killed = HistoryWriter(tmp_path, clock=clock)
    killed.add(a_round(1), its_devices(1))  # nothing was written yet, so this is
    clock.cost = 0.001
    killed.add(
        a_round(2), its_devices(2)
    )  # the last write took no time: written; this one takes 1 ms
    killed.add(a_round(3), its_devices(3))
    assert [row.round for row in read_history(tmp_path)] == [1, 2]
    with HistoryWriter(tmp_path) as writer:
        assert [row.round for row in writer.rows] == [1, 2]
        writer.add(a_round(3), its_devices(3))
    assert [row.round for row in read_history(tmp_path)] == [1, 2, 3]
    assert list(read_devices(tmp_path)) == [
        row for number in (1, 2, 3) for row in its_devices(number)
    ]


def test_writing_takes_a_small_share_of_the_time(tmp_path):
    """A write that took 10 ms is followed by another one after a second at the earliest."""
    clock = Clock()
    clock.cost = 0.01
    writer = HistoryWriter(tmp_path, clock=clock)
    writer.add(a_round(1))
    writer.add(a_round(2))
    clock.now += 0.9
    writer.add(a_round(3))
    assert [row.round for row in read_history(tmp_path)] == [1]
    clock.now += 0.1
    writer.add(a_round(4))
    assert [row.round for row in read_history(tmp_path)] == [1, 2, 3, 4]


def test_going_on_from_an_earlier_round_drops_the_later_ones(tmp_path, monkeypatch):
    """Rounds after `until` leave both files, also where a part of the devices' rows has some of
    each.
    """
    monkeypatch.setattr("simulation.results.history._PART_ROWS", 6)
    with HistoryWriter(tmp_path) as writer:
        for number in range(1, 9):
            writer.add(a_round(number), its_devices(number))
    with HistoryWriter(tmp_path, until=2) as writer:
        writer.add(a_round(3, 0.25), its_devices(3))
    assert read_history(tmp_path) == (a_round(1), a_round(2), a_round(3, 0.25))
    assert list(read_devices(tmp_path)) == [
        row for number in (1, 2, 3) for row in its_devices(number)
    ]


def test_rows_of_devices_without_their_round_are_dropped(tmp_path):
    """A kill between the two files leaves devices ahead of the rounds; they are written anew with
    their round.
    """
    with HistoryWriter(tmp_path) as writer:
        writer.add(a_round(1), its_devices(1))
        writer.add(a_round(2), its_devices(2))
    write_history(tmp_path, [a_round(1)])
    with HistoryWriter(tmp_path) as writer:
        writer.add(a_round(2), its_devices(2))
    assert list(read_devices(tmp_path)) == its_devices(1) + its_devices(2)


def test_rounds_must_follow_each_other(tmp_path):
    """A round that is there already, or rows of another round, are refused before anything
    changes.
    """
    with HistoryWriter(tmp_path) as writer:
        writer.add(a_round(2))
        with pytest.raises(DataError, match="round 2 cannot follow round 2"):
            writer.add(a_round(2))
        with pytest.raises(DataError, match="of another round"):
            writer.add(a_round(3), its_devices(4))
    assert read_history(tmp_path) == (a_round(2),)


def test_what_cannot_be_read_is_explained(tmp_path):
    """A folder without a history, a damaged file, a file of another form."""
    with pytest.raises(
        DataError, match=r"cannot find metrics\.parquet in .*; give the output folder"
    ):
        read_history(tmp_path)
    (tmp_path / METRICS).write_bytes(b"PAR1 and nothing")
    with pytest.raises(DataError, match=r"cannot read .* remove it"):
        HistoryWriter(tmp_path)
    with HistoryWriter(tmp_path / "other") as writer:
        writer.add(a_round(1), its_devices(1))
    (part,) = (tmp_path / "other" / DEVICES).iterdir()
    (tmp_path / METRICS).write_bytes(part.read_bytes())
    with pytest.raises(DataError, match="another version of Shoal"):
        read_history(tmp_path)


def test_time_to_accuracy():
    """The first round that reaches it counts, later drops do not; rounds without an evaluation
    cannot reach it.
    """
    rows = [a_round(1, 0.2), a_round(2), a_round(3, 0.9), a_round(4, 0.7), a_round(5, 0.95)]
    reached = {target: first_reaching(rows, target) for target in (0.9, 0.1, 0.96)}
    assert (reached[0.9].round, reached[0.9].simulated_total) == (3, 7.5)
    assert (reached[0.1].round, reached[0.1].simulated_total) == (1, 2.5)
    assert reached[0.96] is None
    assert first_reaching([], 0.0) is None
