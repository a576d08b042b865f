"""A device that deals, answers or reveals wrong shares is found, and the others have their sum."""

from dataclasses import replace

import numpy as np
import pytest

from fleet_protocol.errors import RefusedError
from fleet_protocol.identity.sealing import new_key
from fleet_protocol.secure_sum import member as member_module
from fleet_protocol.secure_sum.checks import examine, judge
from fleet_protocol.secure_sum.dealing import DealtShares
from fleet_protocol.secure_sum.member import Member, most_openings
from fleet_protocol.secure_sum.opening import restore_secrets
from fleet_protocol.secure_sum.sharing import PRIME
from tests.fleet_protocol.secure_cohort import PLACE, CohortOfMembers, added, instruct

NAMES = [f"d{at}" for at in range(7)]
LIAR = "d2"


class Lying(Member):
    """Lies in one step to some members."""

    def __init__(self, lie, victims):
        super().__init__(LIAR, PLACE, 3)
        self.lie = lie
        self.victims = victims

    def answer(self, message):
        if message.keys and self.lie == "wrong shares":
            return self.deal_wrong_shares(message)
        answer = dict(super().answer(message))
        for field, change in (
            ("sealed", lambda value: "00" * (len(value) // 2)),
            ("checks", lambda _value: ""),
            ("openings", lambda value: "0" * len(value)),
            ("revealed", lambda value: f"{(int(value, 16) + 1) % PRIME:066x}"),
        ):
            if self.lie == field and field in answer:
                values = dict(answer[field])
                for victim in self.victims:
                    if victim in values:
                        values[victim] = change(values[victim])
                answer[field] = values
        if self.lie == "openings" and message.keys:  # it deals garbage, too
            sealed = dict(answer["sealed"])
            sealed |= {victim: "00" * (len(sealed[victim]) // 2) for victim in self.victims}
            answer["sealed"] = sealed
        return answer

    def deal_wrong_shares(self, message):
        """Seals shares that are not on the polynomial of the others."""
        split = member_module.split_secrets
        names = sorted(message.keys)

        def wrong(*args):
            shares = split(*args)
            for victim in self.victims:
                at = names.index(victim)
                shares[at] = replace(shares[at], mask=(shares[at].mask + 1) % PRIME)
            return shares

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(member_module, "split_secrets", wrong)
            return super().answer(message)


def with_liar(lie, victims):
    cohort = CohortOfMembers(NAMES, members={LIAR: Lying(lie, victims)})
    cohort.deal()
    cohort.check()
    return cohort


@pytest.mark.attack(
    "member",
    "Lies in any step of a secure sum before updates are sent",
    "the server can prove which device lies; it accuses no other device",
    "2026-11-28",
)
@pytest.mark.parametrize("lie", ["sealed", "wrong shares", "checks", "openings"])
@pytest.mark.parametrize(
    "victims", [["d5"], ["d0", "d5", "d6"], [name for name in NAMES if name != LIAR]]
)
def test_who_lies_before_the_vectors_is_found_and_nobody_else(lie, victims):
    """To one member, to some, to all: then the others have the sum without it."""
    cohort = with_liar(lie, victims)
    liars = cohort.liars()
    assert set(liars) == {LIAR}
    assert LIAR in liars[LIAR]
    cohort.join(without=liars)
    rng = np.random.default_rng(1)
    words = {name: rng.integers(0, 2**32, 20, np.uint32) for name in cohort.joined}
    vectors = {name: cohort.vector(name, words[name]) for name in words}
    total, restored = cohort.open(vectors, cohort.reveal(vectors))
    assert (total == added(words, words)).all()
    assert not restored.liars


def test_a_dealer_opens_few_shares():
    """The server would have its secrets with as many as are needed."""
    cohort = CohortOfMembers(NAMES)
    cohort.deal()
    cohort.check()
    member = cohort.members["d0"]
    few = tuple(NAMES[1 : 1 + most_openings(4)])
    assert most_openings(4) == 1
    with pytest.raises(RefusedError, match="contradicts"):
        cohort.members["d1"].answer(instruct(disputed=tuple(NAMES[2:4])))
    assert member.answer(instruct(disputed=few))["openings"].keys() == set(few)
    with pytest.raises(RefusedError, match="contradicts"):
        member.answer(instruct(disputed=("d4",)))


def test_a_dealer_that_opens_nothing_is_the_liar():
    """Whether its shares were good or not: it had the time to prove them."""
    cohort = with_liar("checks", ["d5"])  # d2 accuses d5
    findings = examine(cohort.dealings())
    assert findings.disputes == {"d5": frozenset({LIAR})}
    assert set(judge(cohort.dealings(), findings.disputes, {})) == {"d5"}


@pytest.mark.attack(
    "member",
    "Reveals a wrong share when a sum is opened",
    "the log names the device; the server restores the secret from the other shares",
    "2026-11-28",
)
@pytest.mark.parametrize("victims", [["d5"], NAMES])
def test_who_reveals_wrong_shares_is_named(victims):
    """The others' shares restore the secrets."""
    cohort = with_liar("revealed", victims)
    assert cohort.liars() == {}
    cohort.join()
    zeros = np.zeros(20, np.uint32)
    vectors = {name: cohort.vector(name, zeros) for name in NAMES if name != "d6"}
    total, restored = cohort.open(vectors, cohort.reveal(vectors))
    assert not total.any()
    assert set(restored.liars) == {LIAR}


@pytest.mark.attack(
    "member",
    "Reveals a wrong share when there are no spare shares, so that other devices could look "
    "dishonest",
    "the server accuses no device, and uses no wrong secret; one more share identifies the device",
    "2026-11-28",
)
def test_without_a_share_to_spare_nobody_is_accused():
    """All others were refused by name then, and what their wrong secrets left of the masks became
    the sum.
    """
    cohort = CohortOfMembers(NAMES, members={LIAR: Lying("revealed", NAMES)}).met()
    vectors = {}
    for name in NAMES:
        vectors[name] = cohort.vector(name, np.arange(5, dtype=np.uint32))
    shares = cohort.reveal(NAMES)
    needed = cohort.revealed(NAMES, shares).needed
    first = {name: shares[name] for name in [LIAR, *NAMES] if name in shares}
    few = dict(list(first.items())[:needed])
    with pytest.raises(RefusedError, match="do not restore its secret"):
        cohort.open(vectors, few)
    restored = restore_secrets(cohort.revealed(NAMES, few))
    assert (restored.liars, restored.lost) == ({}, frozenset(NAMES))
    total, restored = cohort.open(vectors, dict(list(first.items())[: needed + 1]))
    assert set(restored.liars) == {LIAR}
    assert total.tolist() == [7 * value for value in range(5)]


@pytest.mark.parametrize("leaves", [True, False])
def test_who_shares_other_secrets_than_its_own_is_named(leaves, monkeypatch):
    """It leaves, and the others give the keys of their masks in common; or it stays, and its shares
    count. Either way the sum is that of those whose vectors came.
    """
    cohort = CohortOfMembers(NAMES)
    split = member_module.split_secrets
    liar = cohort.members[LIAR]

    def other_secrets(own, mask, *args):
        if mask == liar._mask_key:
            return split(new_key(), new_key(), *args)
        return split(own, mask, *args)

    monkeypatch.setattr(member_module, "split_secrets", other_secrets)
    cohort.met()
    rng = np.random.default_rng(1)
    words = {name: rng.integers(0, 2**32, 20, np.uint32) for name in NAMES}
    sent = [name for name in NAMES if not (leaves and name == LIAR)]
    vectors = {name: cohort.vector(name, words[name]) for name in sent}
    total, restored = cohort.open(vectors, cohort.reveal(vectors))
    assert set(restored.liars) == {LIAR}
    assert restored.unmatched == ({LIAR} if leaves else set())
    assert (total == added(words, sent)).all() == leaves


def test_an_answer_to_a_challenge_tells_nothing_of_the_secrets():
    """Whatever the two secrets are, there is one blind number that gives the same answer."""
    shares = DealtShares(own=5, mask=9, blind=1)
    value = shares.answer(1234)
    for own, mask in ((0, 0), (7, 2**255)):
        blind = (value - DealtShares(own, mask, 0).answer(1234)) % PRIME
        assert DealtShares(own, mask, blind).answer(1234) == value
