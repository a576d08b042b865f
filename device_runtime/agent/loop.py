"""The agent's loop: one inbox with deadlines, one state machine.

Everything that happens (MQTT, the worker thread, signals) is an item in the inbox. The loop hands
it to the current state, follows the events that the state posts through the transition table, and
wakes by itself for deadlines.
"""

import contextlib
import math
import queue
import time
from collections import deque
from dataclasses import dataclass
from signal import Signals
from typing import TYPE_CHECKING, Any

from device_runtime.agent.agreement import Agreement
from device_runtime.agent.cache import Cache
from device_runtime.agent.context import Context, Kit
from device_runtime.agent.data_findings import DataFindings
from device_runtime.agent.journal import Journal
from device_runtime.agent.machine import WORKING, Event, State, successor
from device_runtime.agent.memory import Memory
from device_runtime.agent.releases import RESTART, Releases
from device_runtime.agent.states.base import DeviceState
from device_runtime.agent.states.waiting import STATES
from device_runtime.agent.task_store import TaskStore
from device_runtime.agent.uplink import Uplink
from device_runtime.agent.worker import WorkDone, Worker, WorkFailed, WorkReport
from device_runtime.conditions import Watch
from device_runtime.settings import DeviceConfig
from fleet_protocol.allocator import settle_allocator
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import RefusalReason, RefusedError, StorageError
from fleet_protocol.locks import held
from fleet_protocol.messages import (
    Ask,
    Cancel,
    Offer,
    Predicted,
    Refuse,
    ServerMessage,
    parse_server_message,
)
from fleet_protocol.messages.presence import ALIVE_SECONDS
from fleet_protocol.signals import on_signals
from fleet_protocol.topics import BlobTopic
from fleet_protocol.transport import Connected, Disconnected, OperatorNotice, Received, Rejected

if TYPE_CHECKING:
    from device_runtime.asking import Asking
import os
import socket
from collections.abc import Mapping

_LONGEST_WAIT_SECONDS = 60.0
_LOSSES, _LOSSES_SECONDS = (
    5,
    30.0,
)  # of connections that were made, in so short a time that something ends them
_OVER = frozenset(
    {
        Event.ACKNOWLEDGED,
        Event.REJECTED,
        Event.CANCELLED,
        Event.SUPERSEDED,
        Event.EXPIRED,
    }
)
_NOT_READY = frozenset({State.STARTING, State.PROBING})


