"""The pictures of the documents are those that their script draws, and pages show them."""

import re

import pytest

from broker_server.store.machine import TRANSITIONS as ROUND_TRANSITIONS
from device_runtime.agent.machine import TRANSITIONS as DEVICE_TRANSITIONS
from tests.documents.pictures import (
    DEVICE_PLACES,
    EXITS,
    FOLDER,
    PICTURES,
    ROUND_PLACES,
    device_states,
    round_states,
)
from tests.documents.typed import pages


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_one_that_is_drawn(name):
    """`make docs` draws it."""
    assert (FOLDER / f"{name}.svg").read_text() == PICTURES[name]()


def test_every_picture_is_drawn_and_shown():
    """A file that no function draws, or that no page shows, is removed."""
    assert {path.stem for path in FOLDER.iterdir()} == PICTURES.keys()
    text = "".join(path.read_text() for path in pages())
    assert set(re.findall(r"pictures/([\w-]+)\.svg", text)) == PICTURES.keys()


@pytest.mark.parametrize(
    ("transitions", "places", "drawn", "hidden"),
    [
        (ROUND_TRANSITIONS, ROUND_PLACES, round_states, set()),
        (DEVICE_TRANSITIONS, DEVICE_PLACES, device_states, EXITS),
    ],
    ids=["round", "device"],
)
def test_a_picture_of_states_has_every_state_and_event(transitions, places, drawn, hidden):
    """The agent's picture leaves out events that end a task early."""
    picture = drawn()
    states = {state.value for state, _ in transitions}
    states |= {after.value for after in transitions.values()}
    assert places.keys() == states - {"stopped"}
    events = {event.value for _, event in transitions}
    shown = {event for event in events if f">{event}</text>" in picture}
    assert events - shown == hidden & events
