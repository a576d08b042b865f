"""The agent's loop: one inbox with deadlines, one state machine.

Everything that happens (MQTT messages, reports of the worker thread, signals) is an entry in the
inbox. The loop passes each entry to the current state, applies the events that the state posts to
the transition table, and wakes at deadlines.
"""

import math
import queue
import time
from collections.abc import Iterable
from pathlib import Path
from signal import Signals

from device_runtime.agent.board_predictions import BoardPredictions
from device_runtime.agent.connection import ConnectionLog
from device_runtime.agent.context import AgentServices, Context, TaskOutcome
from device_runtime.agent.machine import WORKING, Event, State, successor
from device_runtime.agent.offers import receive_offer
from device_runtime.agent.rejoining import REFUSED_SECONDS, WatchedFiles, wait_for_change
from device_runtime.agent.releases import RESTART, Releases
from device_runtime.agent.states.base import DeviceState
from device_runtime.agent.states.table import STATES
from device_runtime.agent.stop_request import StopRequested
from device_runtime.agent.systemd import ServiceNotifier
from device_runtime.agent.uplink import Uplink
from device_runtime.agent.worker import WorkDone, WorkFailed, WorkReport
from device_runtime.conditions import ConditionWatch
from device_runtime.settings import DeviceConfig
from fleet_protocol.allocator import settle_allocator
from fleet_protocol.errors import BrokerRefusedError, RefusedError, StorageError
from fleet_protocol.locks import held
from fleet_protocol.messages import (
    Ask,
    Cancel,
    Introduce,
    Offer,
    TaskAnswer,
    parse_server_message,
)
from fleet_protocol.messages.presence import ALIVE_SECONDS
from fleet_protocol.signals import on_signals
from fleet_protocol.topics import BlobTopic
from fleet_protocol.transport import (
    Connected,
    Disconnected,
    LoginRefused,
    OperatorNotice,
    Received,
    Refused,
    Rejected,
)

_LONGEST_WAIT_SECONDS = 60.0
# Events that end a task without a refusal by this board; a refusal records its own outcome.
_ENDS = frozenset(
    {
        Event.ACKNOWLEDGED,
        Event.REJECTED,
        Event.CANCELLED,
        Event.SUPERSEDED,
        Event.EXPIRED,
    }
)


