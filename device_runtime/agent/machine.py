"""The device's state machine: one table with every transition.

States post events and never choose their successor; ``TRANSITIONS`` lists everything that can
happen. ``device_runtime.agent.states.table`` maps each state to its class, and
``device_runtime.agent.loop`` drives them.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class State(str, Enum):
    """The state of the agent; its value is the one that the device's status names."""

    STARTING = "starting"  # reads the state folder, the task record and the data set
    PROBING = "probing"  # measures the board and connects to the broker
    IDLE = "idle"  # waits for an offer
    FETCHING = "fetching"  # receives blobs
    # a worker thread times steps of the narrowest sub-model, and the board chooses its own
    SIZING = "sizing"
    TRAINING = "training"  # a worker thread trains, then evaluates on the held-out samples
    MEASURING = "measuring"  # a worker thread makes the pass of a statistics task
    UPLOADING = (
        "uploading"  # the update is on disk; its chunks are sent until the server acknowledges it
    )
    REFUSING = "refusing"  # tells the server the reason, then forgets the task
    DROPPING = "dropping"  # forgets the task without a message
    STOPPED = "stopped"  # the farewell has been sent


class Event(str, Enum):
    """An event that a state, or the loop for it, has seen."""

    LOADED = "loaded"
    READY = "ready"
    RESUME_FETCH = "resume-fetch"
    RESUME_UPLOAD = "resume-upload"
    RESUME_EXPIRED = "resume-expired"
    RESUME_POISONED = "resume-poisoned"
    OFFERED = "offered"
    UNSUITABLE = "unsuitable"
    FETCHED_PROBE = "fetched-probe"
    SIZED = "sized"
    FETCHED_TRAIN = "fetched-train"
    FETCHED_STATISTICS = "fetched-statistics"
    COMPUTED = "computed"
    ACKNOWLEDGED = "acknowledged"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    FAILED = "failed"
    CLEARED = "cleared"
    STOP = "stop"


class MachineError(RuntimeError):
    """The table has no transition for this event in this state.

    That is a bug in the agent, never the fault of its input.
    """


_S = State
_E = Event
WORKING = (_S.FETCHING, _S.SIZING, _S.TRAINING, _S.MEASURING, _S.UPLOADING)
"""The states with a task: in each, the server, a deadline, a failure or a signal may end it."""

# fmt: off
_ROWS: tuple[tuple[State, Event, State], ...] = (
    # from          event                  to
    (_S.STARTING,   _E.LOADED,             _S.PROBING),
    # Starting has no transition to a failure state: without a state folder or data the agent cannot
    # run. The process ends with the error's exit code, and the service manager decides.

    (_S.PROBING,    _E.READY,              _S.IDLE),
    (_S.PROBING,    _E.RESUME_FETCH,       _S.FETCHING),
    (_S.PROBING,    _E.RESUME_UPLOAD,      _S.UPLOADING),
    (_S.PROBING,    _E.RESUME_EXPIRED,     _S.DROPPING),
    (_S.PROBING,    _E.RESUME_POISONED,    _S.REFUSING),
    # No transition resumes into training: fetching finds every blob on disk, verifies it and
    # continues immediately. So the agent downloads a blob again if the crash damaged it, instead of
    # training on it.

    (_S.IDLE,       _E.OFFERED,            _S.FETCHING),
    (_S.IDLE,       _E.UNSUITABLE,         _S.REFUSING),
    # Cancel, acknowledgement and deadline cannot reach idle: the loop drops messages about other
    # tasks.

    (_S.FETCHING,   _E.FETCHED_PROBE,      _S.SIZING),
    (_S.SIZING,     _E.SIZED,              _S.FETCHING),
    (_S.FETCHING,   _E.FETCHED_TRAIN,      _S.TRAINING),
    (_S.FETCHING,   _E.FETCHED_STATISTICS, _S.MEASURING),
    (_S.TRAINING,   _E.COMPUTED,           _S.UPLOADING),
    (_S.MEASURING,  _E.COMPUTED,           _S.UPLOADING),
    (_S.UPLOADING,  _E.ACKNOWLEDGED,       _S.DROPPING),
    (_S.UPLOADING,  _E.REJECTED,           _S.DROPPING),
    # Training and measuring cannot be acknowledged or rejected: the server answers an upload, and
    # none has been sent yet.

    (_S.REFUSING,   _E.CLEARED,            _S.IDLE),
    (_S.DROPPING,   _E.CLEARED,            _S.IDLE),
    # Neither can fail: a file that cannot be deleted is logged, and the next start deletes it.

    *((state, _E.FAILED, _S.REFUSING) for state in WORKING),
    *((state, _E.CANCELLED, _S.DROPPING) for state in WORKING),
    *((state, _E.SUPERSEDED, _S.DROPPING) for state in WORKING),
    *((state, _E.EXPIRED, _S.DROPPING) for state in WORKING),
    *((state, _E.STOP, _S.STOPPED) for state in (_S.IDLE, *WORKING)),
    # The other states end by themselves before the loop looks at its inbox again, so a signal waits
    # there.
)
# fmt: on

TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {(source, event): target for source, event, target in _ROWS}
)


def successor(state: State, event: Event) -> State:
    """Return the state after an event.

    Raises:
        MachineError: the table has no such row; the message names the state and the event.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        events = [expected.value for source, expected in TRANSITIONS if source is state]
        raise MachineError(
            f"the device in state {state.value!r} received event {event.value!r}, for which "
            f"the transition table has no row (it has {', '.join(events) or 'none'}); this "
            "is a bug"
        ) from None
