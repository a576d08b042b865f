"""What boards say of their data stands in the log of a run once per board and change."""

from contextlib import closing

import numpy as np
import pytest
from pydantic import ValidationError

from broker_server.rounds.advice import find_advice
from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.service.data_findings import EVENT, DataFindings, note_test_set, note_undescribed
from broker_server.store import Store
from fleet_protocol.data import make_dataset
from fleet_protocol.data.contract import complete_contract
from fleet_protocol.data.terms import DataContract
from fleet_protocol.messages import DeviceProfile
from tests.broker_server.peer import profile
from tests.shoal.view.stores import made


@pytest.fixture
def noted(tmp_path):
    """Lets a board say something, and returns what a run's log has of it."""
    with closing(Store(tmp_path)) as store:
        fleet = Fleet()
        findings = DataFindings(fleet, Reporter("run", store))

        def say(device, *sentences):
            fleet.receive(
                DeviceProfile(
                    fleet="lab", device=device, profile=profile(findings=sentences or None)
                )
            )
            findings.log(device, 2)
            return [
                (line.device, line.round, line.detail)
                for line in store.events()
                if line.kind == EVENT
            ]

        yield say


def test_each_board_and_change_is_one_line(noted):
    """What was noted is not noted again; what is new is; and that nothing looks wrong any more."""
    assert noted("attic") == []
    first = ("barn", 2, "values range from 0 to 255")
    assert noted("barn", "values range from 0 to 255") == [first]
    assert noted("barn", "values range from 0 to 255") == [first]
    second = ("barn", 2, "column 3 is 7")
    assert noted("barn", "values range from 0 to 255", "column 3 is 7") == [first, second]
    third = ("attic", 2, "values range from 0 to 255")
    assert noted("attic", "values range from 0 to 255") == [first, second, third]
    last = ("barn", 2, "resolved: its data no longer has any findings")
    assert noted("barn") == [first, second, third, last]


def test_a_board_that_says_something_else_each_time_fills_no_log(noted):
    """Twenty changes of one board are noted; others are heard all the same."""
    for number in range(50):
        lines = noted("barn", f"sentence {number}")
    assert len(lines) == 20
    assert noted("attic", "a constant column")[-1][0] == "attic"


def test_what_a_board_may_say_is_bounded():
    """Eight sentences of a thousand characters, which move no cursor; without any a profile has the
    bytes as before.
    """
    assert profile(findings=("x" * 1000,) * 8).findings
    assert profile(findings=("red \x1b[31m text",)).findings == ("red  [31m text",)
    for findings in (("x",) * 9, ("x" * 1001,), ("",), ()):
        with pytest.raises(ValidationError):
            profile(findings=findings)
    assert b"findings" not in profile().to_bytes()


UNSCALED = "the contract does not define the scale of values"


@pytest.mark.parametrize(
    ("contracts", "words"),
    [
        ({}, "no contract defines a sample"),
        ({"b1": DataContract(labels=("ant", "bee"))}, UNSCALED),
        ({"b1": DataContract(range=(0, 1)), "b2": DataContract(labels=("ant",))}, UNSCALED),
        ({"b1": DataContract(labels=("ant", "bee"), range=(0, 1))}, None),
        ({"b1": complete_contract(make_dataset("server", np.zeros((3, 2)), np.arange(3)))}, None),
    ],
)
def test_a_run_says_what_its_contract_leaves_open(tmp_path, contracts, words):
    """Names alone leave the scale of boards unchecked, and nobody would know."""
    with closing(Store(tmp_path)) as store:
        note_undescribed(contracts, Reporter("run", store))
        lines = [line.detail for line in store.events() if line.kind == "no-contract"]
    assert [line.split(",")[0] for line in lines] == ([] if words is None else [words])
    assert all("[evaluation.data] of fleet.toml" in line for line in lines)


def test_what_looks_wrong_in_the_test_set_is_logged_and_advised(tmp_path):
    """Once, although a run that is continued says it again."""
    finding = "test.npz: column 2 is -999 in 10 of 60 examined samples"
    with closing(Store(made(tmp_path, rounds=1))) as store:
        run = store.runs()[-1].id
        for _ in range(2):
            note_test_set([finding], Reporter(run, store))
        (advice,) = [
            entry for entry in find_advice(store) if entry.title.startswith("The server's own")
        ]
    assert advice.evidence == f"{finding}."
    assert "[evaluation.data]" in advice.remedy
