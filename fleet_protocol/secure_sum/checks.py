"""Finds dealers of bad shares in a secure sum: the server's side of steps 3 and 4, pure functions.

Members answer a challenge for each dealer, or accuse it. A dealer whose shares contradict one
another, or that a member accuses, opens the shares in question; the server makes their seals again.
So the cheater is found, whether it is the dealer or the member, by a proof and not by votes. If a
dealer would have to open more shares than may be revealed, it is dropped without a proof.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from fleet_protocol.messages.values import MemberKeys
from fleet_protocol.secure_sum.dealing import dealing_place, proven_shares
from fleet_protocol.secure_sum.member import most_openings
from fleet_protocol.secure_sum.sharing import (
    PRIME,
    PolynomialCheck,
    from_digits,
    threshold,
    to_digits,
)


def new_challenge() -> str:
    """Return a random challenge, which no dealer can know when it deals."""
    return to_digits(secrets.randbelow(PRIME))


@dataclass(frozen=True)
class Dealings:
    """The shares and answers of the members of a cohort.

    Attributes:
        place: digest of the weights that all members were sent.
        least: fewest members of a sum.
        cohort: public keys of the members that make shares, by name.
        dealt: seals by dealer and member.
        challenge: challenge that the members were sent.
        answers: answers of each member that has answered, by dealer; empty if it accuses the
            dealer.
    """

    place: str
    least: int
    cohort: Mapping[str, MemberKeys]
    dealt: Mapping[str, Mapping[str, str]]
    challenge: str
    answers: Mapping[str, Mapping[str, str]]

    @property
    def needed(self) -> int:
        """Return how many shares restore a secret."""
        return threshold(len(self.cohort), self.least)


@dataclass(frozen=True)
class Findings:
    """The findings from the answers to a challenge.

    Attributes:
        liars: devices that must be dropped, with the reason.
        disputes: members whose shares a dealer must open, by dealer.
    """

    liars: Mapping[str, str]
    disputes: Mapping[str, frozenset[str]]


def examine(dealings: Dealings) -> Findings:
    """Find the dealers whose shares are accused, or contradict one another."""
    names = sorted(dealings.cohort)
    places = {name: place for place, name in enumerate(names, 1)}
    liars: dict[str, str] = {}
    disputes: dict[str, frozenset[str]] = {}
    check: PolynomialCheck | None = None
    checked_places: tuple[int, ...] = ()
    for dealer in dealings.dealt:
        accusers, values = _answers_about(dealings, dealer, places)
        # Members differ in few dealers, so that one check mostly serves for all of them.
        if check is None or tuple(values) != checked_places:
            checked_places = tuple(values)
            check = PolynomialCheck(checked_places, dealings.needed)
        strays = check.stray_places(values)
        disputed = accusers | {names[place - 1] for place in strays}
        # A dealer has no excuse for its own share, and may not open more than these.
        if dealer in disputed or len(disputed) > most_openings(dealings.needed):
            liars[dealer] = (
                f"the shares that {dealer} dealt contradict one another, or do not open, for "
                f"{', '.join(sorted(disputed))}"
            )
        elif disputed:
            disputes[dealer] = frozenset(disputed)
    return Findings(liars, disputes)


def _answers_about(
    dealings: Dealings, dealer: str, places: Mapping[str, int]
) -> tuple[set[str], dict[int, int]]:
    """Return the members that accuse a dealer, and the answers of the others by place."""
    accusers = set()
    values = {}
    for member, answers in sorted(dealings.answers.items()):
        digits = answers.get(dealer, "")
        value = from_digits(digits) if digits else None
        if value is None:
            accusers.add(member)
        else:
            values[places[member]] = value
    return accusers, values


def judge(
    dealings: Dealings,
    disputes: Mapping[str, frozenset[str]],
    openings: Mapping[str, Mapping[str, str]],
) -> dict[str, str]:
    """Return who cheats in some disputes, with the reason.

    Args:
        dealings: dealings of the cohort.
        disputes: members whose shares are in question, by dealer.
        openings: what each dealer has opened, by dealer and member.
    """
    liars = {}
    for dealer, members in disputes.items():
        for member in sorted(members):
            opening = openings.get(dealer, {}).get(member)
            if opening is None:
                liars[dealer] = f"{dealer} does not open the shares that it dealt to {member}"
                continue
            shares = proven_shares(
                opening,
                dealings.dealt[dealer][member],
                dealings.cohort[member][0],
                dealing_place(dealings.place, dealer, member),
            )
            answer = dealings.answers[member].get(dealer, "")
            if shares is None:
                liars[dealer] = f"{dealer} dealt shares to {member} that it cannot prove"
            elif answer == to_digits(shares.answer(int(dealings.challenge, 16))):
                liars[dealer] = f"{dealer} dealt shares to {member} that contradict the others"
            else:
                liars[member] = f"{member} accuses {dealer} of bad shares, but they are good"
    return liars
