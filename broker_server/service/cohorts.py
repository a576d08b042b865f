"""Secure sums in the server: passes keys and sealed shares on, and asks for what removes the masks.

The devices of a cohort go through its steps together. A device that is away or slow when a step
ends is out of the cohort. Nothing is stored: a server that is killed has lost its sums, and the
round is made again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

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

# after the end of the collecting, in which a device still has its task in hand
REVEAL_SECONDS = 30.0
_STEP_SHARE = 0.25  # of the time of the round, for sending keys, and again for dealing shares


class _Step(IntEnum):
    """What a cohort waits for."""

    KEYS = 0
    SHARES = 1
    VECTORS = 2
    SECRETS = 3


@dataclass
class _SecureSum:
    """The sum of one cohort.

    Attributes:
        cohort: the tasks whose updates go into it.
        seconds: how long the steps may take in which keys are sent and shares are dealt.
        until: when the step ends, on the clock of the round.
        members: devices that take part from this step on.
        keys: of the devices that have sent theirs; from the second step on, of those that make
            shares.
        dealt: the sealed shares of each device, by the device that they are for.
        sent: devices whose masked updates are in the sum.
        revealed: the shares that each device has revealed, by the device that they are of.
    """

    cohort: Cohort
    seconds: float
    until: float
    members: tuple[str, ...]
    step: _Step = _Step.KEYS
    keys: dict[str, KeyPair] = field(default_factory=dict)
    dealt: dict[str, Mapping[str, str]] = field(default_factory=dict)
    sent: tuple[str, ...] = ()
    revealed: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def content_for(self, device: str) -> dict[str, object]:
        """Return what a device is sent in this step, as fields of `Sum`."""
        if self.step == _Step.SHARES:
            return {"keys": self.keys}
        if self.step == _Step.VECTORS:
            # Sealed for this device alone: the server passes on what it cannot read.
            return {"dealt": {name: self.dealt[name][device] for name in self.members}}
        return {"sent": self.sent}

    def unanswered(self) -> list[str]:
        """Return the members that have not answered their tasks yet."""
        tasks = self.cohort.tasks
        return [name for name in self.members if not tasks[name].record.phase.answered]

    def answers(self) -> Mapping[str, object]:
        """Return what has come in this step, by device; of the first two steps."""
        return self.keys if self.step == _Step.KEYS else self.dealt


@dataclass
class Cohorts:
    """The secure sums of the open collection.

    Attributes:
        store: records which devices are out of a sum.
        updates: contains the masked updates.
        outbox: sends messages to devices.
        clock: of the round.
    """

    store: Store
    updates: BlobStore
    outbox: Outbox
    clock: Clock
    _sums: list[_SecureSum] = field(default_factory=list)

    def open(self, collection: Collection) -> None:
        """Begin with the sums of a collection."""
        now = self.clock.now()
        seconds = _STEP_SHARE * (collection.deadline - now)
        self._sums = [
            _SecureSum(cohort, seconds, now + seconds, tuple(cohort.tasks))
            for cohort in collection.cohorts()
        ]

    def receive_keys(self, task: OpenTask, keys: KeyPair | None) -> None:
        """Receive the keys of a device, or once more of one that may have missed something.

        Raises:
            RefusedError: there are no keys, or nobody can agree on a secret with them.
        """
        if task.instructions.upload.summing is None:
            return
        secure_sum = self._sum_of(task)
        device = task.record.device
        if keys is None:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"{device} tells no keys for the sum its update goes into",
            )
        if secure_sum.step == _Step.KEYS:
            check_keys(keys)
            secure_sum.keys[device] = keys
        elif secure_sum.keys.get(device) != keys:
            # The others have agreed on masks with its keys before; new ones would not remove them.
            self._drop(task, "it was restarted within a secure sum, or came too late for one")
        else:
            self._send(secure_sum, device)

    def receive_shares(self, task: OpenTask, message: Shares) -> None:
        """Receive shares that a device deals or reveals.

        Raises:
            RefusedError: they are not the shares that it was asked for.
        """
        secure_sum = self._sum_of(task)
        device = task.record.device
        members = secure_sum.members
        for_all = bool(message.sealed) and message.sealed.keys() == secure_sum.keys.keys()
        if for_all and device in secure_sum.keys:
            if secure_sum.step == _Step.SHARES:
                secure_sum.dealt[device] = message.sealed
            return
        is_asked = secure_sum.step == _Step.SECRETS and device in members
        if not is_asked or message.revealed.keys() != set(members):
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"{device} tells shares that it was not asked for",
            )
        secure_sum.revealed[device] = message.revealed

    def require_due(self, task: OpenTask) -> None:
        """Refuse a masked update that comes before the shares that could remove its masks.

        Raises:
            RefusedError: it does.
        """
        if task.instructions.upload.summing is None:
            return
        secure_sum = self._sum_of(task)
        if secure_sum.step <= _Step.SHARES or task.record.device not in secure_sum.members:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                "an update whose masks nobody could take off a sum",
            )

    def advance_due(self, is_online: Callable[[str], bool]) -> None:
        """Begin the next step of every sum that waits for no device any more."""
        for secure_sum in self._sums:
            if secure_sum.step > _Step.SHARES:
                continue
            answers = secure_sum.answers()
            members: list[str] = []
            is_awaited = False
            for name in secure_sum.unanswered():
                if name in answers:
                    members.append(name)
                elif is_online(name):
                    is_awaited = True
            if is_awaited and self.clock.now() < secure_sum.until:
                continue
            secure_sum.members = tuple(members)
            self._advance(secure_sum)

    def _advance(self, secure_sum: _SecureSum) -> None:
        if secure_sum.step == _Step.KEYS:
            # From now on these are the devices that make shares, also of those that drop out later.
            secure_sum.keys = {name: secure_sum.keys[name] for name in secure_sum.members}
        detail = "it was away when the others of its secure sum went on"
        try:
            secure_sum.cohort.require(len(secure_sum.members), len(secure_sum.keys))
        except RefusedError as error:
            # Fewer could reveal one device's update: nobody goes on.
            secure_sum.members = ()
            detail = str(error)
        secure_sum.step = _Step(secure_sum.step + 1)
        secure_sum.until = self.clock.now() + secure_sum.seconds
        for name, task in secure_sum.cohort.tasks.items():
            if name not in secure_sum.members:
                self._drop(task, detail)
            self._send(secure_sum, name)

    def _sum_of(self, task: OpenTask) -> _SecureSum:
        for secure_sum in self._sums:
            # The same device may have a task that goes on from an earlier collection.
            if secure_sum.cohort.tasks.get(task.record.device) is task:
                return secure_sum
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"the update of {task.record.device} goes into no secure sum",
        )

    def _send(self, secure_sum: _SecureSum, device: str) -> None:
        if device in secure_sum.members:
            record = secure_sum.cohort.tasks[device].record
            self.outbox.send_about(Sum, record, **secure_sum.content_for(device))

    def _drop(self, task: OpenTask, detail: str) -> None:
        if not task.record.phase.answered:
            self.store.settle([task.record.id], TaskPhase.MISSED, detail)
            task.record = replace(task.record, phase=TaskPhase.MISSED, detail=detail)
            self.outbox.send_about(Cancel, task.record, reason=detail)

    def total(self, cohort: Cohort, pump: Callable[[float], None]) -> Words:
        """Return the sum of the updates of a cohort, for `rounds.dispatch.Dispatcher.total`.

        Args:
            cohort: of which some updates have come.
            pump: handles events, and waits until a time on the round's clock at most.

        Raises:
            RefusedError: there are too few updates, or the masks cannot be removed.
        """
        records = {task.record.device: task.record for task in cohort.received}
        secure_sum = self._sum_of(cohort.received[0])
        until = self.clock.now() + REVEAL_SECONDS
        cohort.require(len(records), len(secure_sum.keys))
        secure_sum.step = _Step.SECRETS
        secure_sum.sent = tuple(records)
        for name in secure_sum.members:
            self._send(secure_sum, name)
        # So many shares restore a secret; those of devices that are gone are not waited for.
        needed = majority(len(secure_sum.keys))
        while len(secure_sum.revealed) < needed and self.clock.now() < until:
            pump(until)
        vectors = {
            name: self.updates.tensors(str(record.update_digest))[MASKED]
            for name, record in records.items()
        }
        return unmasked(
            vectors,
            secure_sum.keys,
            secure_sum.members,
            secure_sum.revealed,
            cohort.received[0].record.weights.digest,
        )

    def close(self) -> None:
        """Acknowledge the updates in the sums, which releases their devices.

        These kept their tasks for their shares; they are released also where no sum came of it.
        """
        for secure_sum in self._sums:
            for task in secure_sum.cohort.tasks.values():
                if task.record.update_digest is not None:
                    self.outbox.send_about(UploadAck, task.record)
        self._sums = []
