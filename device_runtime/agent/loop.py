"""The agent's loop: one inbox with deadlines, one state machine.

Everything that happens (MQTT, the worker thread, signals) is an item in the inbox. The loop hands
it to the current state, follows the events that the state posts through the transition table, and
wakes by itself for deadlines.
"""

import contextlib
import math
import queue
import time
from collections.abc import Iterable
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING

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
from device_runtime.conditions import Watch
from device_runtime.settings import DeviceConfig
from fleet_protocol.allocator import settle_allocator
from fleet_protocol.errors import BrokerRefusedError, RefusalReason, RefusedError, StorageError
from fleet_protocol.locks import held
from fleet_protocol.messages import (
    Ask,
    Cancel,
    Introduce,
    Offer,
    Predicted,
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

if TYPE_CHECKING:
    from device_runtime.predictions.service import PredictionService

_LONGEST_WAIT_SECONDS = 60.0
# Events that end a task without a refusal of this board; a refusal notes its own outcome.
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
        config: of the device.
        files: that say who the device is, so that it may begin anew when they change.

    Attributes:
        begins_anew: whether it has ended because such a file has changed.

    Raises:
        StorageError: the state folder cannot be made.
    """

    def __init__(self, config: DeviceConfig, files: Iterable[Path] = ()) -> None:
        self.begins_anew = False
        self._files = WatchedFiles(files)
        self._shut_out = ""  # why it takes part no more
        services = AgentServices.build(config)
        self.ctx = Context(
            services=services,
            uplink=Uplink(config, services.journal),
            watch=Watch(config.conditions),
            releases=Releases(config),
        )
        self._state: DeviceState = STATES[State.STARTING](self.ctx)
        self._connection = ConnectionLog(services.journal, config.device)
        self._predictions: PredictionService | None = None
        self._service = ServiceNotifier()

    def stop(self, why: str = "asked to") -> None:
        """End the loop soon; may be called from any thread and from a signal handler."""
        self.ctx.services.inbox.put(StopRequested(why))

    def run(self) -> int:
        """Work until stopped; the exit code is `RESTART` where another runtime is to start, or 0.

        Raises:
            ConfigError: a backend that is not installed, or another agent in the same state folder.
            DataError: the data is missing or malformed.
            TransportError: the broker cannot be reached at start.
        """
        settle_allocator()
        config = self.ctx.services.config
        busy = (
            f"another agent works in {config.state_dir}; "
            f"give device {config.device!r} a `state_dir` of its own"
        )
        with (
            held(config.state_dir / "lock", busy),
            # Before the broker is there: programs on the board need no network.
            self._serve_predictions(),
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
        """Work until stopped, or shut out."""
        try:
            self._enter(State.STARTING)
            self._follow_events()
            while self.ctx.state is not State.STOPPED:
                self._handle_next()
        except BrokerRefusedError as error:
            # A person reads the error; a service would be started again, and be refused again.
            if not self._service.is_managed:
                raise
            self._wait_outside(str(error), REFUSED_SECONDS)
            if not self.begins_anew:
                raise
        finally:
            if self.ctx.uplink.link is not None and self.ctx.state is not State.STOPPED:
                # without a farewell: the will, or the next start, speaks
                self.ctx.uplink.link.close()

    def _wait_outside(self, why: str, seconds: float) -> None:
        """Wait for the operator, and note whether the agent is to begin anew."""
        text = f"{why}; this board waits until then, and asks nobody"
        self.ctx.services.journal.error(text)
        self._service.wait_outside(text)
        inbox = self.ctx.services.inbox
        self.begins_anew = wait_for_change(self._files, inbox, seconds, self._service.alive)

    def _on_signal(self, signal: Signals) -> None:
        if self.ctx.state in {State.STARTING, State.PROBING}:
            # Nothing is announced yet, so there is nobody to say good-bye to.
            raise SystemExit(128 + signal)
        self.stop(signal.name)

    # The machine.

    def _enter(self, state: State) -> None:
        self.ctx.state = state
        self.ctx.services.journal.info(f"state={state.value}")
        # A process that goes on after its agent has stopped must not be ended for that.
        if state is not State.STOPPED or not (self._shut_out or self.begins_anew):
            self._service.entered(state, self.ctx.task.offer.round if self.ctx.task else None)
        self._state = STATES[state](self.ctx)
        self._state.enter()

    def _follow_events(self) -> None:
        """Follow the events that states have posted, before anything else happens."""
        while self.ctx.events:
            event = self.ctx.events.popleft()
            state = successor(self.ctx.state, event)
            if event in _ENDS and self.ctx.task is not None:
                self.ctx.outcomes.append(TaskOutcome(self.ctx.task.offer.task, event))
            self._state.leave()
            self._enter(state)

    # The loop.

    def _handle_next(self) -> None:
        """Wait for one item or a deadline, and handle it."""
        ctx = self.ctx
        self._service.alive()
        try:
            item = ctx.services.inbox.get(timeout=self._wait_seconds())
        except queue.Empty:
            self._on_time(time.monotonic())
        else:
            self._on_item(item)
            if not ctx.events:
                self._on_time(time.monotonic())
        # What has been posted comes first: a status would tell of a state that is over.
        if not ctx.events and time.monotonic() >= min(ctx.status_at, self._silent_at):
            ctx.publish_status()
        if self._connection.is_refused and self._files.have_changed():
            self.begins_anew = True
            self.stop("its enrolment or its configuration has changed")
        if not ctx.events and time.monotonic() >= ctx.watch.check_at:
            ctx.check_conditions()
        if ctx.state is State.IDLE and time.monotonic() >= ctx.releases.trial_ends_at:
            ctx.releases.move("silent", why="the server did not hear it in time")
            ctx.post(Event.STOP)
        self._follow_events()

    def _wait_seconds(self) -> float:
        """Return for how long the loop may wait for an item."""
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
        """When a board at work says that it is there: the server takes a silent one for gone."""
        at_work = self.ctx.state in WORKING and self._connection.gone_since is None
        return self.ctx.uplink.last_sent_at + ALIVE_SECONDS if at_work else math.inf

    @property
    def _deadline(self) -> float:
        """When the task in hand is over.

        Not while the broker is away, for which the server's rounds wait, too.
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

    def _on_item(self, item: object) -> None:
        if isinstance(item, Received):
            self._on_received(item)
        elif isinstance(item, WorkReport | WorkDone | WorkFailed):
            self._on_work(item)
        elif isinstance(item, Connected):
            self._on_connected(item)
        elif isinstance(item, Disconnected):
            self._on_disconnected(item)
        elif isinstance(item, LoginRefused):
            self._connection.note_refusal(item)
        elif isinstance(item, Refused):
            self._state.on_refused(item)
        elif isinstance(item, OperatorNotice):
            self._on_operator_news(item)
        elif isinstance(item, Rejected):
            self.ctx.journal_refusal(item.error)
        elif isinstance(item, StopRequested):
            self.ctx.services.journal.info(f"stopping: {item.why}")
            self.ctx.post(Event.STOP)

    def _on_work(self, item: WorkReport | WorkDone | WorkFailed) -> None:
        worker = self.ctx.services.worker
        if item.job != worker.current:
            return  # of a job that was cancelled
        if not isinstance(item, WorkReport):
            worker.finish()
        self._state.on_work(item)

    # The connection.

    def _on_disconnected(self, item: Disconnected) -> None:
        self._connection.lose(item, time.monotonic())

    def _on_connected(self, item: Connected) -> None:
        ctx = self.ctx
        away_seconds = self._connection.regain(item, time.monotonic())
        if ctx.task is not None:
            ctx.task.deadline += away_seconds
        if not self._connection.greeted:
            self._connection.greeted = True
            return  # probing has waited for it, and the state after it has said all there is to say
        # Also with a kept session: the broker may have published the will, and have lost what it
        # had retained.
        ctx.uplink.sent_profile = None
        ctx.publish_status()
        if not item.session_present and ctx.state in WORKING:
            self._state.on_repeat()

    def _on_operator_news(self, item: OperatorNotice) -> None:
        ctx = self.ctx
        if item.revoked:
            self._shut_out = ctx.services.config.shut_out()
            self.stop("its enrolment counts no more")
            return
        before = (ctx.releases.record, ctx.releases.wanted)
        try:
            ctx.releases.receive(item)
        except RefusedError as error:
            ctx.journal_refusal(error)
        except StorageError as error:
            ctx.services.journal.error(f"release: {error}")
        if item.renewed:
            ctx.services.journal.info("the operator has renewed this board's enrolment")
            ctx.uplink.sent_profile = None  # what was signed before counts no longer, or soon
        if not item.renewed and before == (ctx.releases.record, ctx.releases.wanted):
            return
        ctx.services.journal.info(f"release: {ctx.releases.record}")
        if ctx.state is State.IDLE:
            self._state.on_wake()  # what it fetches begins, or ends
        ctx.publish_status()

    # Messages of the server.

    def _on_received(self, item: Received) -> None:
        ctx = self.ctx
        topic = ctx.uplink.topics.parse(item.topic)
        if isinstance(topic, BlobTopic):
            self._state.on_chunk(topic.digest, item.payload)
            return
        try:
            message = parse_server_message(item.payload).completed(fleet=ctx.services.config.fleet)
        except RefusedError as error:
            ctx.services.journal.warning(
                f"ignored a message on {item.topic}: {error.reason.value}: {error}"
            )
            return
        if message.fleet != ctx.services.config.fleet:
            ctx.services.journal.warning(f"ignored a message of fleet {message.fleet}")
        elif isinstance(message, Offer):
            self._on_offer(message)
        elif isinstance(message, Introduce):
            ctx.introduce()
        elif isinstance(message, Ask):
            self._on_ask(message)
        else:
            self._on_task_message(message)

    def _on_task_message(self, message: TaskAnswer) -> None:
        task = self.ctx.task
        if task is None or task.offer.task != message.task:
            self.ctx.services.journal.info(
                f"ignored {message.type} of task {message.task}, which is not in hand"
            )
        elif isinstance(message, Cancel):
            self.ctx.services.journal.info(f"cancelled: {message.reason}")
            self.ctx.post(Event.CANCELLED)
        else:
            self._state.on_message(message)

    def _on_offer(self, offer: Offer) -> None:
        task = self.ctx.task
        if task is not None and task.offer.task == offer.task:
            # The server repeats an offer with the time that is left by its own clock.
            task.deadline = time.monotonic() + offer.seconds_left
            self._state.on_repeat()
        else:
            receive_offer(self.ctx, offer)

    # Predictions.

    def _serve_predictions(self) -> contextlib.AbstractContextManager[object]:
        """Let others ask this board's model, where they may."""
        settings = self.ctx.services.config.predict
        if settings is None or (settings.socket is None and not settings.mqtt):
            return contextlib.nullcontext()
        # Not every board carries what it needs in memory.
        from device_runtime.predictions.service import PredictionService  # noqa: PLC0415

        config = self.ctx.services.config
        self._predictions = PredictionService(config, settings, self._send_prediction)
        return contextlib.closing(self._predictions)

    def _on_ask(self, ask: Ask) -> None:
        settings = self.ctx.services.config.predict
        if self._predictions is not None and settings is not None and settings.mqtt:
            self._predictions.submit(ask)
            return
        detail = (
            "it answers nobody over MQTT: set mqtt = true in [predict] of its device.toml, "
            "and start it anew"
        )
        self._send_prediction(ask, reason=RefusalReason.UNSUPPORTED, detail=detail)

    def _send_prediction(self, ask: Ask, **answer: object) -> None:
        self.ctx.uplink.send(ask, Predicted, **answer)
