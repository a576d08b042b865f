"""Shares make a secret, and tell which of them is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_protocol.secure_sum.sharing import (
    PRIME,
    PolynomialCheck,
    from_digits,
    join_secret,
    restore_secret,
    split_secret,
    threshold,
    to_digits,
    value_at,
)


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


@pytest.mark.parametrize(
    ("count", "least", "needed"), [(3, 2, 2), (3, 3, 3), (10, 3, 6), (4, 4, 4)]
)
def test_a_threshold_is_a_majority_and_the_least_sum(count, least, needed):
    """Two groups cannot both restore a secret, and as many know of a sum as it must have."""
    assert threshold(count, least) == needed


@settings(max_examples=50)
@given(needed=st.integers(1, 6), more=st.integers(2, 5), data=st.data())
def test_one_wrong_value_of_a_polynomial_is_found(needed, more, data):
    """With two more values than coefficients; with one more, that there is one."""
    count = needed + more
    values = dict(enumerate(split_secret(7, needed, count), 1))
    check = PolynomialCheck(values, needed)
    assert check.stray_places(values) == frozenset()
    wrong = data.draw(st.integers(1, count))
    spoilt = {**values, wrong: (values[wrong] + data.draw(st.integers(1, PRIME - 1))) % PRIME}
    assert check.stray_places(spoilt) == {wrong}
    fewer = dict(list(spoilt.items())[: needed + 1])
    strays = PolynomialCheck(fewer, needed).stray_places(fewer)
    assert strays == (frozenset(fewer) if wrong in fewer else frozenset())


def test_two_wrong_values_are_not_taken_for_one():
    """Nobody is blamed where it cannot be decided who is wrong."""
    values = dict(enumerate(split_secret(7, 4, 9), 1))
    check = PolynomialCheck(values, 4)
    values |= {2: 5, 7: 5}
    assert check.stray_places(values) == frozenset(range(1, 10))


def test_as_many_values_as_coefficients_fit_always():
    """There is nothing that they could contradict."""
    values = {1: 3, 2: 99, 5: 7}
    assert PolynomialCheck(values, 3).stray_places(values) == frozenset()


@settings(max_examples=20)
@given(needed=st.integers(2, 5), more=st.integers(1, 3), data=st.data())
def test_a_secret_is_restored_beside_a_wrong_share(needed, more, data):
    """And the wrong share is named."""
    secret = data.draw(st.integers(0, 2**256 - 1))
    shares = dict(enumerate(split_secret(secret, needed, needed + more), 1))
    wrong = data.draw(st.integers(1, needed + more))
    shares[wrong] = (shares[wrong] + 1) % PRIME
    result = restore_secret(shares, needed, lambda value: value == secret)
    assert result == (secret, frozenset({wrong}))
    assert restore_secret(shares, needed, lambda _value: False) is None


def test_values_and_digits():
    """A polynomial is known by its values; digits have one length, and none is too large."""
    assert value_at(3, {1: 10, 2: 20}) == 30
    assert from_digits(to_digits(PRIME - 1)) == PRIME - 1
    assert from_digits(f"{PRIME:066x}") is None
