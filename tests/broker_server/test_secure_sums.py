"""Ten devices whose updates go into a sum: the server learns it, and of nobody's update anything
but that.
"""

import contextlib
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from broker_server.service import cohorts
from broker_server.service.secure_sum import SecureSum, SumStep
from broker_server.store import Store, TaskPhase
from broker_server.store.explaining import explain_round
from broker_server.store.machine import RoundState
from fleet_protocol import control
from fleet_protocol.digests import blob_path
from fleet_protocol.errors import RefusedError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import Accept, Shares, Sum, UploadAck
from fleet_protocol.secure_sum import STEPS, Member, whole_numbers
from fleet_protocol.secure_sum.opening import restore_secrets
from fleet_protocol.weights import MASKED, encode_weights
from tests.broker_server.artifacts import tiny_layout, tiny_weights
from tests.broker_server.peer import Peer, profile
from tests.broker_server.test_resume import start_dying
from tests.broker_server.update_work import count_update_work
from tests.fleet_protocol.secure_cohort import CohortOfMembers
from tests.fleet_protocol.test_bad_shares import LIAR, Lying

CLIP = 8.0
SUMS = {"secure_sum": {"clip": CLIP}, "robust": {"norm_bound": 0}, "evaluation": {"data": None}}
NAMES = [f"d{i}" for i in range(10)]


