"""The table of the round, and the decision when a collection is over."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_server.rounds.collection_end import (
    ClosingRule,
    Decision,
    TaskProgress,
    decide,
    quorum_size,
)
from broker_server.store import TaskPhase
from broker_server.store.machine import (
    FINAL,
    TRANSITIONS,
    RoundEvent,
    RoundState,
    RoundTransitionError,
    advance,
)

HAPPY = [RoundEvent.ANNOUNCE, RoundEvent.ANNOUNCED, RoundEvent.ANSWERED, RoundEvent.MERGED]


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


O = TaskPhase.OFFERED
R = TaskPhase.RECEIVED
D = TaskPhase.DECLINED
X = TaskPhase.REFUSED
M = TaskPhase.MISSED


def rule(**changes):
    return ClosingRule(**{"share": 0.5, "wanted": 10, "opened": 0.0, "deadline": 10.0, **changes})


def found(phases, *, now, **changes):
    return decide(
        [TaskProgress(phase) for phase in phases], rule(wanted=len(phases), **changes), now
    )


@pytest.mark.parametrize(
    ("phases", "share", "now", "event"),
    [
        ([O, O], 0.5, 0, None),
        ([R, O], 0.5, 0, None),  # enough, but the other may still come
        ([R, R], 0.5, 0, RoundEvent.ANSWERED),  # no need to wait
        ([R, D], 0.5, 0, RoundEvent.ANSWERED),
        ([R, O], 0.5, 10, RoundEvent.DEADLINE),  # with a quorum
        ([O, O], 0.5, 10, RoundEvent.GIVE_UP),  # without
        ([D, X], 0.5, 0, RoundEvent.GIVE_UP),  # all answered, none useful
        ([R, D, O], 1.0, 0, RoundEvent.GIVE_UP),  # out of reach before the deadline
        ([R, X, O], 1.0, 0, None),  # what is refused was not asked: two of two may still come
        ([R, X, R], 1.0, 0, RoundEvent.ANSWERED),
        ([*[R] * 6, *[X] * 7], 0.5, 0, RoundEvent.ANSWERED),  # seven bad devices of thirteen
        ([R, *[X] * 12], 1.0, 0, RoundEvent.ANSWERED),
        ([R, R, O], 0.5, 9.99, None),
    ],
)
def test_when_a_collection_is_over(phases, share, now, event):
    """All answered closes it, the deadline closes it with a quorum, otherwise it is given up."""
    assert found(phases, share=share, now=now).event is event


def test_a_short_collection_says_how_it_fell_short():
    """The reason counts who was silent, who declined and whose update was refused."""
    reason = found([R, O, D, X, X], share=1.0, now=11).reason
    assert reason == "1 of 5 updates at the deadline, 3 needed (1 silent, 1 declined, 2 refused)"


@given(st.lists(st.sampled_from([O, R, D, X]), min_size=1, max_size=8), st.floats(0.1, 1))
def test_a_collection_always_ends_at_its_deadline(phases, share):
    """From the deadline on the decision is final, and the round goes on exactly with a quorum of
    updates.
    """
    event = found(phases, share=share, now=10).event
    enough = phases.count(R) >= quorum_size(share, len(phases) - phases.count(X))
    assert event in ({RoundEvent.ANSWERED, RoundEvent.DEADLINE} if enough else {RoundEvent.GIVE_UP})


def test_nobody_waits_for_devices_that_are_gone():
    """With a quorum the others have a quarter of the slowest's time to come back, from when each of
    them left.
    """
    answered = [TaskProgress(R, answered=at) for at in (1.0, 2.0, 4.0)]
    gone = [*answered, TaskProgress(O, left=0.5)]
    assert (
        decide(gone, rule(), 4.0).event is RoundEvent.REST_AWAY
    )  # away for 3.5, one more than granted
    late = [*answered, TaskProgress(O, left=0.5), TaskProgress(O, left=3.8)]
    assert decide(late, rule(wanted=5), 4.0).until == pytest.approx(4.8)
    assert decide(late, rule(wanted=5), 4.8).event is RoundEvent.REST_AWAY
    assert decide([*late, TaskProgress(O)], rule(wanted=6), 9.0) == Decision(until=10.0)
    assert (
        decide(late, rule(wanted=5, share=1.0), 9.0).event is None
    )  # no quorum: they may still come
    assert decide(late, rule(wanted=5, grace=3.0), 6.7).event is None
    assert decide(late, rule(wanted=5, grace=3.0), 6.8).event is RoundEvent.REST_AWAY
    assert decide(late, rule(wanted=5, grace=0.0), 4.0).event is RoundEvent.REST_AWAY
    assert decide(gone, rule(settling=5.0), 5.4).event is None  # the server has just started
    assert decide(gone, rule(settling=5.0), 5.5).event is RoundEvent.REST_AWAY


def test_over_selection_waits_for_as_many_as_are_wanted():
    """The slowest of those asked beyond are not waited for, though they are there."""
    there = [TaskProgress(R, answered=1.0), TaskProgress(R, answered=2.0), TaskProgress(O)]
    assert decide(there, rule(wanted=2), 2.0).event is RoundEvent.ENOUGH
    assert decide(there, rule(wanted=3), 2.0).event is None


def test_quorums_are_rounded_up_and_never_zero():
    """Half of five is three; a tenth of one is one; 0.3 of ten is three whatever the float says."""
    assert [quorum_size(*case) for case in ((0.5, 5), (0.1, 1), (0.3, 10), (1.0, 7))] == [
        3,
        1,
        3,
        7,
    ]
