"""The store as one object: every method is one transaction and returns frozen records."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, func, insert, select, text, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from broker_server.store import schema
from broker_server.store.configurations import is_run_name, save_config
from broker_server.store.machine import RoundEvent, RoundState, advance
from broker_server.store.records import (
    DeviceRecord,
    EventRecord,
    RefusalRecord,
    RoundRecord,
    RunRecord,
    VersionRecord,
)
from broker_server.store.rows import from_row, to_row
from broker_server.store.task_records import Outcome, TaskPhase, TaskRecord
from broker_server.store.task_table import OF_TASK, TaskTable
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.errors import RefusalReason, single_line
from fleet_protocol.messages import DeviceProfile, DeviceStatus

_LOG = logging.getLogger(__name__)

UNFINISHED = ("running", "paused")
# By the order in which they came: a clock may have been ahead.
_NEWEST_FIRST = text("rowid DESC")
_DEVICE = sqlite_insert(schema.devices)
_SEE = _DEVICE.on_conflict_do_update(
    index_elements=["fleet", "id"],
    set_={
        "online": _DEVICE.excluded.online,
        "state": _DEVICE.excluded.state,
        "last_seen_at": _DEVICE.excluded.last_seen_at,
    },
)
_LEARN = _DEVICE.on_conflict_do_update(
    index_elements=["fleet", "id"],
    set_={
        "profile": _DEVICE.excluded.profile,
        "last_seen_at": _DEVICE.excluded.last_seen_at,
    },
)
_LINE = insert(schema.events)
_REFUSAL = sqlite_insert(schema.refusals)
_COUNT = _REFUSAL.on_conflict_do_update(
    index_elements=["run", "device", "reason", "by"],
    set_={"count": schema.refusals.c.count + _REFUSAL.excluded.count},
)


_SETTLE = OF_TASK.values({name: bindparam(name) for name in ("phase", "detail", "screening")})


def _settled(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    return [
        {
            "task": task,
            "phase": item.phase.value,
            "detail": item.detail,
            "screening": item.screening.model_dump_json(),
        }
        for task, item in outcomes.items()
    ]


class Store(TaskTable):
    """The database of a fleet.

    See `broker_server.store.task_table.Database` for how it is opened.
    """

    # Runs: begun with their initial version, ended once, found again when nobody works on them.

    def add_run(self, run: RunRecord, first: VersionRecord) -> None:
        """Begin a run with its initial version, and the caller's own configuration."""
        unsigned = save_config(self.folder, run.id, run.config)
        with self._begin() as connection:
            connection.execute(insert(schema.runs).values(to_row(run)))
            connection.execute(insert(schema.versions).values(to_row(first)))
        self._say_unsigned(run.id, unsigned)

    def end_run(self, run: str, status: str, detail: str | None) -> None:
        """Say how a run ended."""
        self._set_run(run, status=status, detail=detail, ended_at=time.time())

    def set_status(self, run: str, status: str) -> None:
        """Say that a run which has not ended is held, or goes on."""
        self._set_run(run, status=status)

    def record_request(self, run: str, detail: str | None) -> None:
        """Say what an operator wants of a run that has not ended, for a server that starts again.

        None: to go on.
        """
        self._set_run(run, detail=detail, **({"status": "running"} if detail is None else {}))

    def record_config(self, run: str, config: str) -> None:
        """Record the configuration with which a run resumes, which is the caller's own."""
        unsigned = save_config(self.folder, run, config)
        self._set_run(run, config=config)
        self._say_unsigned(run, unsigned)

    def _say_unsigned(self, run: str, why: str | None) -> None:
        if why is not None:
            _LOG.warning(why)
            self.log("configuration-unsigned", why, run=run)

    def add_bytes(self, run: str, *, wire: int, payload: int) -> None:
        """Add to a run's totals."""
        known = schema.runs.c
        self._set_run(
            run,
            wire_bytes=known.wire_bytes + wire,
            payload_bytes=known.payload_bytes + payload,
        )

    def _set_run(self, run: str, **values: object) -> None:
        self._write(update(schema.runs).where(schema.runs.c.id == run).values(**values))

    def runs(self) -> list[RunRecord]:
        """Every run, newest first."""
        return self._all(RunRecord, select(schema.runs).order_by(_NEWEST_FIRST))

    def run(self, run: str) -> RunRecord | None:
        """One run."""
        return self._first(RunRecord, select(schema.runs).where(schema.runs.c.id == run))

    def unfinished(self, fleet: str) -> RunRecord | None:
        """The newest run of a fleet that has not ended, and whose id is a name: see `invalid_run_ids`."""
        return next(
            (from_row(RunRecord, row) for row in self._unfinished(fleet) if is_run_name(row.id)),
            None,
        )

    def invalid_run_ids(self, fleet: str) -> list[str]:
        """Ids of unfinished runs of a fleet that no server resumes, because no server gave them
        such an id.
        """
        return [str(row.id) for row in self._unfinished(fleet) if not is_run_name(row.id)]

    def _unfinished(self, fleet: str) -> Sequence[Any]:
        """Unchecked rows of the runs of a fleet that have not ended, newest first."""
        table = schema.runs
        query = select(table).where(table.c.fleet == fleet, table.c.status.in_(UNFINISHED))
        return self._rows(query.order_by(_NEWEST_FIRST))

    # Devices: what each last said about itself.

    def record_device(self, said: DeviceStatus | DeviceProfile) -> None:
        """Remember what a device said about itself, with the next commit."""
        now = time.time()
        row = {
            "fleet": said.fleet,
            "id": said.device,
            "online": False,
            "state": "announced",
            "profile": None,
        }
        row |= {"first_seen_at": now, "last_seen_at": now}
        # One row waits for each device and kind of word: the last one.
        key = said.fleet, said.device
        if isinstance(said, DeviceProfile):
            self._later(
                _LEARN,
                {**row, "profile": said.profile.model_dump_json()},
                (*key, "profile"),
            )
        else:
            self._later(
                _SEE,
                {**row, "online": said.online, "state": said.state},
                (*key, "status"),
            )

    def set_presence(self, device: str, state: str, *, online: bool = False) -> None:
        """Remember that a device is away or there again, which it does not say itself."""
        self.flush()
        self._write(
            update(schema.devices)
            .where(schema.devices.c.id == device)
            .values(online=online, state=state)
        )

    def known_devices(self, fleet: str) -> list[DeviceRecord]:
        """Those of a fleet whose server begins: each is offline until it says something else.

        One that cannot be read is left out, with a warning: it says anew what it is.
        """
        table = schema.devices
        self._write(update(table).where(table.c.fleet == fleet).values(online=False))
        return self._readable(
            DeviceRecord,
            select(table).where(table.c.fleet == fleet).order_by(table.c.id),
        )

    def devices(self, fleet: str | None = None) -> list[DeviceRecord]:
        """Every device that was ever seen, by id."""
        self.flush()
        query = select(schema.devices).order_by(schema.devices.c.id)
        return self._all(
            DeviceRecord,
            query if fleet is None else query.where(schema.devices.c.fleet == fleet),
        )

    # Rounds: planned with their tasks, moved by the table of `broker_server.store.machine` alone.

    def plan_round(self, record: RoundRecord, tasks: Sequence[TaskRecord]) -> None:
        """Store a planned round with all its tasks."""
        with self._begin() as connection:
            connection.execute(insert(schema.rounds).values(to_row(record)))
            if tasks:
                connection.execute(insert(schema.tasks), [to_row(task) for task in tasks])

    def rounds(self, run: str, *, last: int | None = None) -> list[RoundRecord]:
        """The rounds of a run in order, or the last so many."""
        table = schema.rounds
        query = select(table).where(table.c.run == run).order_by(table.c.number.desc())
        return self._all(RoundRecord, query.limit(last))[::-1]

    def last_round(self, run: str) -> RoundRecord | None:
        """The newest round of a run."""
        table = schema.rounds
        return self._first(
            RoundRecord,
            select(table).where(table.c.run == run).order_by(table.c.number.desc()),
        )

    def advance_round(
        self,
        record: RoundRecord,
        what: RoundEvent,
        *,
        reason: str | None = None,
        evaluation: VersionEvaluation | None = None,
        note: str | None = None,
        collect_seconds: float | None = None,
        waits: bool = False,
    ) -> RoundRecord:
        """Move a round by its table and commit it with what is said of its end.

        Or it `waits` for what has not come.

        An event that its state does not know is a RoundTransitionError.
        """
        state = advance(record.state, what)
        values: dict[str, Any] = {"state": state.value}
        if state is RoundState.OPEN:
            values["opened_at"] = time.time()
        if state is RoundState.MERGING:
            values["ending"] = what.value
        if collect_seconds is not None:
            values["collect_seconds"] = collect_seconds
        if state in {RoundState.CLOSED, RoundState.ABANDONED}:
            encoded = evaluation.model_dump_json() if evaluation is not None else None
            values |= {
                "ended_at": time.time(),
                "reason": reason,
                "evaluation": encoded,
                "note": note,
            }
        tasks = schema.tasks
        table = schema.rounds
        of_round = (tasks.c.run == record.run) & (tasks.c.round == record.number)
        with self._begin() as connection:
            connection.execute(
                update(table)
                .where(table.c.run == record.run, table.c.number == record.number)
                .values(values)
            )
            if state in {RoundState.MERGING, RoundState.ABANDONED} and not waits:
                # Nothing is taken any more: what has not come is missed.
                connection.execute(
                    update(tasks)
                    .where(of_round & (tasks.c.phase == TaskPhase.OFFERED.value))
                    .values(phase=TaskPhase.MISSED.value)
                )
            row = connection.execute(
                select(table).where(table.c.run == record.run, table.c.number == record.number)
            ).one()
        return from_row(RoundRecord, row)

    # The log: what happened, line by line, and how often what was refused; on the disk with the
    # next commit.

    def log(
        self,
        kind: str,
        detail: str,
        *,
        run: str | None = None,
        number: int | None = None,
        device: str | None = None,
    ) -> None:
        """Write a line of the log."""
        device = device and single_line(device)
        detail = single_line(detail)
        self._later(
            _LINE,
            {
                "at": time.time(),
                "run": run,
                "round": number,
                "device": device,
                "kind": kind,
                "detail": detail,
            },
        )

    def count_refusal(
        self, run: str, device: str, reason: RefusalReason, by: str, times: int = 1
    ) -> None:
        """Count refusals by ``server`` or ``device``.

        Run and device are empty where there is none.
        """
        self._later(
            _COUNT,
            {
                "run": run,
                "device": device,
                "reason": reason.value,
                "by": by,
                "count": times,
            },
        )

    def events(
        self, run: str | None = None, *, last: int | None = None, after: int = 0
    ) -> list[EventRecord]:
        """Lines of the log, oldest first: of one run, the last so many, those after the one with an
        id.
        """
        self.flush()
        query = (
            select(schema.events)
            .where(schema.events.c.id > after)
            .order_by(schema.events.c.id.desc())
        )
        if run is not None:
            query = query.where(schema.events.c.run == run)
        return self._all(EventRecord, query if last is None else query.limit(last))[::-1]

    def marked_rounds(self, run: str, kind: str) -> dict[str | None, int]:
        """The round that the newest line of one kind names, by device."""
        self.flush()
        table = schema.events
        query = select(table.c.device, table.c.round).where(
            table.c.run == run, table.c.kind == kind
        )
        rows = self._values(EventRecord, ("device", "round"), query.order_by(table.c.id))
        return {device: number or 0 for device, number in rows}

    def count_lines(self, run: str, kinds: Collection[str]) -> dict[str, int]:
        """How many lines a run has of each of these kinds."""
        self.flush()
        table = schema.events
        of = table.c.run == run, table.c.kind.in_(kinds)
        return dict(
            self._rows(select(table.c.kind, func.count()).where(*of).group_by(table.c.kind))
        )

    def refusals(self, run: str | None = None) -> list[RefusalRecord]:
        """How often what was refused."""
        self.flush()
        table = schema.refusals
        query = select(table).order_by(table.c.run, table.c.device, table.c.reason)
        return self._all(RefusalRecord, query if run is None else query.where(table.c.run == run))

    # Global versions: each stored with the tasks that are merged in it, and judged afterwards.

    def add_version(self, version: VersionRecord, outcomes: Mapping[str, Outcome]) -> None:
        """Store a new global version and, with it, what became of the updates of its round, by
        task.
        """
        with self._begin() as connection:
            connection.execute(insert(schema.versions).values(to_row(version)))
            if outcomes:
                connection.execute(_SETTLE, _settled(outcomes))

    def repeat_version(self, copy: VersionRecord) -> bool:
        """Store a version that repeats an earlier one.

        False, and nothing stored, while its run is going on.
        """
        table = schema.runs
        going = select(table.c.id).where(table.c.id == copy.run, table.c.status == "running")
        with self._begin() as connection:
            free = connection.execute(going).first() is None
            if free:
                connection.execute(insert(schema.versions).values(to_row(copy)))
        return free

    def settle_outcomes(self, outcomes: Mapping[str, Outcome]) -> None:
        """Store what became of updates of a round that has no version, by task."""
        self._write(_SETTLE, _settled(outcomes))

    def judge_version(
        self,
        run: str,
        number: int,
        *,
        statistics: str | None = None,
        evaluation: VersionEvaluation | None = None,
    ) -> None:
        """Add the digest of its statistics, or its evaluation, to a version."""
        values: dict[str, Any] = {}
        if statistics is not None:
            values["statistics_digest"] = statistics
        if evaluation is not None:
            values["evaluation"] = evaluation.model_dump_json()
        table = schema.versions
        self._write(
            update(table).where(table.c.run == run, table.c.number == number).values(values)
        )

    def judge_closed(
        self,
        version: VersionRecord,
        evaluation: VersionEvaluation | None,
        note: str | None,
    ) -> None:
        """Add to a version and to its closed round, at once, what was found about it, or why
        nothing was.
        """
        encoded = evaluation.model_dump_json() if evaluation is not None else None
        versions = schema.versions
        rounds = schema.rounds
        mine = update(versions).where(
            versions.c.run == version.run, versions.c.number == version.number
        )
        its = update(rounds).where(rounds.c.run == version.run, rounds.c.number == version.round)
        with self._begin() as connection:
            connection.execute(mine.values(evaluation=encoded))
            connection.execute(its.values(evaluation=encoded, note=note))

    def used_blobs(self, digests: Collection[str], *, beside: str = "") -> set[str]:
        """Which blobs are the weights of versions, of all runs beside one: the same weights are one
        blob.
        """
        table = schema.versions
        query = select(table.c.digest).where(table.c.run != beside, table.c.digest.in_(digests))
        return {digest for (digest,) in self._rows(query)}

    def versions(self, run: str, *, last: int | None = None) -> list[VersionRecord]:
        """The global versions of a run in order, or the last so many."""
        table = schema.versions
        query = select(table).where(table.c.run == run).order_by(table.c.number.desc())
        return self._all(VersionRecord, query.limit(last))[::-1]

    def version(self, run: str, number: int | None = None) -> VersionRecord | None:
        """One global version, by default the newest."""
        table = schema.versions
        query = select(table).where(table.c.run == run).order_by(table.c.number.desc())
        return self._first(
            VersionRecord,
            query if number is None else query.where(table.c.number == number),
        )