class Service:
    """The unit that this process is, as its environment says: what systemd hears of it.

    Nothing where nobody listens.

    The protocol is sd_notify(3): lines of text in one datagram to the socket that ``NOTIFY_SOCKET``
    names.

    Attributes:
        alive_seconds: how often `alive` must be called at least; infinite without a watchdog.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = environment.get("WATCHDOG_USEC", "") if watched else ""
        # Half of what systemd waits, as sd_watchdog_enabled(3) advises.
        self.alive_seconds = (
            int(microseconds) / 2e6
            if microseconds.isdecimal() and int(microseconds)
            else float("inf")
        )
        self._next = 0.0

    def alive(self) -> None:
        """The agent's loop has come round.

        Of many calls only as many are told as the watchdog needs.
        """
        now = time.monotonic()
        if now >= self._next and self.alive_seconds != float("inf"):
            self._next = now + self.alive_seconds / 2
            self._send("WATCHDOG=1")

    def entered(self, state: State, round_number: int | None) -> None:
        """Tell what the agent does, with the round of the task in hand.

        Ready is who has reached the broker.
        """
        doing = state.value if round_number is None else f"{state.value}, round {round_number}"
        mark = (
            "STOPPING=1\n" if state is State.STOPPED else "" if state in _NOT_READY else "READY=1\n"
        )
        self._send(f"{mark}STATUS={doing}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # A board that cannot tell goes on: systemd restarts what it does not hear of.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link,
        ):
            link.sendto(text.encode(), self._address)


@dataclass(frozen=True)
class StopRequested:
    """Someone wants the agent to end, and why."""

    why: str


class Agent:
    """A device: one configuration, one state folder, one link.

    Raises:
        StorageError: the state folder cannot be made.
    """

    def __init__(self, config: DeviceConfig) -> None:
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        blobs = BlobStore(config.state_dir)
        journal = Journal(config.device)
        kit = Kit(
            config=config,
            inbox=inbox,
            journal=journal,
            blobs=blobs,
            store=TaskStore(config.state_dir),
            cache=Cache(config.state_dir, blobs, config.max_cache_bytes),
            memory=Memory(config.state_dir, config.conditions.root),
            worker=Worker(inbox),
            agreement=Agreement(config.state_dir),
            findings=DataFindings(config.state_dir, journal),
        )
        self.ctx = Context(
            kit, Uplink(config, kit.journal), Watch(config.conditions), Releases(config)
        )
        self._state: DeviceState = STATES[State.STARTING](self.ctx)
        self._greeted = False
        self._gone: float | None = None  # ``time.monotonic()`` of the loss of the connection
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._asking: Asking | None = None
        self._service = Service()

    def stop(self, why: str = "asked to") -> None:
        """End the loop soon; may be called from any thread and from a signal handler."""
        self.ctx.kit.inbox.put(StopRequested(why))

    def run(self) -> int:
        """Work until stopped; the exit code is `RESTART` where another runtime is to start, or 0.

        Raises:
            ConfigError: a backend that is not installed, or another agent in the same state folder.
            DataError: the data is missing or malformed.
            TransportError: the broker cannot be reached at start.
        """
        settle_allocator()
        config = self.ctx.kit.config
        busy = f"another agent works in {config.state_dir}; give device {config.device!r} a `state_dir` of its own"
        with (
            held(config.state_dir / "lock", busy),
            self._served(),
            on_signals(self._signalled),
        ):
            for left in self.ctx.kit.config.state_dir.glob(
                ".*.????????"
            ):  # half written in a power cut
                left.unlink(missing_ok=True)
            try:
                self._enter(State.STARTING)
                self._follow()
                while self.ctx.state is not State.STOPPED:
                    self._turn()
                return RESTART if self.ctx.releases.over else 0
            finally:
                if self.ctx.uplink.link is not None and self.ctx.state is not State.STOPPED:
                    # without a farewell: the will, or the next start, speaks
                    self.ctx.uplink.link.close()

    # The machine.

    def _enter(self, state: State) -> None:
        self.ctx.state = state
        self.ctx.kit.journal.info(f"state={state.value}")
        self._service.entered(state, self.ctx.task.offer.round if self.ctx.task else None)
        self._state = STATES[state](self.ctx)
        self._state.enter()

    def _follow(self) -> None:
        """Handle the events that states have posted, before anything else happens."""
        while self.ctx.events:
            event = self.ctx.events.popleft()
            state = successor(self.ctx.state, event)
            if event in _OVER and self.ctx.task is not None:
                self.ctx.outcomes.append((self.ctx.task.offer.task, event, None))
            self._state.leave()
            self._enter(state)

    # The loop.

    def _turn(self) -> None:
        """Wait for one item or a deadline, and handle it."""
        ctx = self.ctx
        now = time.monotonic()
        self._service.alive()
        told = min(ctx.status_at, self._silent_at)
        own = (
            min(
                self._state.wake_at,
                self._deadline,
                ctx.watch.look_at,
                ctx.releases.until,
                told,
            )
            - now
        )
        wait = min(own, _LONGEST_WAIT_SECONDS, self._service.alive_seconds)
        try:
            item = ctx.kit.inbox.get(timeout=max(0.0, wait))
        except queue.Empty:
            self._on_time(time.monotonic())
        else:
            self._on_item(item)
            if not ctx.events:
                self._on_time(time.monotonic())
        if not ctx.events and time.monotonic() >= min(ctx.status_at, self._silent_at):
            ctx.publish_status()
        if not ctx.events and time.monotonic() >= ctx.watch.look_at:
            ctx.look()
        if ctx.state is State.IDLE and time.monotonic() >= ctx.releases.until:
            ctx.releases.move("silent", why="the server did not hear it in time")
            ctx.post(Event.STOP)
        self._follow()

    @property
    def _silent_at(self) -> float:
        """When a board at work says that it is there: the server takes one that is silent for gone."""
        at_work = self.ctx.state in WORKING and self._gone is None
        return self.ctx.uplink.spoke + ALIVE_SECONDS if at_work else math.inf

    @property
    def _deadline(self) -> float:
        """When the task in hand is over: not while the broker is away, for which the server's
        rounds wait, too.
        """
        task = self.ctx.task
        return math.inf if task is None or self._gone is not None else task.deadline

    def _on_time(self, now: float) -> None:
        if self.ctx.state in WORKING and now >= self._deadline:
            self.ctx.kit.journal.warning("the round has closed before the task was finished")
            self.ctx.post(Event.EXPIRED)
        elif now >= self._state.wake_at:
            self._state.on_wake()

    def _on_item(self, item: object) -> None:
        ctx = self.ctx
        if isinstance(item, Received):
            self._on_received(item)
        elif isinstance(item, WorkReport | WorkDone | WorkFailed):
            if item.job == ctx.kit.worker.current:
                if not isinstance(item, WorkReport):
                    ctx.kit.worker.finish()
                self._state.on_work(item)
        elif isinstance(item, Connected):
            self._on_connected(item)
        elif isinstance(item, Disconnected):
            self._on_disconnected(item)
        elif isinstance(item, OperatorNotice):
            self._on_told(item)
        elif isinstance(item, Rejected):
            ctx.journal_refusal(item.error)
        elif isinstance(item, StopRequested):
            ctx.kit.journal.info(f"stopping: {item.why}")
            ctx.post(Event.STOP)

    def _on_told(self, item: OperatorNotice) -> None:
        ctx = self.ctx
        before = (self.ctx.releases.record, self.ctx.releases.wanted)
        try:
            ctx.releases.hear(item)
        except RefusedError as error:
            ctx.journal_refusal(error)
        except StorageError as error:
            ctx.kit.journal.error(f"release: {error}")
        if item.renewed:
            ctx.kit.journal.info("the operator has renewed this board's enrolment")
            ctx.uplink.told = None  # what was signed before counts no longer, or soon
        if item.renewed or before != (ctx.releases.record, ctx.releases.wanted):
            ctx.kit.journal.info(f"release: {ctx.releases.record}")
            if ctx.state is State.IDLE:
                self._state.on_wake()  # what it fetches begins, or ends
            ctx.publish_status()

    def _on_disconnected(self, item: Disconnected) -> None:
        journal = self.ctx.kit.journal
        now = time.monotonic()
        self._gone = now if self._gone is None else self._gone
        journal.warning(f"connection lost ({item.reason}); trying again")
        self._losses.append(now)
        if len(self._losses) == _LOSSES and now - self._losses[0] < _LOSSES_SECONDS:
            self._losses.clear()
            name = self.ctx.kit.config.device
            journal.warning(
                f"connections end as soon as they are made: if another agent runs as {name!r}, give it another name"
            )

    def _on_connected(self, item: Connected) -> None:
        ctx = self.ctx
        gone = self._gone
        self._gone = None
        if gone is not None and ctx.task is not None:
            ctx.task.deadline += time.monotonic() - gone
        ctx.kit.journal.info(f"connected, session {'kept' if item.session_present else 'new'}")
        first = not self._greeted
        self._greeted = True
        if first:
            return  # probing has waited for it, and the state after it has said all there is to say
        # Also with a kept session: the broker may have published the will, and have lost what it
        # had retained.
        ctx.uplink.told = None
        ctx.publish_status()
        if not item.session_present and ctx.state in WORKING:
            self._state.on_repeat()

    def _on_received(self, item: Received) -> None:
        ctx = self.ctx
        topic = ctx.uplink.topics.parse(item.topic)
        if isinstance(topic, BlobTopic):
            self._state.on_chunk(topic.digest, item.payload)
            return
        try:
            message = parse_server_message(item.payload).told(fleet=ctx.kit.config.fleet)
        except RefusedError as error:
            ctx.kit.journal.warning(
                f"ignored a message on {item.topic}: {error.reason.value}: {error}"
            )
            return
        if message.fleet != ctx.kit.config.fleet:
            ctx.kit.journal.warning(f"ignored a message of fleet {message.fleet}")
        elif isinstance(message, Offer):
            self._on_offer(message)
        elif isinstance(message, Ask):
            self._on_ask(message)
        elif ctx.task is None or ctx.task.offer.task != message.task:
            ctx.kit.journal.info(
                f"ignored {message.type} of task {message.task}, which is not in hand"
            )
        else:
            self._on_ours(message)

    def _on_ours(self, message: ServerMessage) -> None:
        if isinstance(message, Cancel):
            self.ctx.kit.journal.info(f"cancelled: {message.reason}")
            self.ctx.post(Event.CANCELLED)
        else:
            self._state.on_message(message)

    def _on_offer(self, offer: Offer) -> None:
        """An offer is new, a repetition, the end of the task in hand, or an echo."""
        ctx = self.ctx
        task = self.ctx.task
        if task is not None and task.offer.task == offer.task:
            task.deadline = time.monotonic() + offer.seconds_left
            self._state.on_repeat()
            return
        past = next((entry for entry in reversed(ctx.outcomes) if entry[0] == offer.task), None)
        if (
            past is not None
            and past[1] is not Event.EXPIRED
            and (past[2] or task or ctx.outcomes.count(past) == 1)
        ):
            self._on_old_offer(offer, past)
        elif task is None:
            while past is not None and past in ctx.outcomes:
                ctx.outcomes.remove(past)
            ctx.take(offer)
        elif task.offer.run == offer.run and offer.round < task.offer.round:
            ctx.kit.journal.info(f"ignored an offer of the earlier round {offer.round}")
        else:
            # A server has one task for a device at a time, so the one in hand is no longer wanted.
            ctx.kit.journal.info(f"task {offer.task} takes the place of the one in hand")
            ctx.pending = offer
            ctx.post(Event.SUPERSEDED)

    def _on_old_offer(self, offer: Offer, past: tuple[str, Event, Any]) -> None:
        """The broker delivered an offer again whose task has ended here: say again how, if it was
        us who ended it.

        If not, it is done anew when it is offered once more: then it is the server that goes on
        from a backup.
        """
        ctx = self.ctx
        ctx.kit.journal.info(
            f"ignored the offer of task {offer.task}, which ended here ({past[1].value})"
        )
        ctx.outcomes.append(past)
        if past[2] is None or ctx.uplink.link is None:
            return
        reason, detail = past[2]
        ctx.uplink.send(offer, Refuse, reason=reason, detail=detail)

    # Predictions.

    def _served(self) -> contextlib.AbstractContextManager[object]:
        """Let others ask this board's model, where they may."""
        rules = self.ctx.kit.config.predict
        if rules is None or (rules.socket is None and not rules.mqtt):
            return contextlib.nullcontext()
        from device_runtime.asking import Asking  # noqa: PLC0415  (not on every board)

        self._asking = Asking(self.ctx.kit.config, rules, self._told)
        return contextlib.closing(self._asking)

    def _on_ask(self, ask: Ask) -> None:
        rules = self.ctx.kit.config.predict
        if self._asking is not None and rules is not None and rules.mqtt:
            self._asking.take(ask)
        else:
            said = "it answers nobody over MQTT: set mqtt = true in [predict] of its device.toml, and start it anew"
            self._told(ask, reason=RefusalReason.UNSUPPORTED, detail=said)

    def _told(self, ask: Ask, **said: object) -> None:
        self.ctx.uplink.send(ask, Predicted, **said)

    def _signalled(self, signal: Signals) -> None:
        if self.ctx.state in {State.STARTING, State.PROBING}:
            raise SystemExit(
                128 + signal
            )  # nothing is announced yet, so there is nobody to say good-bye to
        self.stop(signal.name)
