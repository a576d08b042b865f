"""Secure sums as a server sees them: it passes keys and sealed shares on, and asks for what takes
masks off a sum.

A cohort goes through its steps together; who is away or slow when a step is over is out of it.
Nothing is stored: a server that is killed has lost its sums, and the round is made again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from broker_server.rounds.collecting import Cohort, Collection, OpenTask
from broker_server.service.clock import Clock
from broker_server.service.outbox import Outbox
from broker_server.store import Store, TaskPhase
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import Cancel, Shares, Sum, UploadAck
from fleet_protocol.messages.values import KeyPair
from fleet_protocol.secure_sum import Words, check_keys, majority, unmasked
from fleet_protocol.weights import MASKED

REVEAL_SECONDS = (
    30.0  # after the end of the collecting, in which a device still has its task in hand
)
_KEYS, _SHARES, _VECTORS, _SECRETS = range(4)  # what a cohort waits for
_STEP_SHARE = 0.25  # of the time of the round, for telling keys, and again for dealing shares


@dataclass
class _Sum:
    """One cohort's: its step, how long that may take, who takes part in it, and what the devices
    told, by name.
    """

    cohort: Cohort
    seconds: float
    until: float
    part: tuple[str, ...]
    step: int = _KEYS
    keys: dict[str, KeyPair] = field(
        default_factory=dict
    )  # from the second step on of those that make shares
    dealt: dict[str, Mapping[str, str]] = field(default_factory=dict)
    sent: tuple[str, ...] = ()
    revealed: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def told(self, device: str) -> dict[str, object]:
        """What a device is told in this step, as `fleet_protocol.messages.Sum` has it."""
        if self.step == _SHARES:
            return {"keys": self.keys}
        if self.step == _VECTORS:
            return {"dealt": {name: self.dealt[name][device] for name in self.part}}
        return {"sent": self.sent}


@dataclass
class Cohorts:
    """The secure sums of the open collection."""

    store: Store  # where it is noted who is out
    updates: BlobStore  # with the masked updates
    outbox: Outbox  # speaks to the devices
    clock: Clock  # that of the round
    _sums: list[_Sum] = field(default_factory=list)

    def open(self, collection: Collection) -> None:
        """Begin with the sums of a collection."""
        now = self.clock.now()
        seconds = _STEP_SHARE * (collection.deadline - now)
        self._sums = [
            _Sum(item, seconds, now + seconds, tuple(item.tasks)) for item in collection.cohorts()
        ]

    def join(self, task: OpenTask, keys: KeyPair | None) -> None:
        """A device tells its keys, or tells them again because it may have missed something.

        Raises:
            RefusedError: with these keys nobody can agree on anything, or there are none.
        """
        if task.instructions.upload.summing is None:
            return
        item = self._of(task)
        device = task.record.device
        if keys is None:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"{device} tells no keys for the sum its update goes into",
            )
        if item.step == _KEYS:
            check_keys(keys)
            item.keys[device] = keys
        elif item.keys.get(device) != keys:
            self._drop(task, "it was restarted within a secure sum, or came too late for one")
        else:
            self._tell(item, device)

    def take(self, task: OpenTask, said: Shares) -> None:
        """A device deals or reveals shares.

        A RefusedError where they are not those that it was asked for.
        """
        item = self._of(task)
        device = task.record.device
        if said.sealed and said.sealed.keys() == item.keys.keys() and device in item.keys:
            if item.step == _SHARES:
                item.dealt[device] = said.sealed
        elif (
            item.step == _SECRETS and device in item.part and said.revealed.keys() == set(item.part)
        ):
            item.revealed[device] = said.revealed
        else:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"{device} tells shares that it was not asked for",
            )

    def expect(self, task: OpenTask) -> None:
        """See that an update is due: one that is masked comes after the shares that could take its
        masks off.

        Raises:
            RefusedError: it is not.
        """
        if task.instructions.upload.summing is None:
            return
        item = self._of(task)
        if item.step <= _SHARES or task.record.device not in item.part:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                "an update whose masks nobody could take off a sum",
            )

    def turn(self, is_online: Callable[[str], bool]) -> None:
        """Begin the next step wherever nobody is waited for any more."""
        for item in self._sums:
            told: Mapping[str, object] = item.keys if item.step == _KEYS else item.dealt
            left = [name for name in item.part if not item.cohort.tasks[name].record.phase.answered]
            waits = self.clock.now() < item.until and any(
                name not in told and is_online(name) for name in left
            )
            if item.step <= _SHARES and not waits:
                item.part = tuple(name for name in left if name in told)
                self._advance(item)

    def _advance(self, item: _Sum) -> None:
        if item.step == _KEYS:
            item.keys = {name: item.keys[name] for name in item.part}
        detail = "it was away when the others of its secure sum went on"
        try:
            item.cohort.require(len(item.part), len(item.keys))
        except RefusedError as error:
            item.part, detail = (), str(error)
        item.step, item.until = item.step + 1, self.clock.now() + item.seconds
        for name, task in item.cohort.tasks.items():
            if name not in item.part:
                self._drop(task, detail)
            self._tell(item, name)

    def _of(self, task: OpenTask) -> _Sum:
        for item in self._sums:
            if item.cohort.tasks.get(task.record.device) is task:
                return item
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"the update of {task.record.device} goes into no secure sum",
        )

    def _tell(self, item: _Sum, device: str) -> None:
        if device in item.part:
            self.outbox.tell(Sum, item.cohort.tasks[device].record, **item.told(device))

    def _drop(self, task: OpenTask, detail: str) -> None:
        if not task.record.phase.answered:
            self.store.settle([task.record.id], TaskPhase.MISSED, detail)
            task.record = replace(task.record, phase=TaskPhase.MISSED, detail=detail)
            self.outbox.tell(Cancel, task.record, reason=detail)

    def total(self, cohort: Cohort, pump: Callable[[float], None]) -> Words:
        """What `broker_server.rounds.dispatch.Dispatcher.total` does.

        ``pump`` waits until a time at most.
        """
        came = {task.record.device: task.record for task in cohort.came}
        item = self._of(cohort.came[0])
        until = self.clock.now() + REVEAL_SECONDS
        cohort.require(len(came), len(item.keys))
        item.step, item.sent = _SECRETS, tuple(came)
        for name in item.part:
            self._tell(item, name)
        while len(item.revealed) < majority(len(item.keys)) and self.clock.now() < until:
            pump(until)
        vectors = {
            name: self.updates.tensors(str(record.update_digest))[MASKED]
            for name, record in came.items()
        }
        return unmasked(
            vectors,
            item.keys,
            item.part,
            item.revealed,
            cohort.came[0].record.weights.digest,
        )

    def close(self) -> None:
        """Release the devices whose updates are in a sum.

        They kept their tasks in hand for their shares.
        """
        for item in self._sums:
            for task in item.cohort.tasks.values():
                if task.record.update_digest is not None:  # also where no sum came of it
                    self.outbox.tell(UploadAck, task.record)
        self._sums = []
