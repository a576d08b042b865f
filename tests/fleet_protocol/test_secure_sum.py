"""A server learns the sum of those whose vectors came, whoever drops out; a member takes no step
that shows its own.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_protocol.errors import RefusedError
from fleet_protocol.identity.sealing import new_key, public_key
from fleet_protocol.messages.values import SUM_LIMIT
from fleet_protocol.secure_sum import STEPS, Member, restored, whole_numbers
from fleet_protocol.secure_sum.masks import check_keys
from fleet_protocol.secure_sum.sharing import join_secret
from tests.fleet_protocol.secure_cohort import CohortOfMembers, added, answer, instruct

CLIP = 4.0
FIVE = [f"d{at}" for at in range(5)]


def summed(values, never_dealt=(), never_sent=(), never_revealed=()):
    """The whole exchange; the sum, and what the server saw."""
    cohort = CohortOfMembers(values).met(never_dealt)
    vectors = {
        name: cohort.vector(name, values[name]) for name in cohort.joined if name not in never_sent
    }
    total, _ = cohort.open(vectors, cohort.reveal(vectors, never_revealed))
    return total, vectors


def drawn(count, size=50, seed=0):
    """Differences of norms around the bound, and their whole numbers."""
    rng = np.random.default_rng(seed)
    real = {f"d{i}": rng.normal(0, CLIP / size**0.5, size).astype(np.float32) for i in range(count)}
    return real, {
        name: whole_numbers({"w": value}, {"w": np.zeros_like(value)}, CLIP)
        for name, value in real.items()
    }


@settings(max_examples=10)
@given(seed=st.integers(0, 999), out=st.sets(st.integers(0, 9), max_size=4), at=st.integers(0, 4))
def test_whoever_drops_out_the_sum_is_that_of_the_others(seed, out, at):
    """Up to four of ten, before or after their shares: the sum of the others' whole numbers, and of
    what they say.
    """
    real, whole = drawn(10, seed=seed)
    gone = sorted(f"d{i}" for i in out)
    total, _ = summed(whole, never_dealt=gone[:at], never_sent=gone[at:])
    left = [name for name in real if name not in gone]
    assert (total == added(whole, left)).all()
    plain = np.sum(
        [real[name] * min(1.0, CLIP / np.linalg.norm(real[name])) for name in left], axis=0
    )
    np.testing.assert_allclose(
        restored(total, CLIP), plain, atol=(0.5 * CLIP / STEPS + 4e-6) * len(left)
    )


def test_two_of_ten_never_reveal():
    """As many as are needed reveal; with fewer there is no sum."""
    _, whole = drawn(10)
    total, _ = summed(whole, never_sent={"d0", "d7"}, never_revealed={"d3", "d4"})
    assert (total == added(whole, whole.keys() - {"d0", "d7"})).all()
    with pytest.raises(RefusedError, match="are needed"):
        summed(whole, never_sent={"d0", "d7"}, never_revealed={"d1", "d2", "d3"})


def test_what_the_server_sees_is_noise():
    """Vectors of zeros look uniform, differ in every exchange, and the sum of some of them is no
    sum.
    """
    zeros = {f"d{i}": np.zeros(4096, np.uint32) for i in range(4)}
    total, vectors = summed(zeros)
    assert not total.any()
    for vector in vectors.values():
        assert abs(vector.astype(np.float64).mean() / 2**31 - 1) < 0.05
    assert (vectors["d0"] + vectors["d1"]).any()
    assert (summed(zeros)[1]["d0"] != vectors["d0"]).mean() > 0.99


def test_the_largest_values_of_all_fit():
    """Both ends, from as many as a sum may have."""
    for sign in (1, -1):
        one = whole_numbers(
            {"w": np.array([sign * 9], np.float32)}, {"w": np.zeros(1, np.float32)}, 7.0
        )
        total = np.sum([one] * SUM_LIMIT, axis=0, dtype=np.uint32)
        np.testing.assert_allclose(restored(total, 7.0), sign * 7 * SUM_LIMIT, rtol=2e-6)


def test_an_update_is_bounded():
    """Far beyond the bound, its difference keeps its direction, and has the norm of the bound."""
    sent = {"b": np.zeros(3, np.float32), "a": np.ones((2, 2), np.float32)}
    update = {name: value + np.float32(100) for name, value in sent.items()}
    change = restored(whole_numbers(update, sent, 2.0), 2.0)
    np.testing.assert_allclose(change, np.full(7, 2.0 / 7**0.5), rtol=1e-5)


def test_keys_on_which_nobody_can_agree_are_refused():
    """A point of low order would spoil the sum of all."""
    good = public_key(new_key())
    check_keys((good, good, good))
    with pytest.raises(RefusedError, match="not valid for a key agreement"):
        check_keys((good, "00" * 32, good))


def test_a_step_that_comes_again_is_answered_alike():
    """A message may have been lost: the same shares go out, not others."""
    cohort = CohortOfMembers(FIVE).met()
    member = cohort.members["d0"]
    steps = [
        instruct(keys=cohort.keys),
        instruct(dealt=cohort.dealt_to("d0"), challenge=cohort.challenge),
        instruct(members=cohort.joined),
        instruct(sent=("d0", "d1", "d3")),
    ]
    for step in steps:
        assert member.answer(step) == member.answer(step)
    assert member.answer(steps[0])["sealed"] == cohort.sealed["d0"]
    assert member.answer(steps[-1])["revealed"].keys() == set(FIVE)


def test_of_nobody_both_secrets_are_revealed():
    """Of who sent the share of its own mask, of who did not that of its mask key."""
    cohort = CohortOfMembers(FIVE).met()
    sent = ("d0", "d1", "d3")
    shares = cohort.reveal(sent)
    places = {name: at for at, name in enumerate(FIVE, 1)}
    for of in FIVE:
        secret = join_secret({places[by]: int(given[of], 16) for by, given in shares.items()})
        _, mask_key, own_key = cohort.keys[of]
        expected = own_key if of in sent else mask_key
        assert secret < 2**256
        assert public_key(f"{secret:064x}") == expected


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (lambda cohort: {"sent": ("d0", "d1")}, "too few were sent"),
        (lambda cohort: {"sent": ("d0", "d1", "stranger")}, "one is no member"),
        (lambda cohort: {"sent": ("d1", "d2", "d3")}, "its own is not in the sum"),
        (lambda cohort: {"keys": dict(list(cohort.keys.items())[:4])}, "another cohort"),
        (lambda cohort: {"keys": {**cohort.keys, "d1": cohort.keys["d2"]}}, "another key"),
        (
            lambda cohort: {"dealt": dict(list(cohort.dealt_to("d0").items())[:4])},
            "others that dealt",
        ),
        (
            lambda cohort: {"dealt": cohort.dealt_to("d0"), "challenge": "0" * 66},
            "another challenge",
        ),
        (lambda cohort: {"members": ("d0", "d1", "d2")}, "other members"),
        (lambda cohort: {"disputed": ("d1",)}, "shares are opened after it has joined"),
        (lambda cohort: {"unmatched": ("d1",)}, "masks in common before it has revealed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_step_is_refused(fields, why):
    """Whatever could take the mask off one vector, once it has met the others."""
    cohort = CohortOfMembers(FIVE).met()
    with pytest.raises(RefusedError, match="contradicts"):
        cohort.members["d0"].answer(instruct(**fields(cohort)))


def test_who_has_revealed_for_some_reveals_for_no_others():
    """Shares of both secrets of one member would show its vector."""
    cohort = CohortOfMembers(FIVE).met()
    cohort.members["d0"].answer(instruct(sent=("d0", "d1", "d3")))
    for fields in ({"sent": ("d0", "d1", "d4")}, {"unmatched": ("d1",)}):
        with pytest.raises(RefusedError, match="contradicts"):
            cohort.members["d0"].answer(instruct(**fields))


@pytest.mark.parametrize("wrong", ["another member", "another sum"])
def test_shares_are_for_one_member_in_one_sum(wrong):
    """Sealed for another, or for another sum, they do not open, and their dealers are accused."""
    cohort = CohortOfMembers("abc")
    cohort.deal()
    place = cohort.place if wrong == "another member" else "another place"
    fresh = Member("b", place, 3)
    for key in ("_seal_key", "_mask_key", "_own_secret"):
        setattr(fresh, key, getattr(cohort.members["b"], key))
    fresh.answer(instruct(keys=cohort.keys))
    dealt = cohort.dealt_to("a" if wrong == "another member" else "b")
    checks = answer(fresh, "b", dealt=dealt, challenge=cohort.challenge).checks
    assert checks == {"a": "", "b": "", "c": ""}


@pytest.mark.parametrize("count", [2, 3])
def test_a_small_sum_is_refused(count):
    """Fewer members than `least`; and nobody else's cohort."""
    names = [f"d{at}" for at in range(count)]
    with pytest.raises(RefusedError, match="fewer"):
        CohortOfMembers(names, least=count + 1).met()
    assert CohortOfMembers(names, least=count).met().joined
    stranger = Member("d0", "place", 2)
    with pytest.raises(RefusedError, match="contradicts"):
        stranger.answer(
            instruct(keys={name: Member(name, "place", 2).keys for name in ("d0", "d1", "d2")})
        )