class Agent:
    """A device: one configuration, one state folder, one link.

    Args:
        config: configuration of the device.
        files: files that define the device's identity; the agent restarts when they change.

    Attributes:
        begins_anew: whether it has ended because such a file has changed.

    Raises:
        StorageError: the state folder cannot be created.
    """

    def __init__(self, config: DeviceConfig, files: Iterable[Path] = ()) -> None:
        self.begins_anew = False
        self._files = WatchedFiles(files)
        self._shut_out = ""  # why the agent no longer takes part
        services = AgentServices.build(config)
        self.ctx = Context(
            services=services,
            uplink=Uplink(config, services.journal),
            watch=ConditionWatch(config.conditions),
            releases=Releases(config),
        )
        self._state: DeviceState = STATES[State.STARTING](self.ctx)
        self._connection = ConnectionLog(services.journal, config.device)
        self._predictions = BoardPredictions(config, self.ctx.uplink)
        self._service = ServiceNotifier()

    def stop(self, why: str = "on request") -> None:
        """Stop the loop soon; callable from any thread and from a signal handler."""
        self.ctx.services.inbox.put(StopRequested(why))

    def run(self) -> int:
        """Work until stopped; the exit code is `RESTART` if another runtime must start, or else 0.

        Raises:
            ConfigError: the backend is not installed, or another agent uses the state folder.
            DataError: the data is missing or malformed.
            TransportError: the broker cannot be reached at start.
        """
        settle_allocator()
        config = self.ctx.services.config
        busy = (
            f"another agent uses {config.state_dir}; give device {config.device!r} its own "
            "`state_dir`"
        )
        with (
            held(config.state_dir / "lock", busy),
            # Before the connection to the broker: programs on the board need no network.
            self._predictions.served(),
            on_signals(self._on_signal),
        ):
            for half_written in config.state_dir.glob(".*.????????"):  # in a power cut
                half_written.unlink(missing_ok=True)
            self._shut_out = config.shut_out()
            if not self._shut_out:
                self._take_part()
            if self._shut_out:
                self._wait_outside(self._shut_out, math.inf)
            return RESTART if self.ctx.releases.restarts else 0

    def _take_part(self) -> None:
        """Work until stopped, or until the fleet shuts this board out."""
        try:
            self._enter(State.STARTING)
            self._follow_events()
            while self.ctx.state is not State.STOPPED:
                self._handle_next()
        except BrokerRefusedError as error:
            # A person reads the error; a service would be restarted, and refused again.
            if not self._service.is_managed:
                raise
            self._wait_outside(str(error), REFUSED_SECONDS)
            if not self.begins_anew:
                raise
        finally:
            if self.ctx.uplink.link is not None and self.ctx.state is not State.STOPPED:
                # without a farewell: the broker publishes the will
                self.ctx.uplink.link.close()

    def _wait_outside(self, why: str, seconds: float) -> None:
        """Wait for the operator, and record whether the agent must restart."""
        text = f"{why}; this board waits for that and does not contact the broker meanwhile"
        self.ctx.services.journal.error(text)
        self._service.wait_outside(text)
        inbox = self.ctx.services.inbox
        self.begins_anew = wait_for_change(self._files, inbox, seconds, self._service.alive)

    def _on_signal(self, signal: Signals) -> None:
        if self.ctx.state in {State.STARTING, State.PROBING}:
            # Nothing has been announced yet, so there is nothing to take back.
            raise SystemExit(128 + signal)
        self.stop(signal.name)

    # The machine.

    def _enter(self, state: State) -> None:
        self.ctx.state = state
        self.ctx.services.journal.info(f"state={state.value}")
        # If the process outlives its agent, systemd must not be notified that it stops.
        if state is not State.STOPPED or not (self._shut_out or self.begins_anew):
            self._service.entered(state, self.ctx.task.offer.round if self.ctx.task else None)
        self._state = STATES[state](self.ctx)
        self._state.enter()

    def _follow_events(self) -> None:
        """Apply the events that states have posted, before anything else happens."""
        while self.ctx.events:
            event = self.ctx.events.popleft()
            state = successor(self.ctx.state, event)
            if event in _ENDS and self.ctx.task is not None:
                self.ctx.outcomes.append(TaskOutcome(self.ctx.task.offer.task, event))
            self._state.leave()
            self._enter(state)

    # The loop.

    def _handle_next(self) -> None:
        """Wait for one entry or a deadline, and handle it."""
        ctx = self.ctx
        self._service.alive()
        try:
            entry = ctx.services.inbox.get(timeout=self._wait_seconds())
        except queue.Empty:
            self._on_time(time.monotonic())
        else:
            self._on_entry(entry)
            if not ctx.events:
                self._on_time(time.monotonic())
        # Posted events come first: otherwise a status could name a state that has ended.
        if not ctx.events and time.monotonic() >= min(ctx.status_at, self._silent_at):
            ctx.publish_status()
        if self._connection.is_refused and self._files.have_changed():
            self.begins_anew = True
            self.stop("its enrolment or its configuration has changed")
        if not ctx.events and time.monotonic() >= ctx.watch.check_at:
            ctx.check_conditions()
        if ctx.state is State.IDLE and time.monotonic() >= ctx.releases.trial_ends_at:
            ctx.releases.move("silent", why="the server did not receive a message from it in time")
            ctx.post(Event.STOP)
        self._follow_events()

    def _wait_seconds(self) -> float:
        """Return how long the loop may wait for an entry."""
        ctx = self.ctx
        next_deadline = min(
            self._state.wake_at,
            self._deadline,
            ctx.watch.check_at,
            ctx.releases.trial_ends_at,
            ctx.status_at,
            self._silent_at,
        )
        longest = min(_LONGEST_WAIT_SECONDS, self._service.alive_seconds)
        return max(0.0, min(next_deadline - time.monotonic(), longest))

    @property
    def _silent_at(self) -> float:
        """Return when a working board next reports: the server counts a silent board as offline."""
        at_work = self.ctx.state in WORKING and self._connection.gone_since is None
        return self.ctx.uplink.last_sent_at + ALIVE_SECONDS if at_work else math.inf

    @property
    def _deadline(self) -> float:
        """Return when the current task expires.

        It does not expire while the broker is unreachable: the rounds of the server wait, too.
        """
        task = self.ctx.task
        if task is None or self._connection.gone_since is not None:
            return math.inf
        return task.deadline

    def _on_time(self, now: float) -> None:
        if self.ctx.state in WORKING and now >= self._deadline:
            self.ctx.services.journal.warning("the round has closed before the task was finished")
            self.ctx.post(Event.EXPIRED)
        elif now >= self._state.wake_at:
            self._state.on_wake()

    def _on_entry(self, entry: object) -> None:
        if isinstance(entry, Received):
            self._on_received(entry)
        elif isinstance(entry, WorkReport | WorkDone | WorkFailed):
            self._on_work(entry)
        elif isinstance(entry, Connected):
            self._on_connected(entry)
        elif isinstance(entry, Disconnected):
            self._on_disconnected(entry)
        elif isinstance(entry, LoginRefused):
            self._connection.note_refusal(entry)
        elif isinstance(entry, Refused):
            self._on_refused(entry)
        elif isinstance(entry, OperatorNotice):
            self._on_operator_news(entry)
        elif isinstance(entry, Rejected):
            self.ctx.journal_refusal(entry.error)
        elif isinstance(entry, StopRequested):
            self.ctx.services.journal.info(f"stopping: {entry.why}")
            self.ctx.post(Event.STOP)

    def _on_work(self, report: WorkReport | WorkDone | WorkFailed) -> None:
        worker = self.ctx.services.worker
        if report.job != worker.current:
            return  # of a job that was cancelled
        if not isinstance(report, WorkReport):
            worker.finish()
        self._state.on_work(report)

    # The connection.

    def _on_disconnected(self, event: Disconnected) -> None:
        self._connection.lose(event, time.monotonic())

    def _on_refused(self, refused: Refused) -> None:
        ctx = self.ctx
        ctx.uplink.note_refused(refused.topic)
        ctx.status_at = min(ctx.status_at, ctx.uplink.refused_presence.due)
        self._state.on_refused(refused)

    def _on_connected(self, event: Connected) -> None:
        ctx = self.ctx
        away_seconds = self._connection.regain(event, time.monotonic())
        if ctx.task is not None:
            ctx.task.deadline += away_seconds
        if not self._connection.greeted:
            self._connection.greeted = True
            return  # the probing state waited for it, and the next state has announced everything
        # With a resumed session, too: the broker may have published the will and lost its retained
        # messages.
        ctx.uplink.sent_profile = None
        ctx.publish_status()
        if not event.session_present and ctx.state in WORKING:
            self._state.on_repeat()

    def _on_operator_news(self, notice: OperatorNotice) -> None:
        ctx = self.ctx
        if notice.revoked:
            self._shut_out = ctx.services.config.shut_out()
            self.stop("its enrolment is no longer valid")
            return
        before = (ctx.releases.record, ctx.releases.wanted)
        try:
            ctx.releases.receive(notice)
        except RefusedError as error:
            ctx.journal_refusal(error)
        except StorageError as error:
            ctx.services.journal.error(f"release: {error}")
        if notice.renewed:
            ctx.services.journal.info("the operator has renewed this board's enrolment")
            # Messages signed before the renewal are no longer accepted, or soon will not be.
            ctx.uplink.sent_profile = None
        if not notice.renewed and before == (ctx.releases.record, ctx.releases.wanted):
            return
        ctx.services.journal.info(f"release: {ctx.releases.record}")
        if ctx.state is State.IDLE:
            self._state.on_wake()  # of blobs that a state begins to fetch, or no longer fetches
        ctx.publish_status()

    # Messages from the server.

    def _on_received(self, received: Received) -> None:
        ctx = self.ctx
        topic = ctx.uplink.topics.parse(received.topic)
        if isinstance(topic, BlobTopic):
            self._state.on_chunk(topic.digest, received.payload, received.arrived_at)
            return
        try:
            message = parse_server_message(received.payload).completed(
                fleet=ctx.services.config.fleet
            )
        except RefusedError as error:
            ctx.services.journal.warning(
                f"ignored a message on {received.topic}: {error.reason.value}: {error}"
            )
            return
        if message.fleet != ctx.services.config.fleet:
            ctx.services.journal.warning(f"ignored a message of fleet {message.fleet}")
        elif isinstance(message, Offer):
            self._on_offer(message)
        elif isinstance(message, Introduce):
            ctx.introduce()
        elif isinstance(message, Ask):
            self._predictions.answer(message)
        else:
            self._on_task_message(message)

    def _on_task_message(self, message: TaskAnswer) -> None:
        task = self.ctx.task
        if task is None or task.offer.task != message.task:
            self.ctx.services.journal.info(
                f"ignored {message.type} of task {message.task}, which is not the current task"
            )
        elif isinstance(message, Cancel):
            self.ctx.services.journal.info(f"cancelled: {message.reason}")
            self.ctx.post(Event.CANCELLED)
        else:
            self._state.on_message(message)

    def _on_offer(self, offer: Offer) -> None:
        task = self.ctx.task
        if task is not None and task.offer.task == offer.task:
            # The server repeats an offer with the remaining time by its own clock.
            task.deadline = time.monotonic() + offer.seconds_left
            self._state.on_repeat()
        else:
            receive_offer(self.ctx, offer)
