"""The states of the agent before it waits for offers: loading, probing and connecting."""

import contextlib
import time

from typing_extensions import override

from device_runtime.agent.context import Context
from device_runtime.agent.machine import Event
from device_runtime.agent.measurements import ReportedData
from device_runtime.agent.states.base import DeviceState
from device_runtime.agent.task_in_hand import TaskInHand
from device_runtime.agent.task_store import StoredTask, resume_event
from device_runtime.board import boot_id, check_system, clock_doubt, probe
from device_runtime.self_test import self_test
from device_runtime.settings import DeviceConfig
from device_runtime.training.backends import choose_backend
from device_runtime.training.own_model import OwnModel
from device_runtime.training.task import DeviceSetup
from fleet_protocol.data import load_data
from fleet_protocol.errors import (
    ConfigError,
    DataError,
    RefusalReason,
    ShoalError,
    StorageError,
    single_line,
)
from fleet_protocol.transport import Transport, open_transport

_SESSION_EXPIRY_SECONDS = 3600
_LAST_WORD_SECONDS = 10.0  # time to report to the fleet why a board cannot start


class Starting(DeviceState):
    """Reads the data and chooses the backend.

    If either fails, the process ends and reports the reason to the fleet.
    """

    @override
    def enter(self) -> None:
        try:
            self._prepare()
        except (ConfigError, DataError) as error:
            # An operator who sees only the fleet would otherwise see a board that never appears.
            self._tell_fleet(error)
            raise
        self.ctx.post(Event.LOADED)

    def _prepare(self) -> None:
        ctx = self.ctx
        config = ctx.services.config
        # Before data is read, which may take minutes.
        check_system()
        for doubt in (clock_doubt(), config.ended()):
            if doubt:
                ctx.services.journal.warning(doubt)
        backend = choose_backend(config.backend)
        data = load_data(config.data)
        ctx.setup = DeviceSetup(
            data,
            ctx.services.blobs,
            backend,
            config.known_threads,
            config.holdout,
            own_model=_own_model(config),
            folder=config.state_dir,
            accelerators=config.accelerators(),
            kept_outputs=config.kept_outputs(),
        )
        left_out = f" (left out: {data.facts.left_out_text})" if data.facts.left_out else ""
        ctx.services.journal.info(
            f"data {data.source}: {len(data)} samples{left_out}; backend {backend}"
        )
        # A board whose runtime is broken still joins, so that the fleet shows why it does not
        # train.
        ctx.measurements.unable = self_test(config.state_dir, backend)
        if ctx.measurements.unable:
            ctx.services.journal.error(
                f"this board has joined, but it cannot train: {ctx.measurements.unable}"
            )

    def _tell_fleet(self, error: Exception) -> None:
        """Report to the fleet why this board cannot start; the log has it in any case."""
        ctx = self.ctx
        config = ctx.services.config
        ctx.measurements.unable = single_line(str(error))
        ctx.services.journal.error(
            f"{error}; the board reports this to the fleet if it can reach the broker"
        )
        with contextlib.suppress(ShoalError):
            link = _connect(ctx, min(_LAST_WORD_SECONDS, config.connect_timeout_seconds))
            no_data = ReportedData(examples=0)
            profile = ctx.measurements.profile(config, no_data, ctx.services.memory, ctx.releases)
            ctx.uplink.publish_status(None, profile)
            # The process ends next; without this the message would stay in a buffer.
            link.drain(time.monotonic() + _LAST_WORD_SECONDS)


class Probing(DeviceState):
    """Measures the board, connects, and resumes a task that is on disk."""

    @override
    def enter(self) -> None:
        ctx = self.ctx
        config = ctx.services.config
        ctx.check_conditions()
        link = _connect(ctx, config.connect_timeout_seconds)
        # Before the board announces itself, or its first offer could be lost.
        link.subscribe(ctx.uplink.topics.task(config.device))
        ctx.services.journal.info(f"connected to {link.address}")
        # A damaged record costs the task, not the board: it asks for a new one.
        record, problem = ctx.services.store.load()
        if problem:
            ctx.services.journal.warning(problem)
        if record is not None:
            self._resume(record)
        event = resume_event(ctx.task.record if ctx.task else None, ctx.services.blobs)
        if event is Event.RESUME_POISONED and ctx.task:
            why = _why_poisoned(ctx.task.record)
            ctx.failure = (RefusalReason.FAILED, f"{why}; it will not be tried again")
        ctx.post(event)

    def _resume(self, record: StoredTask) -> None:
        """Make the record the current task, after counting the crash or outage on disk."""
        ctx = self.ctx
        boot = boot_id()
        # Another boot means that power failed; the same boot means that the process died.
        outage = not record.settled and record.boot != boot
        crash = not record.settled and record.boot == boot
        crashes = record.crashes + crash
        outages = record.outages + outage
        now = time.monotonic()
        left = max(0.0, record.seconds_left())
        ctx.hold(
            TaskInHand(
                record,
                deadline=now + left,
                started=now,
                resumed=True,
            )
        )
        # From here on, lines of the journal name the task.
        ctx.services.journal.follow(record.offer)
        # A power cut says nothing about memory; a death during a computation may.
        if record.load is not None and record.phase == record.load.phase and crash:
            ctx.services.memory.record_death(record.load)
        ctx.services.journal.info(
            f"found a task in phase {record.phase}, {crashes=}, {outages=}, seconds_left={left:.0f}"
        )
        try:
            ctx.save(boot=boot, crashes=crashes, outages=outages, settled=False)
        except StorageError as error:
            ctx.services.journal.warning(f"cannot count the crash: {error}")


def _own_model(config: DeviceConfig) -> OwnModel | None:
    """Return the board's own model; None if it has none.

    An incomplete set ends the process here instead of in the first round.
    """
    settings = config.own_model
    if settings is None:
        return None
    model = OwnModel(settings.set, config.state_dir, settings.keep_runs)
    model.check()
    return model


def _connect(ctx: Context, seconds: float) -> Transport:
    """Measure the board, and open its link.

    Raises:
        TransportError: the broker cannot be reached within `connect_timeout_seconds`.
    """
    config = ctx.services.config
    ctx.measurements.board = probe(config.conditions.sysfs)
    link = open_transport(
        config.address(),
        f"shoal-{config.fleet}-{config.device}",
        ctx.services.inbox,
        will=ctx.uplink.farewell(ctx.state.value),
        session_expiry_seconds=_SESSION_EXPIRY_SECONDS,
        member=config.member(),
    )
    ctx.services.journal.info(f"connecting to {link.address}, for up to {seconds:g} s")
    # Only a link that has been connected is closed with a farewell.
    link.connect(seconds)
    ctx.uplink.link = link
    return link


def _why_poisoned(record: StoredTask) -> str:
    if record.outages > record.crashes:
        return (
            f"this board restarted {record.outages} times during this task (check its power supply)"
        )
    return f"this task crashed the agent {record.crashes} times"
