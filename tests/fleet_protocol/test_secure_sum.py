"""A server learns the sum of those whose vectors came, whoever drops out; a member takes no step
that shows its own.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_protocol.errors import RefusedError
from fleet_protocol.identity.sealing import new_key, public_key
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Shares, Sum
from fleet_protocol.messages.values import SUM_LIMIT
from fleet_protocol.secure_sum import (
    STEPS,
    Member,
    check_keys,
    join_secret,
    majority,
    restored,
    split_secret,
    unmasked,
    whole_numbers,
)
from fleet_protocol.weights import MASKED, encode_weights

HEAD = {"fleet": "f", "run": "r", "round": 1, "task": "t"}
PLACE = "digest of the weights"
CLIP = 4.0


def said(**fields):
    return Sum(**HEAD, **fields)


def met(names, never_dealt=(), least=3):
    """Members that have made shares for each other, with what each was told of it."""
    members = {name: Member(name, PLACE, least) for name in names}
    cohort = {name: member.keys for name, member in members.items()}
    sealed = {
        name: Shares(**HEAD, device=name, **member.answer(said(keys=cohort))).sealed
        for name, member in members.items()
        if name not in never_dealt
    }
    told = {
        name: said(dealt={of: shares[name] for of, shares in sealed.items()}) for name in sealed
    }
    for name, message in told.items():
        assert not members[name].dealt
        assert members[name].answer(message) == {}
    return members, cohort, told


def sent_by(member, words):
    return tensors_in(member.masked(encode_weights({MASKED: words}, {"task": "t"})))[MASKED]


def summed(values, never_dealt=(), never_sent=(), never_revealed=()):
    """The whole exchange; the sum, and what the server saw."""
    members, cohort, told = met(values, never_dealt)
    vectors = {
        name: sent_by(members[name], values[name]) for name in told if name not in never_sent
    }
    revealed = {
        name: Shares(
            **HEAD, device=name, **members[name].answer(said(sent=tuple(vectors)))
        ).revealed
        for name in vectors
        if name not in never_revealed
    }
    return unmasked(vectors, cohort, tuple(told), revealed, PLACE), vectors


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
    found, _ = summed(whole, never_dealt=gone[:at], never_sent=gone[at:])
    left = [name for name in real if name not in gone]
    assert (found == sum((whole[name] for name in left), np.zeros(50, np.uint32))).all()
    plain = np.sum(
        [real[name] * min(1.0, CLIP / np.linalg.norm(real[name])) for name in left], axis=0
    )
    np.testing.assert_allclose(
        restored(found, CLIP), plain, atol=(0.5 * CLIP / STEPS + 4e-6) * len(left)
    )


def test_two_of_ten_never_reveal():
    """As many as are needed reveal; with fewer there is no sum."""
    _, whole = drawn(10)
    found, _ = summed(whole, never_sent={"d0", "d7"}, never_revealed={"d3", "d4"})
    assert (
        found == sum((whole[n] for n in whole if n not in {"d0", "d7"}), np.zeros(50, np.uint32))
    ).all()
    with pytest.raises(RefusedError, match="are needed"):
        summed(whole, never_sent={"d0", "d7"}, never_revealed={"d1", "d2", "d3"})


def test_what_the_server_sees_is_noise():
    """Vectors of zeros look uniform, differ in every exchange, and the sum of some of them is no
    sum.
    """
    zeros = {f"d{i}": np.zeros(4096, np.uint32) for i in range(4)}
    found, vectors = summed(zeros)
    assert not found.any()
    for vector in vectors.values():
        assert abs(vector.astype(np.float64).mean() / 2**31 - 1) < 0.05
    assert (vectors["d0"] + vectors["d1"]).any()
    assert (summed(zeros)[1]["d0"] != vectors["d0"]).mean() > 0.99


@settings(max_examples=25)
@given(secret=st.integers(0, 2**256 - 1), needed=st.integers(1, 8), more=st.integers(0, 4))
def test_shares_make_a_secret(secret, needed, more):
    """Any of them, as many as are needed; with one less something else."""
    shares = dict(enumerate(split_secret(secret, needed, needed + more), 1))
    some = dict(list(shares.items())[more:])
    assert join_secret(some) == secret
    if needed > 1:
        del some[next(iter(some))]
        assert join_secret(some) != secret


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
    found = restored(whole_numbers(update, sent, 2.0), 2.0)
    np.testing.assert_allclose(found, np.full(7, 2.0 / 7**0.5), rtol=1e-5)


def test_keys_on_which_nobody_can_agree_are_refused():
    """A point of low order would spoil the sum of all."""
    good = public_key(new_key())
    check_keys((good, good))
    with pytest.raises(RefusedError, match="nobody can agree"):
        check_keys((good, "00" * 32))


def test_a_step_that_comes_again_is_answered_alike():
    """A message may have been lost: the same shares go out, not others."""
    members, cohort, told = met([f"d{at}" for at in range(5)])
    one = members["d0"]
    sent = said(sent=("d0", "d1", "d3"))
    assert one.answer(said(keys=cohort)) == one.answer(said(keys=cohort))
    assert one.answer(told["d0"]) == {}
    assert one.answer(sent) == one.answer(sent)
    assert one.answer(sent)["revealed"].keys() == set(members)


def test_of_nobody_both_secrets_are_revealed():
    """Of who sent the share of its own mask, of who did not that of its mask key."""
    members, cohort, _ = met([f"d{at}" for at in range(5)])
    revealed = {
        name: members[name].answer(said(sent=("d0", "d1", "d3")))["revealed"]
        for name in ("d0", "d1", "d3")
    }
    places = {name: at for at, name in enumerate(sorted(cohort), 1)}
    for of in cohort:
        secret = join_secret({places[by]: int(shares[of], 16) for by, shares in revealed.items()})
        is_mask_key = secret < 2**256 and public_key(f"{secret:064x}") == cohort[of][1]
        assert is_mask_key == (of in {"d2", "d4"}), of


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (lambda cohort, told: {"sent": ("d0", "d1")}, "too few were sent"),
        (lambda cohort, told: {"sent": ("d0", "d1", "stranger")}, "one is no member"),
        (lambda cohort, told: {"keys": dict(list(cohort.items())[:4])}, "another cohort"),
        (lambda cohort, told: {"keys": {**cohort, "d1": cohort["d2"]}}, "another key"),
        (
            lambda cohort, told: {"dealt": dict(list(told["d0"].dealt.items())[:4])},
            "others that dealt",
        ),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_another_step_is_refused(fields, why):
    """Whatever could take the mask off one vector, once it has met the others."""
    members, cohort, told = met([f"d{at}" for at in range(5)])
    with pytest.raises(RefusedError, match="does not fit"):
        members["d0"].answer(said(**fields(cohort, told)))


def test_who_has_revealed_for_some_reveals_for_no_others():
    """Shares of both secrets of one member would show its vector."""
    members, _, _ = met([f"d{at}" for at in range(5)])
    members["d0"].answer(said(sent=("d0", "d1", "d3")))
    with pytest.raises(RefusedError, match="does not fit"):
        members["d0"].answer(said(sent=("d0", "d1", "d4")))


def test_shares_are_for_one_member_in_one_sum():
    """Sealed for another, or for another sum, they are refused."""
    for wrong in ("another member", "another sum"):
        members, cohort, told = met("abc")
        fresh = Member("b", PLACE if wrong == "another member" else "another place", 3)
        for key in ("_seal_key", "_mask_key", "_own_secret"):
            setattr(fresh, key, getattr(members["b"], key))
        fresh.answer(said(keys=cohort))
        fresh.answer(told["a" if wrong == "another member" else "b"])
        with pytest.raises(RefusedError, match="does not open"):
            fresh.answer(said(sent=("a", "b", "c")))


@pytest.mark.parametrize("count", [2, 3])
def test_a_small_sum_is_refused(count):
    """Fewer members than `least`; and nobody else's cohort."""
    with pytest.raises(RefusedError, match="fewer"):
        met([f"d{at}" for at in range(count)], least=count + 1)
    assert met([f"d{at}" for at in range(count)], least=count)
    assert majority(count) == 2
    stranger = Member("d0", PLACE, 2)
    with pytest.raises(RefusedError, match="does not fit"):
        stranger.answer(
            said(keys={name: Member(name, PLACE, 2).keys for name in ("d0", "d1", "d2")})
        )
