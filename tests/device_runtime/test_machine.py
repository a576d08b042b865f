"""The transition table as a whole."""

import pytest

from device_runtime.agent.machine import TRANSITIONS, Event, MachineError, State, successor
from device_runtime.agent.states.table import STATES


def test_every_state_is_reached_and_only_stopped_is_final():
    """No state is an island, and only one has no way out."""
    sources = {source for source, _ in TRANSITIONS}
    assert set(TRANSITIONS.values()) | {State.STARTING} == set(State)
    assert set(State) - sources == {State.STOPPED}
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert set(STATES) == set(State)


def test_an_unknown_pair_is_a_bug_that_names_both():
    """The error says which state met which event, and what the state knows."""
    with pytest.raises(
        MachineError,
        match=r"'idle' received event 'computed'.*it has offered, unsuitable, stop",
    ):
        successor(State.IDLE, Event.COMPUTED)


@pytest.mark.parametrize(
    "state", [State.FETCHING, State.SIZING, State.TRAINING, State.MEASURING, State.UPLOADING]
)
@pytest.mark.parametrize(
    "event", [Event.CANCELLED, Event.SUPERSEDED, Event.EXPIRED, Event.FAILED, Event.STOP]
)
def test_every_working_state_can_be_interrupted(state, event):
    """Whatever the device works on, the server, the clock, a failure or a signal ends it."""
    ends = {Event.FAILED: State.REFUSING, Event.STOP: State.STOPPED}
    assert successor(state, event) is ends.get(event, State.DROPPING)
