"""The states of the agent that begin, wait and end, and the list of all of them.

A state posts events and never chooses its successor; ``device_runtime.agent.machine`` does.
"""

import contextlib
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from typing_extensions import override

from device_runtime.agent.context import Context
from device_runtime.agent.machine import Event, State
from device_runtime.agent.states.base import DeviceState
from device_runtime.agent.states.computing import Measuring, Sizing, Training
from device_runtime.agent.states.fetching import Collecting, Fetching
from device_runtime.agent.states.uploading import Uploading
from device_runtime.agent.task_in_hand import TaskInHand
from device_runtime.agent.task_store import StoredTask, resume_event
from device_runtime.agent.worker import WorkDone, WorkFailed, WorkReport
from device_runtime.board import boot_id, check_system, clock_doubt, probe
from device_runtime.self_test import self_test, set_test
from device_runtime.training.backends import choose_backend
from device_runtime.training.own_model import OwnModel
from device_runtime.training.routines import ROUTINES
from device_runtime.training.task import DeviceSetup
from fleet_protocol.data import load_data
from fleet_protocol.errors import (
    ConfigError,
    DataError,
    RefusalReason,
    RefusedError,
    ShoalError,
    StorageError,
    single_line,
)
from fleet_protocol.manifest import BASE, parse_manifest
from fleet_protocol.messages import BlobRef, Refuse
from fleet_protocol.transport import Transport, open_transport

if TYPE_CHECKING:
    from fleet_protocol.identity.release import Release

_SESSION_EXPIRY_SECONDS = 3600
_REST_SECONDS = 600.0
_WORD_SECONDS = 10.0
_PAUSED_SECONDS = 10.0  # after which a release may be fetched again, if the conditions hold


class Starting(DeviceState):
    """Reads the data and settles the backend.

    What is wrong with either ends the process, and the fleet hears it.
    """

    @override
    def enter(self) -> None:
        ctx = self.ctx
        config = self.ctx.kit.config
        try:
            self._prepare()
        except (ConfigError, DataError) as error:
            ctx.measured.unable = single_line(str(error))
            ctx.kit.journal.error(f"{error}; the fleet is told, if the broker is there")
            with contextlib.suppress(
                ShoalError
            ):  # who cannot be reached at once reads it in this board's log
                link = _connect(ctx, min(_WORD_SECONDS, config.connect_timeout_seconds))
                ctx.uplink.publish_status(
                    None, ctx.measured.profile(config, 0, ctx.kit.memory, ctx.releases)
                )
                link.drain(time.monotonic() + _WORD_SECONDS)
            raise
        ctx.post(Event.LOADED)

    def _prepare(self) -> None:
        config = self.ctx.kit.config
        check_system()
        for doubt in filter(None, (clock_doubt(), config.ended())):
            self.ctx.kit.journal.warning(doubt)
        backend = choose_backend(config.backend)
        data = load_data(config.data)
        own = None
        if config.own_model is not None:
            own = OwnModel(config.own_model.set, config.state_dir, config.own_model.keep_runs)
            own.check()  # a set that is not whole ends the process here, not in the first round
        tried = config.accelerators()
        self.ctx.setup = DeviceSetup(
            data,
            self.ctx.kit.blobs,
            backend,
            config.threads,
            config.holdout,
            own,
            config.state_dir,
            accelerators=tried,
        )
        left_out = f" (left out: {data.facts.left_out_text})" if data.facts.left_out else ""
        self.ctx.kit.journal.info(
            f"data {data.source}: {len(data)} samples{left_out}; backend {backend}"
        )
        self.ctx.measured.unable = self_test(config.state_dir, backend)
        if self.ctx.measured.unable:
            self.ctx.kit.journal.error(
                f"this board joins, but it cannot train: {self.ctx.measured.unable}"
            )


def _connect(ctx: Context, seconds: float) -> Transport:
    """Measure the board, and open its link; a TransportError where the broker cannot be reached."""
    config = ctx.kit.config
    ctx.measured.board = probe(config.conditions.sysfs)
    link = open_transport(
        config.address(),
        f"shoal-{config.fleet}-{config.device}",
        ctx.kit.inbox,
        will=ctx.uplink.farewell(ctx.state.value),
        session_expiry_seconds=_SESSION_EXPIRY_SECONDS,
        member=config.member(),
    )
    ctx.kit.journal.info(f"connecting to {link.address}, for up to {seconds:g} s")
    link.connect(seconds)
    ctx.uplink.link = link
    return link


