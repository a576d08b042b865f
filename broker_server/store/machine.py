"""The states of a round: one table of states and events, without side effects.

    planned     devices, tiers and weights are chosen and stored; no device knows of it yet
    open        offers are going out
    collecting  devices train and upload; updates are on disk before they are acknowledged
    merging     the server accepts no more updates; it makes and stores the new global version,
                and devices give its statistics
    closed      the round has a new global version, which may be judged until the next round ends
    abandoned   the round has no version, and records the reason

Every change is committed to the store before any device receives it. A killed server therefore
finds its round in the state whose work it must do again: announcing, collecting and merging can all
be repeated.
"""

from enum import Enum
from types import MappingProxyType


class RoundState(str, Enum):
    """The state of a round."""

    PLANNED = "planned"
    OPEN = "open"
    COLLECTING = "collecting"
    MERGING = "merging"
    CLOSED = "closed"
    ABANDONED = "abandoned"


class RoundEvent(str, Enum):
    """An event of a round."""

    ANNOUNCE = "announce"
    ANNOUNCED = "announced"
    ANSWERED = "answered"  # every selected device has answered
    ENOUGH = "enough"  # the wanted number of selected devices has answered
    # a quorum has answered, and all others have been offline for the grace period
    REST_AWAY = "rest-away"
    DEADLINE = "deadline"  # a quorum has answered, and the time is over
    MERGED = "merged"
    GIVE_UP = "give-up"


class RoundTransitionError(Exception):
    """An event does not fit the state of its round: a bug in the server."""


TRANSITIONS: MappingProxyType[tuple[RoundState, RoundEvent], RoundState] = MappingProxyType(
    {
        (RoundState.PLANNED, RoundEvent.ANNOUNCE): RoundState.OPEN,
        (RoundState.PLANNED, RoundEvent.GIVE_UP): RoundState.ABANDONED,
        (RoundState.OPEN, RoundEvent.ANNOUNCED): RoundState.COLLECTING,
        (RoundState.OPEN, RoundEvent.GIVE_UP): RoundState.ABANDONED,
        (RoundState.COLLECTING, RoundEvent.ANSWERED): RoundState.MERGING,
        (RoundState.COLLECTING, RoundEvent.ENOUGH): RoundState.MERGING,
        (RoundState.COLLECTING, RoundEvent.REST_AWAY): RoundState.MERGING,
        (RoundState.COLLECTING, RoundEvent.DEADLINE): RoundState.MERGING,
        (RoundState.COLLECTING, RoundEvent.GIVE_UP): RoundState.ABANDONED,
        (RoundState.MERGING, RoundEvent.MERGED): RoundState.CLOSED,
        # The server gives up here if the screens refuse every update, if the merged weights are not
        # finite, or if an update on disk is damaged.
        (RoundState.MERGING, RoundEvent.GIVE_UP): RoundState.ABANDONED,
        # CLOSED and ABANDONED have no rows: a late update is refused without touching its round.
    }
)

FINAL = frozenset({RoundState.CLOSED, RoundState.ABANDONED})


def advance(state: RoundState, event: RoundEvent) -> RoundState:
    """Return the state that follows an event.

    Raises:
        RoundTransitionError: the table has no row for this state and event.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RoundTransitionError(f"a round that is {state.value} cannot {event.value}") from None
