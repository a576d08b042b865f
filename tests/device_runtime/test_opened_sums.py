"""A board opens one sum of a version, whatever a server asks of it and whenever it starts again; so
no sums of one version differ by few boards.
"""

import contextlib
import itertools
import random

import pytest

from device_runtime.agent import opened_sums
from device_runtime.agent.opened_sums import OpenedSums
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import Accept, Offer, Refuse, Shares, Sum, UploadAck
from fleet_protocol.secure_sum import Member, threshold
from tests.device_runtime.scripted_server import RUN
from tests.device_runtime.test_agent import fleet, one_broker, tiny
from tests.device_runtime.tiny_set import initial_weights
from tests.fleet_protocol.secure_cohort import CohortOfMembers, instruct

__all__ = ["one_broker", "tiny"]
PARTNERS = ("partner-1", "partner-2")
SUMMING = {"summing": {"clip": 4.0, "least": 3}}


def open_sum(server, device, offer):
    """Take a board through a sum with two partners, until it has revealed its shares."""
    keys = server.wait_message(Accept, offer.task).keys
    place = offer.choices[0].weights.digest
    partners = {name: Member(name, place, 3) for name in PARTNERS}
    cohort = {name: member.keys for name, member in partners.items()} | {device.id: keys}

    def ask(kind, **fields):
        server.send(device.id, Sum, offer, **fields)
        server.wait(
            lambda: any(getattr(message, kind) for message in server.heard(Shares, offer.task)),
            what=kind,
        )
        messages = server.heard(Shares, offer.task)
        return next(getattr(message, kind) for message in messages if getattr(message, kind))

    sealed = {device.id: ask("sealed", keys=cohort)}
    for name, member in partners.items():
        sealed[name] = member.answer(instruct(keys=cohort))["sealed"]
    dealt = {dealer: shares[device.id] for dealer, shares in sealed.items()}
    ask("checks", dealt=dealt, challenge="1" * 66)
    members = tuple(sorted(cohort))
    server.send(device.id, Sum, offer, members=members)
    server.wait(lambda: offer.task in server.chunks, what="the masked update")
    return ask("revealed", sent=members)


@pytest.mark.attack(
    "broker",
    "Asks a device for shares of a second sum of the same version",
    "refused as `sum-opened`, even after a restart",
    "2026-11-28",
)
def test_a_board_takes_part_in_one_sum_of_a_version(tmp_path, one_broker, tiny):
    """A second task from the same weights is refused by name, also after a restart; one from newer
    weights, or from the same ones without a sum, is not.
    """
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        server.script.acknowledge = False
        choice = tiny.choice(initial_weights())
        offer = server.offer(device.id, choice, task="t1", upload=SUMMING)
        assert open_sum(server, device, offer).keys() == {device.id, *PARTNERS}
        server.send(device.id, UploadAck, offer)
        device.wait_log("the server has the update")
        server.offer(device.id, choice, task="t2", round=2, upload=SUMMING)
        assert server.wait_message(Refuse, "t2").reason is RefusalReason.SUM_OPENED
        assert device.terminate() == 0
        device.start()
        server.offer(device.id, choice, task="t3", round=3, upload=SUMMING)
        refusal = server.wait_message(Refuse, "t3")
        assert refusal.reason is RefusalReason.SUM_OPENED
        assert "next version" in refusal.detail
        newer = tiny.choice({name: value + 1 for name, value in initial_weights().items()})
        server.offer(device.id, newer, task="t4", round=4, version=1, upload=SUMMING)
        assert server.wait_message(Accept, "t4").keys
        server.script.acknowledge = True
        server.offer(device.id, choice, task="t5", round=5)
        server.wait_update("t5")


def offer_of(weights, run=RUN, **upload):
    """An offer whose devices are sent some weights."""
    return Offer.model_validate(
        {
            "fleet": "lab",
            "run": run,
            "round": 1,
            "task": "t",
            "version": 0,
            "choices": (
                {
                    "tier": "w1.00-d1",
                    "artifact_set": {"digest": "a" * 64, "size": 1, "chunk_bytes": 1024},
                    "weights": {"digest": weights, "size": 1, "chunk_bytes": 1024},
                },
            ),
            "train": {"learning_rate": 0.1, "epochs": 1, "batch_size": 1, "seed": 1},
            "seconds_left": 10.0,
            "upload": upload,
        }
    )


