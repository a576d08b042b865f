"""The state of a rollout and its rules: which boards are asked when, and when it stops.

A release is sent to a few boards first, to more if these succeed, and to no others if they fail.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from broker_server.store import TaskPhase
from broker_server.store.task_table import Answer
from fleet_protocol.digests import blob_digest
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.release import Release

# Refusals that do not depend on the release that a board runs.
_EXCUSED = (
    "busy",
    "data-changed",
    "data-mismatch",
    "late",
    "no-data",
    "no-space",
    "too-far",
)
# Phases of tasks whose updates have arrived, with any outcome.
_FINISHED = frozenset({"merged", "left-out", "refused"})
_TASK_REFUSED = frozenset({TaskPhase.DECLINED, TaskPhase.REFUSED})


class Rollout(FrozenModel):
    """How a release is sent to a fleet, and its progress.

    Attributes:
        release: what the operator signed; `signed` is its form as a message.
        stages: shares of the boards that the server has asked after each stage. A stage begins when
            all boards of the earlier stages have finished.
        within_seconds: seconds after which a board has failed if it has not reconnected with the
            release.
        most_failed: share of the boards asked that may fail; if more fail, the rollout stops.
        gate: number of training tasks that each board must have finished with the release before
            the server asks the next boards.
        asked: when each board was asked, in seconds since 1970.
        heard: when the server first received a message from each board that runs the release.
        judged: for each board that runs the release, why the board has failed in a round since;
            empty for a board that has passed the gate.
        paused: whether the server asks no boards for now.
        stopped: why no further boards are asked; empty while the rollout continues.
        told: last reports of the asked boards about this release, which they forget with the next
            one.
        ended: when another rollout replaced it, in seconds since 1970; 0 if none has.
    """

    release: Release
    signed: str
    stages: tuple[float, ...]
    within_seconds: float
    most_failed: float
    gate: int = 0
    asked: Mapping[str, float] = {}
    heard: Mapping[str, float] = {}
    judged: Mapping[str, str] = {}
    paused: bool = False
    stopped: str = ""
    told: Mapping[str, str] = {}
    ended: float = 0.0

    @property
    def state(self) -> str:
        """Return ``going``, ``paused``, ``stopped``, or ``replaced`` by another."""
        if self.ended:
            return "replaced"
        if self.stopped:
            return "stopped"
        return "paused" if self.paused else "going"

    def _last_reports(self, records: Mapping[str, str]) -> Mapping[str, str]:
        """Return the last report of each asked board about this release."""
        number = str(self.release.number)
        reports = dict(self.told)
        for name, record in records.items():
            if name in self.asked and record.split(" ")[1] == number:
                reports[name] = record
        return reports

    def with_answers(
        self, records: Mapping[str, str], now: float, answers: Collection[Answer]
    ) -> "Rollout":
        """Return the rollout with the boards' last reports, and the outcomes of their tasks.

        Args:
            records: what each board reports about its release.
            now: seconds since 1970.
            answers: answers of the tasks that were planned since the server first received a
                message from each board.
        """
        reports = self._last_reports(records)
        heard = {}
        for name in self.asked:
            if reports.get(name, "").startswith("running"):
                heard[name] = now
        heard |= self.heard  # the first time counts
        failed = {}
        finished: Counter[str] = Counter()
        for name, phase, why in answers:
            if phase in _TASK_REFUSED and not str(why).startswith(_EXCUSED):
                failed[name] = f"in a round: {why}"
            if phase.value in _FINISHED:
                finished[name] += 1
        passed = {name: "" for name, count in finished.items() if count >= self.gate}
        # A board that has failed once does not pass later.
        judged = {**passed, **self.judged, **failed}
        return self.model_copy(update={"heard": heard, "judged": judged})

    def outcomes(self, records: Mapping[str, str], now: float) -> dict[str, str]:
        """Return the outcome of each board that was asked.

        Args:
            records: what each board reports about its release.
            now: seconds since 1970.

        Returns:
            By board: ``running``, ``proving`` until the gate, ``failed: why``, or its progress.
        """
        reports = self._last_reports(records)
        # After the end nothing becomes late.
        now = self.ended or now
        outcomes = {}
        for name, asked_at in self.asked.items():
            is_late = now > asked_at + self.within_seconds
            outcomes[name] = self._outcome(name, reports.get(name, "asked"), is_late=is_late)
        return outcomes

    def _outcome(self, name: str, report: str, *, is_late: bool) -> str:
        # A report has a phase, three numbers, and the reason of a failure.
        phase, *details = report.split(" ", 4)
        if phase == "failed":
            return f"failed: {details[-1]}"
        if phase == "running":
            verdict = self.judged.get(name)
            if verdict:
                return f"failed: {verdict}"
            if verdict == "" or not self.gate:
                return "running"
            phase = "proving"
        return "failed: it did not reconnect in time" if is_late else phase

    def advance(self, records: Mapping[str, str], online: Collection[str], now: float) -> "Rollout":
        """Return the rollout a moment later: stopped, or with the boards of its next stage asked.

        Args:
            records: what each board reports about its release.
            online: boards that can be asked.
            now: seconds since 1970.
        """
        states = self.outcomes(records, now)
        reports = self._last_reports(records)
        failures = []
        for name, state in states.items():
            if state.startswith("failed"):
                failures.append(f"{name} {state}")
        # Before anything else: a rollout that has failed asks no board, whatever its stage.
        if self.stopped or len(failures) > self.most_failed * len(states):
            why = self.stopped or f"{len(failures)} of {len(states)} boards: {failures[0]}"
            return self.model_copy(update={"stopped": why, "told": reports})
        ended = len(failures) + list(states.values()).count("running")
        if self.paused or ended < len(states):
            return self.model_copy(update={"told": reports})
        asked = dict.fromkeys(self._next_boards(records, online), now)
        return self.model_copy(update={"asked": {**self.asked, **asked}, "told": reports})

    def _next_boards(self, records: Mapping[str, str], online: Collection[str]) -> list[str]:
        """Return the boards of the next stage, in an order that depends only on this release.

        The same boards would otherwise be the first in every rollout.
        """
        candidates = {}
        for name in online:
            if name in records and name not in self.asked:
                candidates[blob_digest(f"{self.signed}{name}".encode())] = name
        in_order = [candidates[digest] for digest in sorted(candidates)]
        for share in self.stages:
            # Rounded first: 0.07 of 100 boards is a little more than seven as floats.
            count = math.ceil(round(share * len(records), 9)) - len(self.asked)
            if count > 0:
                return in_order[:count]
        return []


VERBS: Mapping[str, tuple[Collection[str], Mapping[str, str | bool]]] = MappingProxyType({
    "pause": (("going",), {"paused": True}),  # boards that were asked continue
    "resume": (("paused",), {"paused": False}),
    "stop": (("going", "paused"), {"stopped": "the operator stopped it"}),
})  # fmt: skip
"""The operator's actions on a rollout: the states in which each is possible, and its effect."""
