"""Shares of a secret among members, and the detection of wrong shares.

Shamir, "How to Share a Secret", CACM 1979: shares are values of a random polynomial modulo a prime
at the places 1, 2 and so on, and the secret is its value at 0. Whether values lie on a polynomial
of low degree is checked by the dual code, as Cascudo and David do in "SCRAPE", ACNS 2017,
https://eprint.iacr.org/2017/216, section 2.1.
"""

import itertools
import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence

from fleet_protocol.messages.values import SHARE_DIGITS

PRIME = 2**256 + 297
"""Larger than any secret of 32 bytes."""

_MOST_TRIES = 200
"""Sets of shares that are tried for a secret; enough for two wrong shares of twenty."""


def threshold(count: int, least: int) -> int:
    """Return how many shares restore a secret of a cohort.

    A majority, so that a server cannot claim to two groups of members that others dropped out: one
    of them would have too few shares. And `least`, so that every opened sum has this many members
    that know it and take part in no later one (`fleet_protocol.secure_sum`).

    Args:
        count: members that make shares.
        least: fewest members of a sum.
    """
    return max(count // 2 + 1, least)


def split_secret(
    secret: int,
    needed: int,
    count: int,
) -> list[int]:
    """Return shares of a secret, at the places 1, 2 and so on."""
    coefficients = [secret]
    for _ in range(needed - 1):
        # Uniform below the prime: otherwise fewer shares than necessary would reveal something
        # about the secret.
        coefficients.append(secrets.randbelow(PRIME))
    shares = []
    for place in range(1, count + 1):
        powers = enumerate(coefficients)
        # From place 1: the value at 0 is the secret itself.
        shares.append(sum(factor * place**power for power, factor in powers) % PRIME)
    return shares


def join_secret(shares: Mapping[int, int]) -> int:
    """Return the secret from the necessary number of shares, by place.

    Too few or wrong shares give an arbitrary number.
    """
    return value_at(0, shares)


def value_at(target: int, values: Mapping[int, int]) -> int:
    """Return the value at a place of the polynomial through some values, by their places."""
    coefficients = _coefficients(target, values)
    return sum(coefficients[place] * value for place, value in values.items()) % PRIME


def _coefficients(target: int, places: Collection[int]) -> dict[int, int]:
    """Return the weights of the values at some places for another place, by Lagrange."""
    coefficients = {}
    for place in places:
        further_places = [further for further in places if further != place]
        divisor = math.prod(further - place for further in further_places)
        factor = math.prod(further - target for further in further_places)
        coefficients[place] = factor * pow(divisor, -1, PRIME) % PRIME
    return coefficients


def restore_secret(
    shares: Mapping[int, int],
    needed: int,
    is_right: Callable[[int], bool],
) -> tuple[int, frozenset[int]] | None:
    """Restore a secret from shares of which some may be wrong.

    Args:
        shares: values by place.
        needed: how many restore the secret.
        is_right: whether a number is the secret.

    Returns:
        The secret and the places of wrong shares; None if no set of shares restores it.
    """
    choices = itertools.combinations(sorted(shares), needed)
    for chosen in itertools.islice(choices, _MOST_TRIES):
        right_shares = {place: shares[place] for place in chosen}
        secret = join_secret(right_shares)
        # Any set of shares gives some number; only an external check shows whether it is the right
        # one.
        if not is_right(secret):
            continue
        wrong_places = set()
        # The polynomial is known now, so every other share can be judged by itself.
        for place in shares.keys() - set(chosen):
            if value_at(place, right_shares) != shares[place]:
                wrong_places.add(place)
        return secret, frozenset(wrong_places)
    return None


class SecretRestorer:
    """Restores secrets from shares at the same places; the work for the places is done once.

    Args:
        places: places of the shares.
        needed: how many restore a secret.
    """

    def __init__(self, places: Collection[int], needed: int) -> None:
        self._needed = needed
        self._coefficients = _coefficients(0, sorted(places)[:needed])
        self._check = PolynomialCheck(places, needed)

    def restore(
        self, shares: Mapping[int, int], is_right: Callable[[int], bool]
    ) -> tuple[int, frozenset[int]] | None:
        """Restore a secret, as `restore_secret` does."""
        # The quick way is for the usual case, in which all shares fit.
        if self._check.stray_places(shares):
            return restore_secret(shares, self._needed, is_right)
        secret = self.value(shares)
        return (secret, frozenset()) if is_right(secret) else None

    def value(self, shares: Mapping[int, int]) -> int:
        """Return the number that the first shares restore."""
        terms = (factor * shares[place] for place, factor in self._coefficients.items())
        return sum(terms) % PRIME

    def are_consistent(self, shares: Mapping[int, int]) -> bool:
        """Return whether all shares belong to one secret."""
        return not self._check.stray_places(shares)


class PolynomialCheck:
    """Checks values at some places against polynomials with `needed` coefficients.

    Values at n places are on one polynomial if n - `needed` sums of them, weighted by a word of the
    dual code, are zero. One wrong value at the place x makes these sums a geometric sequence of the
    ratio x.

    Args:
        places: where the values are.
        needed: coefficients of the polynomial.
    """

    def __init__(self, places: Collection[int], needed: int) -> None:
        self._places = sorted(places)
        self._weights = []
        for place in self._places:
            distances = [place - further for further in self._places if further != place]
            self._weights.append(pow(math.prod(distances), -1, PRIME))
        # With no more shares than are needed nothing is left to check by.
        self._checks = max(0, len(self._places) - needed)

    def stray_places(self, values: Mapping[int, int]) -> frozenset[int]:
        """Return the places whose values contradict the others.

        Returns:
            No place if all values fit; one if the others fit without it; all places if it
            cannot be decided which values are wrong.
        """
        sums = self._weighted_sums([values[place] for place in self._places])
        if not any(sums):
            return frozenset()
        # One sum shows that something is wrong, but not where.
        if len(sums) > 1 and sums[0]:
            ratio = sums[1] * pow(sums[0], -1, PRIME) % PRIME
            is_geometric = True
            for before, after in itertools.pairwise(sums):
                is_geometric = is_geometric and after == before * ratio % PRIME
            if is_geometric and ratio in self._places:
                return frozenset({ratio})
        return frozenset(self._places)

    def _weighted_sums(self, values: Sequence[int]) -> list[int]:
        terms = []
        for weight, value in zip(self._weights, values, strict=True):
            terms.append(weight * value % PRIME)
        sums = []
        for _ in range(self._checks):
            sums.append(sum(terms) % PRIME)
            terms = [term * place % PRIME for term, place in zip(terms, self._places, strict=True)]
        return sums


def to_digits(share: int) -> str:
    """Return a share as hexadecimal digits of a fixed number."""
    return f"{share:0{SHARE_DIGITS}x}"


def from_digits(digits: str) -> int | None:
    """Return the share from hexadecimal digits; None if it is too large for one."""
    share = int(digits, 16)
    return share if share < PRIME else None
