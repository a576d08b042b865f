"""Follows a requested run at its server, from the request to the end of the run.

While the server is online, a run may take any time. A server that goes offline has a while to come
back; when it is started again, it continues the run.
"""

import contextlib
import queue
import time
from collections.abc import Callable

from pydantic import ValidationError

from broker_server.rounds.reporting import Listener
from broker_server.service.visiting import Inbox, require_taken
from fleet_protocol import control
from fleet_protocol.errors import RefusedError, ShoalError, TransportError
from fleet_protocol.messages import ServerStatus
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Disconnected, Event, Received

# until a run begins: the server reads artifacts and the test set before it reports the start
ACCEPT_SECONDS = 60.0
AWAY_SECONDS = 60.0  # for an offline server to come back
NOTICE_SECONDS = 2.0  # a shorter absence is not reported
LOOK_SECONDS = 1.0  # longest single wait

Notify = Callable[[str], None]
"""Receives a line for the user that is not an event of a run."""


class RunRejectedError(ShoalError):
    """A running server refused a run, or did not finish it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def read_status(event: Event, topics: Topics) -> ServerStatus | None:
    """Return the status of a fleet's server that an event carries, if it does."""
    if isinstance(event, Received) and event.topic == topics.server_status and event.payload:
        with contextlib.suppress(ValidationError):
            return ServerStatus.model_validate_json(event.payload)
    return None


def read_event(event: Event, topics: Topics) -> control.RunEvent | None:
    """Return the event of a run that arrived, if it is one."""
    if isinstance(event, Received) and event.topic == topics.server_events:
        with contextlib.suppress(RefusedError):
            return control.parse_run_event(event.payload)
    return None


class Follower:
    """Follows one requested run.

    Args:
        topics: topics of the fleet.
        request: id of the request.
        listener: receives every event of the run.
        notify: receives a line when the server goes offline, and when it is back.
    """

    def __init__(self, topics: Topics, request: str, listener: Listener, notify: Notify) -> None:
        self._topics = topics
        self._request = request
        self._listener = listener
        self._notify = notify
        self._run: str | None = None  # its id, once it has begun
        # when to stop waiting; None while the server is online
        self._give_up: float | None = time.monotonic() + ACCEPT_SECONDS
        self._notice_at: float | None = None  # when to report that the server is offline
        self._is_noticed = False

    def follow(self, inbox: Inbox) -> control.RunFinished:
        """Return how the run ended.

        Raises:
            TransportError: the run does not begin, or its server stays offline.
            RunRejectedError: the server refused it.
        """
        while True:
            try:
                event = inbox.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                self._require_patience()
                self._mention_absence()
                continue
            finished = self._handle(event)
            if finished is not None:
                return finished

    def _require_patience(self) -> None:
        """Raise a TransportError if the run does not begin, or its server stays offline."""
        if self._give_up is None or time.monotonic() < self._give_up:
            return
        server = f"the server of fleet {self._topics.fleet}"
        if self._run is None:
            raise TransportError(f"{server} did not start the run; check `shoal log`")
        raise TransportError(
            f"{server} has been offline for too long ({AWAY_SECONDS:g} s): start it again "
            f"with `shoal up`, and it continues run {self._run}; `shoal log -f` follows the "
            "run"
        )

    def _handle(self, event: Event) -> control.RunFinished | None:
        """Handle an event; return how the run ended, if it is the last."""
        require_taken(event)
        run_event = read_event(event, self._topics)
        self._note_answer(run_event)
        if self._run is None:
            return None
        if run_event is None:
            self._note_presence(event)
            return None
        if getattr(run_event, "run", None) != self._run:
            return None
        self._note_back()  # a server that reports the run is online
        # Only events of this run: the server may have finished another one before.
        self._listener(run_event)
        return run_event if isinstance(run_event, control.RunFinished) else None

    def _note_answer(self, run_event: control.RunEvent | None) -> None:
        if isinstance(run_event, control.RunRejected) and run_event.request == self._request:
            detail = f"the server refused the run: {run_event.detail}"
            raise RunRejectedError(detail, run_event.exit_code)
        if isinstance(run_event, control.RunStarted) and run_event.request == self._request:
            self._run = run_event.run
            self._give_up = None

    def _note_presence(self, event: Event) -> None:
        """Record whether the server is online, and runs this run."""
        status = read_status(event, self._topics)
        is_there = status is not None and status.online and status.run == self._run
        if isinstance(event, Disconnected) or (status is not None and not is_there):
            self._note_away()
        elif status is not None:
            self._note_back()

    def _note_away(self) -> None:
        if self._give_up is None:
            now = time.monotonic()
            self._give_up = now + AWAY_SECONDS
            self._notice_at = now + NOTICE_SECONDS

    def _mention_absence(self) -> None:
        if self._notice_at is None or time.monotonic() < self._notice_at:
            return
        self._notice_at = None
        self._is_noticed = True
        self._notify(
            f"the server of fleet {self._topics.fleet} does not answer; this command waits "
            f"{AWAY_SECONDS:g} s for it. If it has stopped, start it again with `shoal up`: it "
            f"continues run {self._run}"
        )

    def _note_back(self) -> None:
        self._give_up = None
        self._notice_at = None
        if self._is_noticed:
            self._is_noticed = False
            self._notify(f"the server of fleet {self._topics.fleet} is back")