def learnt(name: str, sent: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a device's training makes: another normal step on every device."""
    rng = np.random.default_rng(int(name[1:]))
    return {
        key: sent[key] + rng.normal(0, 0.3, sent[key].shape).astype(np.float32)
        for key in sorted(sent)
    }


class Adding(Peer):
    """A device with a part in a sum; ``leaves`` says at what it goes for good."""

    def __init__(
        self, fleet: str, name: str, url: str, leaves: str = "", max_width: float = 1.0
    ) -> None:
        super().__init__(fleet, name, url, self.trained, profile=profile(max_width=max_width))
        self.leaves = leaves
        self.member: Member | None = None
        self.work = None

    def _take(self, offer):
        if self._current is None or self._current.task != offer.task:
            self.member = Member(self.device, offer.choices[0].weights.digest, 3)
            self.work = None
            super()._take(offer)

    def reply(self, message):
        if isinstance(message, Accept):
            message = message.model_copy(update={"keys": self.member.keys})
        super().reply(message)

    def trained(self, _peer, work):
        self.work = work
        self.mask()

    def _route(self, event):
        before = len(self.heard)
        super()._route(event)
        for step in self.heard[before:]:
            if isinstance(step, Sum) and self.leaves != "early":  # that one never deals
                self.take_step(step)

    def take_step(self, step):
        if self.leaves == "silent" and step.sent:
            return
        fields = self.lie(self.member.answer(step))
        if fields:
            self.reply(Shares(**self.head(self._current), **fields))
        if step.members and self.leaves == "dealt":
            threading.Thread(target=self.__exit__).start()
        elif step.members:
            self.mask()

    def lie(self, fields):
        """What it answers instead of the truth."""
        if self.leaves == "garbage" and "sealed" in fields:
            sealed = {name: "00" * (len(value) // 2) for name, value in fields["sealed"].items()}
            return {"sealed": sealed | {self.device: fields["sealed"][self.device]}}
        if self.leaves == "accuse" and "checks" in fields:
            return {"checks": dict.fromkeys(fields["checks"], "")}
        return fields

    def mask(self):
        if (
            self.work is None
            or not (self.member.partners or self.leaves == "early")
            or self.leaves == "dealt"
        ):
            return
        sent = dict(self.work.weights)
        data = encode_weights(
            {MASKED: whole_numbers(learnt(self.device, sent), sent, CLIP)}, self.work.metadata()
        )
        self.send(
            self.work, data if self.leaves == "early" else self.member.masked(data), labels=()
        )


def weights_of(store, root, run):
    return [
        open_tensors(root / "blobs" / "objects" / blob_path(v.digest)) for v in store.versions(run)
    ]


@pytest.mark.slow
def test_two_of_ten_drop_out_and_the_sum_is_that_of_the_others(
    url, config, running, fleet, monkeypatch
):
    """They go after they dealt; the model moves by the mean of eight, and no vector that came is an
    update.
    """
    seen = {}

    def spied(vectors, *rest):
        seen.update(vectors)
        return cohorts_unmasked(vectors, *rest)

    cohorts_unmasked = cohorts.unmasked
    monkeypatch.setattr(cohorts, "unmasked", spied)
    settings = config(
        **SUMS,
        round={"rounds": 1, "min_devices": 10, "quorum": 0.8, "grace": 0.3, "deadline_seconds": 60},
    )
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(Adding(fleet, name, url, "dealt" if name in {"d2", "d7"} else ""))
        finished = running(settings, url).wait(120)
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        new = weights_of(store, settings.store, finished.run)[-1]
        phases = {task.device: task.phase for task in store.tasks(finished.run, 1, "train")}
    came = [name for name in NAMES if name not in {"d2", "d7"}]
    assert (
        {name for name, phase in phases.items() if phase is TaskPhase.MERGED}
        == set(came)
        == set(seen)
    )
    old = tiny_weights(tiny_layout())
    for key, value in old.items():
        plain = np.mean([learnt(name, old)[key] - value for name in came], axis=0)
        np.testing.assert_allclose(new[key] - value, plain, atol=0.5 * CLIP / STEPS + 5e-7)
    for name, vector in seen.items():
        bare = whole_numbers(learnt(name, old), old, CLIP)
        assert (vector == bare).mean() < 0.05


@pytest.mark.parametrize(
    ("limits", "widths", "message"),
    [
        (
            {"min_devices": 2},
            (1.0, 1.0),
            "this fleet has 2 with w1.00-d1; start more devices",
        ),
        (
            {"min_devices": 4, "quorum": 0.5},
            (1.0, 1.0, 0.5, 0.5),
            "this fleet has 2 with w0.50-d1, 2 with w1.00-d1; start more devices",
        ),
        (
            {"min_devices": 1, "fraction": 0.5},
            (1.0, 1.0, 1.0, 1.0),
            "needs 3 devices, but a round draws 2 of 4; raise round.fraction",
        ),
    ],
    ids=["few", "two tiers", "draw"],
)
def test_too_few_for_a_sum_begin_no_round(url, config, running, fleet, limits, widths, message):
    """The server waits for more devices, and ends the run before any device trains for nothing."""
    limits = {"rounds": 1, "retries": 1, "deadline_seconds": 60, "wait_seconds": 3.0, **limits}
    settings = config(**SUMS, round=limits)
    with contextlib.ExitStack() as stack:
        for name, width in zip(NAMES, widths, strict=False):
            stack.enter_context(Adding(fleet, name, url, max_width=width))
        finished = running(settings, url).wait(60)
    assert finished.status == "failed"
    assert message in finished.error
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        assert store.last_round(finished.run) is None


def two_tiers(fleet, url, narrow_leave):
    """Three wide devices and three narrow ones, who leave at the same step."""
    devices = {name: Adding(fleet, name, url) for name in NAMES[:3]}
    for name in NAMES[3:6]:
        devices[name] = Adding(fleet, name, url, narrow_leave, max_width=0.5)
    return devices


def test_a_sum_that_was_opened_becomes_a_version(url, config, running, fleet, monkeypatch):
    """The narrow ones reveal nothing, and half of the round is below its quorum; but the wide ones'
    sum is known, and a second one of the same version would show in whom they differ.
    """
    monkeypatch.setattr(cohorts, "REVEAL_SECONDS", 1.0)
    limits = {"rounds": 1, "min_devices": 6, "quorum": 0.8, "retries": 1, "deadline_seconds": 60}
    devices = two_tiers(fleet, url, "silent")
    with contextlib.ExitStack() as stack:
        for device in devices.values():
            stack.enter_context(device)
        settings = config(**SUMS, round=limits)
        finished = running(settings, url).wait(60)
        for device in devices.values():
            device.wait_for(lambda peer: peer.got(UploadAck))
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        (record,) = store.rounds(finished.run)
        why = {device.device: device.why for device in explain_round(store, 1, finished.run)}
        phases = {task.device: task.phase for task in store.tasks(finished.run, 1, "train")}
    assert record.state is RoundState.CLOSED
    assert {phases[name] for name in NAMES[:3]} == {TaskPhase.MERGED}
    assert {phases[name] for name in NAMES[3:6]} == {TaskPhase.MISSED}
    assert {why[name] for name in NAMES[3:6]} == {
        "no sum of w0.50-d1: 0 members revealed shares, but 3 are needed"
    }


def test_no_sum_is_opened_where_there_are_too_few(url, config, running, fleet):
    """Two of the narrow ones leave before they send, so their tier has no sum and the round no
    quorum: nobody is asked for shares, and all may try again from the same version.
    """
    limits = {
        "rounds": 1,
        "min_devices": 6,
        "quorum": 0.66,
        "grace": 0.3,
        "retries": 1,
        "deadline_seconds": 60,
    }
    devices = two_tiers(fleet, url, "")
    for name in NAMES[4:6]:
        devices[name].leaves = "dealt"
    with contextlib.ExitStack() as stack:
        for device in devices.values():
            stack.enter_context(device)
        settings = config(**SUMS, round=limits)
        finished = running(settings, url).wait(60)
    assert finished.status == "failed"
    assert "no sum of w0.50-d1: 1 are left" in finished.error
    for device in devices.values():
        assert not any(step.sent for step in device.heard if isinstance(step, Sum))


@pytest.mark.attack(
    "member",
    "Deals shares that nobody can decrypt, or accuses all other devices",
    "refused as `bad-shares`; the log names the device, and the server opens the sum of the "
    "other updates",
    "2026-11-28",
)
@pytest.mark.parametrize("lie", ["garbage", "accuse"])
def test_a_device_that_lies_is_refused_and_the_others_have_their_sum(
    url, config, running, fleet, lie
):
    """It deals shares that do not open, or accuses all others of it: its name and reason are
    counted, and the round needs no second try.
    """
    settings = config(
        **SUMS, round={"rounds": 1, "min_devices": 5, "retries": 1, "deadline_seconds": 60}
    )
    with contextlib.ExitStack() as stack:
        for name in NAMES[:5]:
            stack.enter_context(Adding(fleet, name, url, lie if name == "d3" else ""))
        server = running(settings, url)
        finished = server.wait(60)
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        tasks = {task.device: task for task in store.tasks(finished.run, 1, "train")}
        (refusal,) = store.refusals(finished.run)
    assert {name for name, task in tasks.items() if task.phase is TaskPhase.MERGED} == {
        "d0",
        "d1",
        "d2",
        "d4",
    }
    assert tasks["d3"].phase is TaskPhase.REFUSED
    assert tasks["d3"].detail.startswith("bad-shares: ")
    assert "d3" in tasks["d3"].detail
    assert (refusal.device, refusal.reason) == ("d3", "bad-shares")


def test_an_offer_gives_the_time_of_every_sum(url, config, running, fleet):
    """They are made one after the other, and a device whose turn was the second had given its task
    up by then.
    """
    settings = config(**SUMS, round={"rounds": 1, "min_devices": 6, "deadline_seconds": 60})
    devices = [
        Adding(fleet, name, url, max_width=1.0 if at < 3 else 0.5)
        for at, name in enumerate(NAMES[:6])
    ]
    with contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(device)
        assert running(settings, url).wait(60).status == "finished"
    assert (
        min(device.offers[0].seconds_left for device in devices) > 60 + 1.5 * cohorts.REVEAL_SECONDS
    )


def test_receivers_take_what_goes_into_a_sum(url, config, running, fleet, monkeypatch):
    """Masked updates are received, checked and written by processes of their own like any others.
    The server opens none of them: it makes and measures one mean a round, reads it once, and folds
    it for each device.
    """
    work_done = count_update_work(monkeypatch)
    settings = config(
        round={"rounds": 2, "min_devices": 4, "deadline_seconds": 60},
        broker={"receivers": 2},
        **SUMS,
    )
    with contextlib.ExitStack() as stack:
        for name in NAMES[:4]:
            stack.enter_context(Adding(fleet, name, url))
        server = running(settings, url)
        assert server.wait(120).status == "finished"
    assert [len(event.merged) for event in server.events_of(control.RoundClosed)] == [4, 4]
    assert work_done == {"mean serialised": 2, "measured": 2, "read": 2, "folded": 8}


@pytest.mark.attack(
    "member",
    "Sends a masked update before the devices have agreed on the masks",
    "refused; the server opens the sum of the other updates",
    "2026-11-23",
)
def test_an_update_before_its_time_is_refused(url, config, running, fleet):
    """One that comes before its masks could be taken off a sum would be in none; the others' sum is
    made without it.
    """
    settings = config(
        **SUMS,
        round={"rounds": 1, "min_devices": 4, "quorum": 0.75, "grace": 0.3, "deadline_seconds": 60},
    )
    with contextlib.ExitStack() as stack:
        for name in NAMES[:4]:
            stack.enter_context(Adding(fleet, name, url, "early" if name == "d1" else ""))
        finished = running(settings, url).wait(60)
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        tasks = {task.device: task for task in store.tasks(finished.run, 1, "train")}
    assert {name for name, task in tasks.items() if task.phase is TaskPhase.MERGED} == {
        "d0",
        "d2",
        "d3",
    }
    assert tasks["d1"].phase is TaskPhase.REFUSED
    assert "masks could not be removed" in tasks["d1"].detail


@pytest.mark.attack(
    "member",
    "Deals shares too late, so that the correct answers of other devices look wrong",
    "ignored; the server opens the sum of the other updates",
    "2026-11-28",
)
def test_shares_that_come_after_their_step_change_nothing(tmp_path):
    """The others were asked about the shares that had come in time; a late dealer made their right
    answers wrong ones, and ended the sum of all.
    """
    task = SimpleNamespace(record=SimpleNamespace(device="d0"))
    cohort = SimpleNamespace(tasks={"d0": task})
    keys = dict.fromkeys(("d0", "d1"), ("12" * 32, "ef" * 32, "3c" * 32))
    secure_sum = SecureSum(cohort, 1.0, 1.0, ("d1",), SumStep.CHECKS, keys)
    waiting = cohorts.Cohorts(SimpleNamespace(folder=tmp_path), None, None, None, None)
    waiting._sums = [secure_sum]
    head = {"fleet": "f", "run": "r", "round": 1, "task": "t", "device": "d0"}
    waiting.receive_shares(task, Shares(**head, sealed=dict.fromkeys(keys, "5a" * 151)))
    assert secure_sum.of_step(SumStep.SHARES) == {}
    assert secure_sum.expected_names(SumStep.CHECKS, "d1") == frozenset()


@pytest.mark.attack(
    "broker",
    "Makes a restarted server ask for shares of a sum for which the server has lost the keys",
    "the server asks no device for shares",
    "2026-11-28",
)
@pytest.mark.parametrize("comes_late", [1, 3])
def test_all_shares_that_have_come_restore_a_secret(tmp_path, comes_late):
    """One of the first is wrong: the server waits for more, and tries all of them again, also where
    the step ends before everybody's are there.
    """
    names = [f"d{at}" for at in range(7)]
    liar = Lying("revealed", names)
    members = CohortOfMembers(names, members={LIAR: liar}).met()
    shares = members.reveal(names)
    weights = SimpleNamespace(digest=members.place)
    tasks = {}
    for name in names:
        tasks[name] = SimpleNamespace(record=SimpleNamespace(device=name, weights=weights))
    cohort = SimpleNamespace(tasks=tasks, summing=SimpleNamespace(least=members.least))
    secure_sum = SecureSum(cohort, 1.0, 1.0, members.joined, SumStep.SECRETS, members.keys)
    secure_sum.sent = tuple(names)
    revealed = secure_sum.of_step(SumStep.SECRETS)
    coming = iter(sorted(names, key=lambda name: name != LIAR))
    clock = SimpleNamespace(seconds=0.0)
    clock.now = lambda: clock.seconds
    needed = secure_sum.revealed().needed

    def pump(until):
        if len(revealed) == needed + comes_late:
            clock.seconds = until
            return
        name = next(coming)
        revealed[name] = shares[name]

    waiting = cohorts.Cohorts(SimpleNamespace(folder=tmp_path), None, None, clock, None)
    restored = waiting._restore_secrets(secure_sum, pump)
    assert set(restored.liars) == {LIAR}
    assert restored.own == restore_secrets(members.revealed(names, shares)).own
    assert len(restored.own) == len(names)
    assert clock.seconds == (0.0 if comes_late == len(names) - needed else cohorts.REVEAL_SECONDS)


def test_no_board_is_asked_for_shares_of_a_sum_whose_keys_are_lost(tmp_path):
    """Of two sums a killed server had begun to open one; boards of the other would reveal for
    nothing, and take part in no further sum of the version.
    """
    task = SimpleNamespace(record=SimpleNamespace(device="d0", round=1))
    cohort = SimpleNamespace(tasks={"d0": task}, received=[task])
    waiting = cohorts.Cohorts(SimpleNamespace(folder=tmp_path), None, None, None, None)
    waiting._sums = [SecureSum(cohort, 1.0, 1.0, ("d0",))]
    assert "the server was restarted" in waiting.obstacle(cohort)
    with pytest.raises(RefusedError, match="keys of d0"):
        waiting.total(cohort, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_server_makes_its_sums_again(url, config, running, fleet, tmp_path):
    """What takes the masks off was in its memory: the round is abandoned, the next one ends."""
    settings = config(
        **SUMS, round={"rounds": 1, "min_devices": 3, "retries": 3, "deadline_seconds": 60}
    )
    with contextlib.ExitStack() as stack:
        for name in NAMES[:3]:
            stack.enter_context(Adding(fleet, name, url))
        assert start_dying(settings, url, "receive", 2, tmp_path).wait(60) == -signal.SIGKILL
        finished = running(settings, url).wait(60)
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        ends = [(record.state, record.reason) for record in store.rounds(finished.run)]
    assert [state for state, _ in ends] == [RoundState.ABANDONED, RoundState.CLOSED]
    assert "keys to its sums" in ends[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["while shares come", "when the mean is stored"])
def test_a_killed_server_finishes_a_sum_that_it_has_begun_to_open(
    url, config, running, fleet, tmp_path, when
):
    """Its boards would take part in no other from this version, so the same round closes."""
    settings = config(
        **SUMS, round={"rounds": 2, "min_devices": 3, "retries": 1, "deadline_seconds": 60}
    )
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(Adding(fleet, name, url)) for name in NAMES[:3]]
        dying = start_dying(settings, url, "receive", 4 if "stored" in when else 1000, tmp_path)
        if when == "while shares come":
            devices[0].wait_for(
                lambda peer: any(isinstance(step, Sum) and step.sent for step in peer.heard), 60
            )
            dying.kill()
        assert dying.wait(60) == -signal.SIGKILL
        finished = running(settings, url).wait(60)
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        ends = [record.state for record in store.rounds(finished.run)]
        phases = [task.phase for task in store.tasks(finished.run, 1, "train")]
    assert ends == [RoundState.CLOSED, RoundState.CLOSED]
    assert phases == [TaskPhase.MERGED] * 3
    assert not (settings.store / "begun-sums.json").exists()