class Probing(DeviceState):
    """Measures the board, connects, and goes on with a task that is on disk."""

    @override
    def enter(self) -> None:
        ctx = self.ctx
        config = self.ctx.kit.config
        ctx.look()
        link = _connect(ctx, config.connect_timeout_seconds)
        link.subscribe(ctx.uplink.topics.task(config.device))
        ctx.kit.journal.info(f"connected to {link.address}")
        record, problem = ctx.kit.store.load()
        if problem:
            ctx.kit.journal.warning(problem)
        if record is not None:
            self._take_up(record)
        event = resume_event(ctx.task.record if ctx.task else None, ctx.kit.blobs)
        if event is Event.RESUME_POISONED and ctx.task:
            found = ctx.task.record
            why = f"this task took the agent down {found.crashes} times"
            if found.outages > found.crashes:
                why = f"this board started anew {found.outages} times in this task (is its supply strong enough?)"
            ctx.failure = (RefusalReason.FAILED, f"{why}; it is not tried again")
        ctx.post(event)

    def _take_up(self, record: StoredTask) -> None:
        """Make the record the task in hand, what led here counted on disk first."""
        ctx = self.ctx
        boot = boot_id()
        outage = not record.settled and record.boot != boot
        crash = not record.settled and record.boot == boot
        crashes = record.crashes + crash
        outages = record.outages + outage
        now = time.monotonic()
        left = max(0.0, record.seconds_left())
        ctx.hold(TaskInHand(record, deadline=now + left, started=now, resumed=True))
        ctx.kit.journal.follow(record.offer)
        if record.load is not None and record.phase == record.load.phase and crash:
            ctx.kit.memory.died(record.load)
        ctx.kit.journal.info(
            f"found a task in phase {record.phase}, {crashes=}, {outages=}, seconds_left={left:.0f}"
        )
        try:
            ctx.save(boot=boot, crashes=crashes, outages=outages, settled=False)
        except StorageError as error:
            ctx.kit.journal.warning(f"cannot count the crash: {error}")


class Idle(Collecting):
    """Waits for an offer; one may have come while the last task was dropped.

    Meanwhile it fetches a release.

    Of artifact sets it fetches the manifest, then what a training task needs, and takes a step in
    another process.
    """

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._fetches = 0  # number of the release
        self._files: tuple[BlobRef, ...] = ()

    @override
    def leave(self) -> None:
        self.ctx.kit.worker.cancel()
        super().leave()

    @override
    def enter(self) -> None:
        self.ctx.kit.journal.follow(None)
        if self.ctx.kit.config.conditions.new_data is not None:
            self.ctx.look()  # the task that has ended may have been what there was data for
        self.ctx.tell_state()
        self._rest_at = time.monotonic() + _REST_SECONDS
        if self.ctx.pending is not None:
            offer = self.ctx.pending
            self.ctx.pending = None
            self.ctx.take(offer)
        else:
            self.on_wake()

    @override
    def on_wake(self) -> None:
        now = time.monotonic()
        wanted = None if self.ctx.measured.paused else self.ctx.releases.wanted
        if now >= self._rest_at:
            # a board that is asked for nothing tries again some time, too
            self.ctx.kit.memory.lived()
            self.enter()
        elif wanted is not None and self._fetches == wanted[0].number and not self._fetch.complete:
            super().on_wake()
        else:
            self._fetch.close()
            self.wake_at = (
                self._rest_at if self.ctx.releases.wanted is None else now + _PAUSED_SECONDS
            )
            if wanted is not None:
                self._fetches = wanted[0].number
                self._files = ()
                self._guarded(lambda: self._want(wanted[1]))

    @override
    def _advance(self) -> None:
        wanted = self.ctx.releases.wanted
        if wanted is not None and self._fetch.complete and wanted[0].sets:
            self._stage(*wanted)
        elif wanted is not None and self._fetch.complete:
            self.ctx.releases.move(
                "whole",
                wanted[0].number,
                str(self.ctx.kit.blobs.path(wanted[1].digest)),
            )
            self.ctx.post(Event.STOP)

    def _stage(self, release: "Release", ref: BlobRef) -> None:
        """Fetch what a manifest names, or try it when that is there.

        Errors as of `Collecting._take`.
        """
        ctx = self.ctx
        kit = self.ctx.kit
        manifest = parse_manifest(kit.blobs.read(ref.digest))
        if release.sets.get(manifest.tier) != ref:
            raise RefusedError(
                RefusalReason.MALFORMED,
                f"the manifest of tier {manifest.tier} is another tier's",
            )
        load = kit.memory.load("training", manifest.tier, manifest.peak_memory_bytes)
        large = kit.memory.too_large
        if 0 < load.free < load.peak or (
            large is not None and large.forbids(load.phase, load.peak)
        ):
            text = f"{manifest.tier} needs {load.peak} bytes of memory, and {load.free} are free"
            raise RefusedError(RefusalReason.UNSUPPORTED, large.said if large is not None else text)
        graphs = ROUTINES["train"].graphs(manifest, ctx.need_setup())
        if not self._files:
            specs = [
                *(manifest.graphs[key] for key in graphs),
                *([manifest.files[BASE]] if manifest.base else []),
            ]
            self._files = tuple(
                BlobRef(digest=s.digest, size=s.size, chunk_bytes=ref.chunk_bytes) for s in specs
            )
            ctx.staged = [file.digest for file in self._files]
            self._want(*self._files)
        elif kit.worker.current is None:
            path = kit.blobs.path(ref.digest)
            root = kit.blobs.root
            kit.worker.start("a set", lambda _: (release.number, set_test(path, root, graphs)))

    @override
    def on_work(self, event: WorkReport | WorkDone | WorkFailed) -> None:
        ctx = self.ctx
        wanted = self.ctx.releases.wanted
        if isinstance(event, WorkFailed):
            ctx.fail(event.error)
        if wanted is None or not isinstance(event, WorkDone) or not isinstance(event.result, tuple):
            return
        number, why = event.result
        if number != wanted[0].number:
            return
        if not why:
            ctx.kit.cache.staged(wanted[1].digest, ctx.staged)
        with contextlib.suppress(StorageError):  # it is tried again when it is said again
            ctx.releases.move("unfit" if why else "passed", wanted[0].number, why, sets=True)
        ctx.kit.journal.info(f"artifact sets: {ctx.releases.sets}")
        ctx.staged = ()
        ctx.publish_status()


