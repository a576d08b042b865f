"""Secure sums in the server: forwards keys and sealed shares, and requests what removes the masks.

The devices of a cohort go through its steps together (`fleet_protocol.secure_sum`). A device that
is offline or slow when a step ends is dropped from the cohort, and one that cheats is refused by
name. Until a sum is opened nothing is stored: a killed server runs the round again. From then on it
finishes the sum after a restart (`broker_server.service.begun_sums`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from broker_server.rounds.collecting import Cohort, CohortSum, Collection, OpenTask
from broker_server.rounds.reporting import Reporter
from broker_server.service.begun_sums import BegunSum, BegunSums
from broker_server.service.clock import Clock
from broker_server.service.outbox import Outbox
from broker_server.service.secure_sum import SecureSum, SumStep, content_by_step
from broker_server.store import Store, TaskPhase
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import Cancel, Shares, Sum, UploadAck
from fleet_protocol.messages.values import MemberKeys
from fleet_protocol.secure_sum.checks import examine, judge, new_challenge
from fleet_protocol.secure_sum.masks import check_keys
from fleet_protocol.secure_sum.opening import Secrets, restore_secrets, unmasked
from fleet_protocol.weights import MASKED

# after the end of the collection, during which a device still has its current task
REVEAL_SECONDS = 30.0
_STEP_SHARE = 0.2  # of the time of the round, for each of the four steps before the vectors


@dataclass
class Cohorts:
    """The secure sums of the open collection.

    Attributes:
        store: records which devices were dropped from a sum.
        updates: contains the masked updates.
        outbox: sends messages to devices.
        clock: clock of the round.
        reporter: counts and logs what devices are refused for.
    """

    store: Store
    updates: BlobStore
    outbox: Outbox
    clock: Clock
    reporter: Reporter
    _sums: list[SecureSum] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begun = BegunSums(self.store.folder)

    def open(self, collection: Collection) -> None:
        """Begin the sums of a collection, or continue those whose opening has begun."""
        now = self.clock.now()
        seconds = _STEP_SHARE * (collection.deadline - now)
        self._sums = []
        for cohort in collection.cohorts():
            secure_sum = SecureSum(cohort, seconds, now + seconds, tuple(cohort.tasks))
            self._sums.append(secure_sum)
        if self._sums:
            self._restore_begun(collection.number)

    def _restore_begun(self, number: int) -> None:
        """Continue the sums of a round that a killed server had begun to open."""
        begun_sums = self._begun.load(self.reporter.run, number)
        begun_by_devices = {begun.devices: begun for begun in begun_sums}
        for secure_sum in self._sums:
            begun = begun_by_devices.get(tuple(secure_sum.cohort.tasks))
            if begun is not None:
                secure_sum.step = SumStep.SECRETS
                secure_sum.keys = dict(begun.keys)
                secure_sum.members = begun.members
                secure_sum.sent = begun.sent

    @property
    def has_begun(self) -> bool:
        """Return whether a sum of the open collection is being opened."""
        return any(secure_sum.step >= SumStep.SECRETS for secure_sum in self._sums)

    # Messages.

    def receive_keys(self, task: OpenTask, keys: MemberKeys | None) -> None:
        """Receive the keys of a device, possibly again if it may have missed a message.

        Raises:
            RefusedError: the keys are missing, or are not valid for a key agreement.
        """
        if task.instructions.upload.summing is None:
            return
        secure_sum = self._sum_of(task)
        device = task.record.device
        if keys is None:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"{device} sent no keys for the secure sum",
            )
        if secure_sum.step == SumStep.KEYS:
            check_keys(keys)
            secure_sum.keys[device] = keys
        elif secure_sum.keys.get(device) != keys:
            # The other devices have derived masks from its previous keys; new keys could not remove
            # them.
            self._drop(task, "it was restarted during a secure sum, or was too late for one")
        else:
            self._send(secure_sum, device)

    def receive_shares(self, task: OpenTask, message: Shares) -> None:
        """Receive a device's answer to a step.

        Raises:
            RefusedError: the answer does not match the request.
        """
        secure_sum = self._sum_of(task)
        device = task.record.device
        for step, content in content_by_step(message).items():
            is_expected = bool(content) and content.keys() == secure_sum.expected_names(
                step, device
            )
            if is_expected and step <= secure_sum.step:
                # A repeated or late answer changes nothing: the other devices were asked about
                # those that had answered in time.
                if step == secure_sum.step:
                    secure_sum.of_step(step).setdefault(device, content)
                return
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"{device} sent shares that were not requested",
        )

    def require_due(self, task: OpenTask) -> None:
        """Refuse a masked update if its device cannot know yet which members share its masks.

        Raises:
            RefusedError: the update is of that kind.
        """
        if task.instructions.upload.summing is None:
            return
        secure_sum = self._sum_of(task)
        is_early = secure_sum.step < SumStep.VECTORS
        if is_early or task.record.device not in secure_sum.members:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                "an update whose masks could not be removed from a sum",
            )

    # Steps.

    def advance_due(self, is_online: Callable[[str], bool]) -> None:
        """Begin the next step of every sum that no longer waits for any device."""
        for secure_sum in self._sums:
            if secure_sum.step >= SumStep.VECTORS:
                continue
            is_awaited = any(is_online(device) for device in secure_sum.awaited())
            if not is_awaited or self.clock.now() >= secure_sum.until:
                self._advance(secure_sum)

    def _advance(self, secure_sum: SecureSum) -> None:
        remaining = secure_sum.remaining()
        liars: Mapping[str, str] = {}
        match secure_sum.step:
            case SumStep.KEYS:
                # From now on these devices make shares, also for those that drop out later.
                secure_sum.keys = {name: secure_sum.keys[name] for name in remaining}
                secure_sum.step = SumStep.SHARES
            case SumStep.SHARES:
                secure_sum.challenge = new_challenge()
                secure_sum.step = SumStep.CHECKS
            case SumStep.CHECKS:
                liars = self._examine(secure_sum)
                secure_sum.step = SumStep.OPENINGS if secure_sum.disputes else SumStep.VECTORS
            case _:
                openings = secure_sum.of_step(SumStep.OPENINGS)
                liars = judge(secure_sum.dealings(), secure_sum.disputes, openings)
                secure_sum.step = SumStep.VECTORS
        self._refuse(secure_sum, liars)
        secure_sum.members = tuple(name for name in remaining if name not in liars)
        self._begin_step(secure_sum)

    def _examine(self, secure_sum: SecureSum) -> Mapping[str, str]:
        """Find the dealers of bad shares, and the devices that have to prove theirs."""
        findings = examine(secure_sum.dealings())
        disputes = {}
        for dealer, members in findings.disputes.items():
            # Nobody has to answer a device that cheats itself.
            honest = members - findings.liars.keys()
            if honest:
                disputes[dealer] = honest
        secure_sum.disputes = disputes
        return findings.liars

    def _begin_step(self, secure_sum: SecureSum) -> None:
        """Send the messages of the step, and drop the devices that are not among its members."""
        detail = "it was offline when the other devices of its secure sum moved on to the next step"
        try:
            secure_sum.cohort.require(len(secure_sum.members), len(secure_sum.keys))
        except RefusedError as error:
            # Fewer devices could reveal one device's update, so none continues.
            secure_sum.members = ()
            secure_sum.step = SumStep.VECTORS
            detail = str(error)
        secure_sum.until = self.clock.now() + secure_sum.seconds
        for name, task in secure_sum.cohort.tasks.items():
            if name not in secure_sum.members:
                self._drop(task, detail)
            self._send(secure_sum, name)

    def _sum_of(self, task: OpenTask) -> SecureSum:
        for secure_sum in self._sums:
            # The same device may have a task that continues from an earlier collection.
            if secure_sum.cohort.tasks.get(task.record.device) is task:
                return secure_sum
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"the update of {task.record.device} is not part of any secure sum",
        )

    def _send(self, secure_sum: SecureSum, device: str) -> None:
        if device not in secure_sum.members:
            return
        content = secure_sum.content_for(device)
        if content:
            self.outbox.send_about(Sum, secure_sum.cohort.tasks[device].record, **content)

    def _drop(self, task: OpenTask, detail: str) -> None:
        self._settle(task, TaskPhase.MISSED, detail)

    def _refuse(self, secure_sum: SecureSum, liars: Mapping[str, str]) -> None:
        """Count devices that cheat, and drop those whose update is not in the sum yet."""
        for name, why in liars.items():
            task = secure_sum.cohort.tasks[name]
            self.reporter.refused(
                RefusalReason.BAD_SHARES, why, device=name, number=task.record.round
            )
            self._settle(task, TaskPhase.REFUSED, f"{RefusalReason.BAD_SHARES.value}: {why}")

    def _settle(self, task: OpenTask, phase: TaskPhase, detail: str) -> None:
        if not task.record.phase.answered:
            self.store.settle([task.record.id], phase, detail)
            task.record = replace(task.record, phase=phase, detail=detail)
            self.outbox.send_about(Cancel, task.record, reason=detail)

    # Opening.

    def obstacle(self, cohort: Cohort) -> str:
        """Return why the sum of a cohort cannot be opened; empty if it can."""
        secure_sum = self._sum_of(cohort.received[0])
        if secure_sum.step >= SumStep.SECRETS:
            return ""
        try:
            _require_openable(secure_sum)
        except RefusedError as error:
            return str(error)
        return ""

    def total(self, cohort: Cohort, pump: Callable[[float], None]) -> CohortSum:
        """Return the sum of the updates of a cohort, for `rounds.dispatch.Dispatcher.total`.

        Args:
            cohort: some of its updates have arrived.
            pump: handles events, and waits until a time on the round's clock at most.

        Raises:
            RefusedError: too few updates arrived, or the masks cannot be removed.
        """
        secure_sum = self._sum_of(cohort.received[0])
        if secure_sum.step < SumStep.SECRETS:
            self._begin_opening(secure_sum)
        for name in secure_sum.sent:
            self._send(secure_sum, name)
        restored = self._restore_secrets(secure_sum, pump)
        self._refuse(secure_sum, restored.liars)
        if restored.unmatched:
            self._ask_for_pair_keys(secure_sum, restored.unmatched, pump)
        tasks = [cohort.tasks[name] for name in secure_sum.sent]
        vectors = {}
        for task in tasks:
            update = self.updates.tensors(str(task.record.update_digest))
            vectors[task.record.device] = update[MASKED]
        return CohortSum(unmasked(vectors, secure_sum.revealed(), restored), tasks)

    def _begin_opening(self, secure_sum: SecureSum) -> None:
        cohort = secure_sum.cohort
        received = cohort.received
        _require_openable(secure_sum)
        secure_sum.sent = tuple(task.record.device for task in received)
        begun = BegunSum(
            devices=tuple(cohort.tasks),
            keys=secure_sum.keys,
            members=secure_sum.members,
            sent=secure_sum.sent,
        )
        # First on disk: from the first share on, its boards take part in no other sum.
        self._begun.add(self.reporter.run, received[0].record.round, begun)
        secure_sum.step = SumStep.SECRETS

    def _restore_secrets(self, secure_sum: SecureSum, pump: Callable[[float], None]) -> Secrets:
        """Wait for shares until they restore all secrets, or no more can arrive."""
        until = self.clock.now() + REVEAL_SECONDS
        needed = secure_sum.revealed().needed
        shares = secure_sum.of_step(SumStep.SECRETS)
        # This many shares restore a secret; the server does not wait for those of offline devices.
        while len(shares) < needed and self.clock.now() < until:
            pump(until)
        restored = restore_secrets(secure_sum.revealed())
        if not (restored.lost or restored.unmatched):
            return restored
        # A share is wrong: with all shares that arrive by the end of the step, its sender is found.
        while len(shares) < len(secure_sum.sent) and self.clock.now() < until:
            pump(until)
        return restore_secrets(secure_sum.revealed())

    def _ask_for_pair_keys(
        self,
        secure_sum: SecureSum,
        unmatched: frozenset[str],
        pump: Callable[[float], None],
    ) -> None:
        """Request shared mask keys with offline devices that dealt a wrong mask key."""
        secure_sum.unmatched = unmatched
        secure_sum.step = SumStep.PAIR_KEYS
        for name in secure_sum.sent:
            self._send(secure_sum, name)
        until = self.clock.now() + REVEAL_SECONDS
        pair_keys = secure_sum.of_step(SumStep.PAIR_KEYS)
        while len(pair_keys) < len(secure_sum.sent) and self.clock.now() < until:
            pump(until)

    def close(self) -> None:
        """Acknowledge the updates in the sums, which releases their devices.

        These kept their tasks for their shares; they are released even if no sum was made.
        """
        if self._sums:
            self._begun.clear()
        for secure_sum in self._sums:
            for task in secure_sum.cohort.tasks.values():
                if task.record.update_digest is not None:
                    self.outbox.send_about(UploadAck, task.record)
        self._sums = []


def _require_openable(secure_sum: SecureSum) -> None:
    """Check, before any board reveals a share, that the shares would open a sum.

    Raises:
        RefusedError: too few updates arrived, or a previous server had the keys in memory.
    """
    received = [task.record.device for task in secure_sum.cohort.received]
    for device in received:
        if device not in secure_sum.keys:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                "the server was restarted before it opened this sum, and the keys of "
                f"{device} were only in its memory",
            )
    secure_sum.cohort.require(len(received), len(secure_sum.keys))