def test_a_file_that_cannot_be_read_keeps_a_board_out_of_sums(tmp_path):
    """Nobody could say which sums it has opened; other tasks it takes."""
    (tmp_path / "opened-sums.json").write_text("{")
    sums = OpenedSums(tmp_path)
    with pytest.raises(RefusedError, match=r"opened-sums\.json"):
        sums.require_new(offer_of("1" * 64, **SUMMING))
    sums.require_new(offer_of("1" * 64))


def test_the_newest_sums_are_remembered(tmp_path, monkeypatch):
    """The file is bounded; another run has its own versions."""
    monkeypatch.setattr(opened_sums, "_MOST_SUMS", 3)
    for digit in "12345":
        OpenedSums(tmp_path).record(offer_of(digit * 64), digit * 64)
        OpenedSums(tmp_path).record(offer_of(digit * 64), digit * 64)
    barred = []
    for digit in "12345":
        with contextlib.suppress(RefusedError):
            OpenedSums(tmp_path).require_new(offer_of(digit * 64, **SUMMING))
            continue
        barred.append(digit)
    assert barred == ["3", "4", "5"]
    OpenedSums(tmp_path).require_new(offer_of("5" * 64, run="another", **SUMMING))


class DishonestServer:
    """Opens as many different sums of one version as the boards allow.

    It names the members, the vectors that came and who reveals, as it likes, and withholds messages
    from whom it likes; boards restart between.
    """

    def __init__(self, folder, draw, least):
        self.draw = draw
        self.least = least
        self.boards = [f"d{at}" for at in range(draw.randint(4, 7))]
        self.folders = {name: folder / name for name in self.boards}
        for path in self.folders.values():
            path.mkdir(parents=True)
        self.weights = "1" * 64
        self.opened = []

    def some(self, names, count):
        return self.draw.sample(sorted(names), min(len(names), count))

    def try_to_open(self):
        """One round: what it opens is kept in `opened`."""
        willing = []
        offer = offer_of(self.weights, summing={"clip": 1.0, "least": self.least})
        for name in self.boards:
            with contextlib.suppress(RefusedError):
                OpenedSums(self.folders[name]).require_new(offer)
                willing.append(name)
        names = self.some(willing, self.draw.randint(2, len(self.boards)))
        if len(names) < self.least:
            return
        cohort = CohortOfMembers(names, least=self.least, place=self.weights)
        cohort.deal()
        cohort.check()
        gone = self.some(cohort.checks, self.draw.randint(0, 1))
        with contextlib.suppress(RefusedError):
            cohort.join(without=gone)
        if cohort.joined:
            self.ask_for_shares(cohort, offer)

    def ask_for_shares(self, cohort, offer):
        """Ask in random order, for a set of its choice for each board; stop when a set is open."""
        needed = threshold(len(cohort.keys), self.least)
        revealers = {}
        for name in self.some(cohort.joined, len(cohort.joined)):
            sent = frozenset(self.some(cohort.joined, self.draw.randint(1, len(cohort.joined))))
            if revealers and self.draw.random() < 0.7:
                sent = self.draw.choice(sorted(revealers, key=sorted))
            with contextlib.suppress(RefusedError):
                cohort.members[name].answer(instruct(sent=tuple(sorted(sent))))
                OpenedSums(self.folders[name]).record(offer, self.weights)
                revealers.setdefault(sent, set()).add(name)
            if len(revealers.get(sent, ())) >= needed:
                self.opened.append(sent)
                return  # the rest of the cohort knows nothing of it


def sequences(folder, count):
    """Random sequences of rounds against a dishonest server; what each has opened."""
    for seed in range(count):
        draw = random.Random(seed)
        least = draw.randint(2, 3)
        server = DishonestServer(folder / str(seed), draw, least)
        for _ in range(8):
            server.try_to_open()
        yield least, server.opened


@pytest.mark.attack(
    "broker",
    "Tries, as a dishonest server, to open two sums of the same version in 200 random sequences",
    "no two opened sums differ by fewer than `least` devices",
    "2026-11-28",
)
@pytest.mark.parametrize(
    "count", [pytest.param(15, id="15"), pytest.param(200, id="200", marks=pytest.mark.slow)]
)
def test_no_two_opened_sums_differ_by_fewer_than_the_least(tmp_path, count):
    """Over random rounds of one version with drop-outs, abandoned rounds and restarts: each opened
    sum has `least` boards that are in no later one, so every combination of sums holds those of its
    earliest sum alike.
    """
    several = 0
    for least, opened in sequences(tmp_path, count):
        for first, second in itertools.combinations(opened, 2):
            several += 1
            assert len(first ^ second) >= least
        for at, sent in enumerate(opened):
            assert len(sent.difference(*opened[at + 1 :])) >= least
    assert several or count < 200  # else it has seen no second sum
