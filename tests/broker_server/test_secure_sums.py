"""Ten devices whose updates go into a sum: the server learns it, and of nobody's update anything
but that.
"""

import contextlib
import signal
import threading

import numpy as np
import pytest

from broker_server.service import cohorts
from broker_server.store import Store, TaskPhase
from broker_server.store.explaining import explain_round
from broker_server.store.machine import RoundState
from fleet_protocol import control
from fleet_protocol.digests import blob_path
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import Accept, Shares, Sum, UploadAck
from fleet_protocol.secure_sum import STEPS, Member, whole_numbers
from fleet_protocol.weights import MASKED, encode_weights
from tests.broker_server.artifacts import tiny_layout, tiny_weights
from tests.broker_server.peer import Peer, profile
from tests.broker_server.test_resume import start_dying

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
        for said in self.heard[before:]:
            if isinstance(said, Sum) and self.leaves != "early":  # that one never deals
                fields = self.member.answer(said)
                if fields and not (said.sent and self.leaves == "silent"):
                    self.reply(Shares(**self.head(self._current), **fields))
                if said.dealt and self.leaves == "dealt":
                    threading.Thread(target=self.__exit__).start()
                elif said.dealt:
                    self.mask()

    def mask(self):
        if (
            self.work is None
            or not (self.member.dealt or self.leaves == "early")
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
    made = config(
        **SUMS,
        round={"rounds": 1, "min_devices": 10, "quorum": 0.8, "grace": 0.3, "deadline_seconds": 60},
    )
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(Adding(fleet, name, url, "dealt" if name in {"d2", "d7"} else ""))
        finished = running(made, url).wait(120)
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(made.store, read_only=True)) as store:
        new = weights_of(store, made.store, finished.run)[-1]
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


def test_too_few_for_a_sum_are_told_before_they_train_for_nothing(url, config, running, fleet):
    """Two devices where three are the least: the round is abandoned, and says why."""
    made = config(
        **SUMS, round={"rounds": 1, "min_devices": 2, "retries": 1, "deadline_seconds": 60}
    )
    with contextlib.ExitStack() as stack:
        for name in NAMES[:2]:
            stack.enter_context(Adding(fleet, name, url))
        finished = running(made, url).wait(60)
    assert finished.status == "failed"
    with contextlib.closing(Store(made.store, read_only=True)) as store:
        tasks = store.tasks(finished.run, 1, "train")
    assert {(task.phase, task.detail) for task in tasks} == {
        (TaskPhase.MISSED, "2 are left for a secure sum of 3 at least")
    }


def test_a_round_whose_sums_are_of_fewer_than_its_quorum_is_abandoned(
    url, config, running, fleet, monkeypatch
):
    """It was closed with the half that is left; those whose sum was lost were told nothing, and had
    no time for it.
    """
    monkeypatch.setattr(cohorts, "REVEAL_SECONDS", 1.0)
    limits = {"rounds": 1, "min_devices": 6, "quorum": 0.8, "retries": 1, "deadline_seconds": 60}
    devices = {name: Adding(fleet, name, url) for name in NAMES[:3]}
    devices |= {name: Adding(fleet, name, url, "silent", max_width=0.5) for name in NAMES[3:6]}
    with contextlib.ExitStack() as stack:
        for device in devices.values():
            stack.enter_context(device)
        made = config(**SUMS, round=limits)
        finished = running(made, url).wait(60)
        for device in devices.values():
            device.wait_for(lambda peer: peer.got(UploadAck))
    assert finished.status == "failed"
    with contextlib.closing(Store(made.store, read_only=True)) as store:
        (record,) = store.rounds(finished.run)
        why = {item.device: item.why for item in explain_round(store, 1, finished.run)}
    assert record.state is RoundState.ABANDONED
    assert record.reason.startswith("no sum of w0.50-d1: ")
    assert {why[name] for name in NAMES[3:6]} == {record.reason}


def test_an_offer_gives_the_time_of_every_sum(url, config, running, fleet):
    """They are made one after the other, and a device whose turn was the second had given its task
    up by then.
    """
    made = config(**SUMS, round={"rounds": 1, "min_devices": 6, "deadline_seconds": 60})
    devices = [
        Adding(fleet, name, url, max_width=1.0 if at < 3 else 0.5)
        for at, name in enumerate(NAMES[:6])
    ]
    with contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(device)
        assert running(made, url).wait(60).status == "finished"
    assert (
        min(device.offers[0].seconds_left for device in devices) > 60 + 1.5 * cohorts.REVEAL_SECONDS
    )


def test_receivers_take_what_goes_into_a_sum(url, config, running, fleet):
    """Masked updates are received, checked and written by processes of their own like any
    others.
    """
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
    assert [len(event.merged) for event in server.of(control.RoundClosed)] == [4, 4]


def test_an_update_before_its_time_is_refused(url, config, running, fleet):
    """One that comes before its masks could be taken off a sum would be in none; the others' sum is
    made without it.
    """
    made = config(
        **SUMS,
        round={"rounds": 1, "min_devices": 4, "quorum": 0.75, "grace": 0.3, "deadline_seconds": 60},
    )
    with contextlib.ExitStack() as stack:
        for name in NAMES[:4]:
            stack.enter_context(Adding(fleet, name, url, "early" if name == "d1" else ""))
        finished = running(made, url).wait(60)
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(made.store, read_only=True)) as store:
        tasks = {task.device: task for task in store.tasks(finished.run, 1, "train")}
    assert {name for name, task in tasks.items() if task.phase is TaskPhase.MERGED} == {
        "d0",
        "d2",
        "d3",
    }
    assert tasks["d1"].phase is TaskPhase.REFUSED
    assert "masks nobody could take off" in tasks["d1"].detail


@pytest.mark.slow
def test_a_killed_server_makes_its_sums_again(url, config, running, fleet, tmp_path):
    """What takes the masks off was in its memory: the round is abandoned, the next one ends."""
    made = config(
        **SUMS, round={"rounds": 1, "min_devices": 3, "retries": 3, "deadline_seconds": 60}
    )
    with contextlib.ExitStack() as stack:
        for name in NAMES[:3]:
            stack.enter_context(Adding(fleet, name, url))
        assert start_dying(made, url, "receive", 2, tmp_path).wait(60) == -signal.SIGKILL
        finished = running(made, url).wait(60)
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(made.store, read_only=True)) as store:
        ends = [(record.state, record.reason) for record in store.rounds(finished.run)]
    assert [state for state, _ in ends] == [RoundState.ABANDONED, RoundState.CLOSED]
    assert "keys to its sums" in ends[0][1]