class _Ending(DeviceState):
    """Forgets the task; blobs worth keeping stay."""

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = self.ctx.need_task()
        ctx.kit.worker.cancel()
        update = task.record.update
        ctx.kit.store.clear()
        ctx.task = None
        ctx.failure = None
        if update is not None:
            ctx.kit.blobs.remove(update.digest)
        known = ctx.kit.cache.index.sets
        ctx.kit.cache.evict(ctx.blobs_in_use())
        if known and not ctx.kit.cache.index.sets:
            size = ctx.kit.config.max_cache_bytes
            ctx.kit.journal.warning(
                f"max_cache_bytes = {size} is less than one set takes: it is fetched for every task"
            )
        ctx.post(Event.CLEARED)


class Refusing(_Ending):
    """Tells the server why the task ends here.

    A crash between message and forgetting repeats the task after the restart, and with it the
    refusal.
    """

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = self.ctx.need_task()
        reason, detail = ctx.failure or (RefusalReason.FAILED, "unknown")
        ctx.kit.journal.warning(f"refused: {reason.value}: {detail}")
        ctx.send(Refuse, reason=reason, detail=detail)
        ctx.outcomes.append((task.offer.task, Event.FAILED, (reason, detail)))
        super().enter()


class Dropping(_Ending):
    """Forgets the task without a word: it is merged, or nobody wants it any more."""


class Stopped(DeviceState):
    """Ends the worker, notes that this was no crash, and says good-bye."""

    @override
    def enter(self) -> None:
        ctx = self.ctx
        ctx.kit.worker.cancel()
        if not ctx.kit.worker.join(5.0):
            ctx.kit.journal.warning(
                "the worker thread is still in a step; it ends with the process"
            )
        if ctx.task is not None:
            try:
                ctx.save(settled=True)
            except StorageError as error:
                ctx.kit.journal.warning(f"this stop will count as a crash: {error}")
        if ctx.uplink.link is not None:
            ctx.uplink.link.close(farewell=ctx.uplink.farewell(ctx.state.value))
        ctx.kit.journal.info("stopped")


STATES: Mapping[State, type[DeviceState]] = MappingProxyType(
    {
        State.STARTING: Starting,
        State.PROBING: Probing,
        State.IDLE: Idle,
        State.FETCHING: Fetching,
        State.SIZING: Sizing,
        State.TRAINING: Training,
        State.MEASURING: Measuring,
        State.UPLOADING: Uploading,
        State.REFUSING: Refusing,
        State.DROPPING: Dropping,
        State.STOPPED: Stopped,
    }
)
