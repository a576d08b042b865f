"""The device's state machine: every transition there is, in one table.

States post events and never choose their successor; whoever wants to know what can happen reads
``TRANSITIONS``. ``device_runtime.agent.states.table`` names the class of each state,
``device_runtime.agent.loop`` is the loop that drives them.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class State(str, Enum):
    """Where the agent is; the value is what the device's status says."""

    STARTING = "starting"  # state folder, task record and data set are read
    PROBING = "probing"  # the board is measured and the broker connected
    IDLE = "idle"  # waits for an offer
    FETCHING = "fetching"  # blobs arrive
    # a worker thread times steps of the narrowest sub-model, and the board chooses its own
    SIZING = "sizing"
    TRAINING = "training"  # a worker thread trains, then evaluates on the held-out samples
    MEASURING = "measuring"  # a worker thread makes the pass of a statistics task
    UPLOADING = "uploading"  # the update is on disk; chunks leave until the server acknowledges
    REFUSING = "refusing"  # the server is told why, the task is forgotten
    DROPPING = "dropping"  # the task is forgotten without a word
    STOPPED = "stopped"  # the farewell is sent


class Event(str, Enum):
    """What a state, or the loop on its behalf, has seen."""

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
    """A state met an event that the table does not know.

    That is a bug in the agent, never the fault of its input.
    """


_S = State
_E = Event
WORKING = (_S.FETCHING, _S.SIZING, _S.TRAINING, _S.MEASURING, _S.UPLOADING)
"""The states with a task: in each, the server, the clock, a failure or a signal may end it."""

# fmt: off
_ROWS: tuple[tuple[State, Event, State], ...] = (
    # from          event                  to
    (_S.STARTING,   _E.LOADED,             _S.PROBING),
    # Starting cannot fail into another state: without state folder or data there is no agent; the
    # process ends with the error's exit code and the service manager decides.

    (_S.PROBING,    _E.READY,              _S.IDLE),
    (_S.PROBING,    _E.RESUME_FETCH,       _S.FETCHING),
    (_S.PROBING,    _E.RESUME_UPLOAD,      _S.UPLOADING),
    (_S.PROBING,    _E.RESUME_EXPIRED,     _S.DROPPING),
    (_S.PROBING,    _E.RESUME_POISONED,    _S.REFUSING),
    # No edge resumes into training: fetching finds every blob on disk, checks it, and goes on at
    # once, so that a blob damaged by the crash is fetched again instead of trained on.

    (_S.IDLE,       _E.OFFERED,            _S.FETCHING),
    (_S.IDLE,       _E.UNSUITABLE,         _S.REFUSING),
    # Cancel, acknowledgement and deadline cannot reach idle: the loop drops messages about a task
    # that is not ours.

    (_S.FETCHING,   _E.FETCHED_PROBE,      _S.SIZING),
    (_S.SIZING,     _E.SIZED,              _S.FETCHING),
    (_S.FETCHING,   _E.FETCHED_TRAIN,      _S.TRAINING),
    (_S.FETCHING,   _E.FETCHED_STATISTICS, _S.MEASURING),
    (_S.TRAINING,   _E.COMPUTED,           _S.UPLOADING),
    (_S.MEASURING,  _E.COMPUTED,           _S.UPLOADING),
    (_S.UPLOADING,  _E.ACKNOWLEDGED,       _S.DROPPING),
    (_S.UPLOADING,  _E.REJECTED,           _S.DROPPING),
    # Training and measuring cannot be acknowledged or rejected: the server answers an upload, and
    # none is out yet.

    (_S.REFUSING,   _E.CLEARED,            _S.IDLE),
    (_S.DROPPING,   _E.CLEARED,            _S.IDLE),
    # Neither can fail: forgetting a file that cannot be deleted is logged and the file is reclaimed
    # at the next start.

    *((state, _E.FAILED, _S.REFUSING) for state in WORKING),
    *((state, _E.CANCELLED, _S.DROPPING) for state in WORKING),
    *((state, _E.SUPERSEDED, _S.DROPPING) for state in WORKING),
    *((state, _E.EXPIRED, _S.DROPPING) for state in WORKING),
    *((state, _E.STOP, _S.STOPPED) for state in (_S.IDLE, *WORKING)),
    # The other states end by themselves before the loop looks at its inbox again; a signal waits
    # there.
)
# fmt: on

TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {(source, event): target for source, event, target in _ROWS}
)


def successor(state: State, event: Event) -> State:
    """Return the state after an event.

    Raises:
        MachineError: the table has no such row; the message names state and event.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        events = [known.value for source, known in TRANSITIONS if source is state]
        raise MachineError(
            f"the device in state {state.value!r} met event {event.value!r}, which the transition "
            f"table does not know there (it knows {', '.join(events) or 'nothing'}); this is a bug"
        ) from None
