"""The table of the round, and the decision when a collection is over."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_server.collecting import Verdict, decide, quorum_of
from broker_server.machine import FINAL, TRANSITIONS, RoundEvent, RoundState, RoundTransitionError, advance
from broker_server.store import TaskPhase

HAPPY = [RoundEvent.ANNOUNCE, RoundEvent.ANNOUNCED, RoundEvent.ENOUGH, RoundEvent.MERGED]


def test_the_happy_path():
    """planned, open, collecting, merging, closed."""
    state = RoundState.PLANNED
    seen = [state]
    for event in HAPPY:
        state = advance(state, event)
        seen.append(state)
    assert [item.value for item in seen] == ["planned", "open", "collecting", "merging", "closed"]


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RoundState, RoundEvent)))
def test_what_the_table_does_not_have_is_an_error_that_names_both(state, event):
    """Every pair is either a row of the table or refused with the names of state and event."""
    if (state, event) in TRANSITIONS:
        assert advance(state, event) is TRANSITIONS[state, event]
        assert state not in FINAL
    else:
        with pytest.raises(RoundTransitionError, match=f"{state.value} cannot {event.value}"):
            advance(state, event)


def test_every_state_but_the_final_ones_can_be_given_up():
    """Whatever goes wrong, a round has a way to say so."""
    for state in set(RoundState) - FINAL:
        assert advance(state, RoundEvent.GIVE_UP) is RoundState.ABANDONED


O, R, D, X, M = (
    TaskPhase.OFFERED,
    TaskPhase.RECEIVED,
    TaskPhase.DECLINED,
    TaskPhase.REFUSED,
    TaskPhase.MISSED,
)


@pytest.mark.parametrize(
    ("phases", "quorum", "now", "verdict"),
    [
        ([O, O], 1, 0, Verdict.WAIT),
        ([R, O], 1, 0, Verdict.WAIT),  # enough, but the other may still come
        ([R, R], 1, 0, Verdict.ENOUGH),  # all answered: no need to wait
        ([R, D], 1, 0, Verdict.ENOUGH),
        ([R, O], 1, 10, Verdict.ENOUGH),  # deadline with quorum
        ([O, O], 1, 10, Verdict.SHORT),  # deadline without
        ([D, X], 1, 0, Verdict.SHORT),  # all answered, none useful
        ([R, X, O], 3, 0, Verdict.SHORT),  # out of reach before the deadline
        ([R, R, O], 2, 9.99, Verdict.WAIT),
    ],
)
def test_when_a_collection_is_over(phases, quorum, now, verdict):
    """All answered closes it, the deadline closes it with a quorum, otherwise it falls short."""
    assert decide(phases, quorum=quorum, now=now, deadline=10).verdict is verdict


def test_a_short_collection_says_how_it_fell_short():
    """The reason counts who was silent, who declined and whose update was refused."""
    reason = decide([R, O, D, X, X], quorum=4, now=11, deadline=10).reason
    assert reason == "1 of 5 updates at the deadline, 4 needed (1 silent, 1 declined, 2 refused)"


@given(st.lists(st.sampled_from([O, R, D, X]), min_size=1, max_size=8), st.integers(1, 8))
def test_a_collection_always_ends_at_its_deadline(phases, quorum):
    """From the deadline on the verdict is final, and it is ENOUGH exactly with a quorum of updates."""
    found = decide(phases, quorum=quorum, now=10, deadline=10).verdict
    assert found is (Verdict.ENOUGH if phases.count(R) >= quorum else Verdict.SHORT)


def test_quorums_are_rounded_up_and_never_zero():
    """Half of five is three; a tenth of one is one; 0.3 of ten is three whatever the float says."""
    assert [quorum_of(*case) for case in ((0.5, 5), (0.1, 1), (0.3, 10), (1.0, 7))] == [3, 1, 3, 7]
