"""One device's part in one secure sum."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.identity.sealing import new_key, public_key
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.messages import Sum
from fleet_protocol.messages.values import MemberKeys
from fleet_protocol.secure_sum.dealing import (
    DealtShares,
    dealing_place,
    open_shares,
    seal_shares,
    split_secrets,
)
from fleet_protocol.secure_sum.masks import check_keys, own_mask, pair_key, pair_mask
from fleet_protocol.secure_sum.sharing import threshold, to_digits
from fleet_protocol.weights import MASKED, encode_weights

Answer = dict[str, Mapping[str, str]]
"""Fields of `Shares` that answer a step."""


class Step(IntEnum):
    """The steps of a member, in their order."""

    DEAL = 0
    CHECK = 1
    DISPUTE = 2
    JOIN = 3
    REVEAL = 4
    UNPAIR = 5


@dataclass(frozen=True)
class _FinishedStep:
    """A finished step: the request, and the member's answer."""

    request: object
    answer: Answer


def most_openings(needed: int) -> int:
    """Return how many shares a dealer opens to prove them.

    The server then knows these, so that fewer further shares would give it the secret.
    """
    return (needed - 1) // 2


class Member:
    """One device's part in one sum.

    It exists only in memory, so that its secrets never reach a disk.

    Args:
        name: name of the device.
        place: digest of the weights that all members were sent, so that nothing counts in another
            sum.
        least: fewest members of a sum.

    Attributes:
        partners: members whose masks it shares, including itself; once there are some, its vector
            can be masked.
    """

    def __init__(
        self,
        name: str,
        place: str,
        least: int,
    ) -> None:
        self._name = name
        self._place = place
        self._least = least
        # Each of the three secrets is for one purpose and only for this sum.
        self._seal_key = new_key()
        self._mask_key = new_key()
        self._own_secret = new_key()
        self._cohort: Mapping[str, MemberKeys] = {}
        self._openings: dict[str, str] = {}  # of the shares that it dealt, by member
        self._received: dict[str, DealtShares] = {}  # shares that open, by dealer
        self._sent: frozenset[str] = frozenset()
        self.partners: frozenset[str] = frozenset()
        self._taken: dict[Step, _FinishedStep] = {}

    @property
    def keys(self) -> MemberKeys:
        """Public keys.

        Others seal shares to the first and agree on masks by the second. The third belongs to the
        secret of the own mask, so that the server can check whether it has restored it.
        """
        return public_key(self._seal_key), public_key(self._mask_key), public_key(self._own_secret)

    def answer(self, message: Sum) -> Answer:
        """Take the next step, once, and return the content of `Shares` that answers it.

        A repeated message gets the same answer.

        Raises:
            RefusedError: it does not fit an earlier step, or involves too few members.
        """
        step, take_step = self._step_of(message)
        request = _request(message)
        if step not in self._taken:
            # A missed step is not repeated: shares that are opened late could belong to a merged
            # member.
            in_order = all(earlier < step for earlier in self._taken)
            self._require(in_order, self._cohort or message.keys)
            self._taken[step] = _FinishedStep(request, take_step(message))
        taken = self._taken[step]
        # Shares of both secrets of one member, or masks for two cohorts, would reveal its vector.
        self._require(request == taken.request, self._cohort)
        return taken.answer

    def _step_of(self, message: Sum) -> tuple[Step, Callable[[Sum], Answer]]:
        if message.keys:
            return Step.DEAL, self._deal
        if message.dealt:
            return Step.CHECK, self._check
        if message.disputed:
            return Step.DISPUTE, self._prove
        if message.members:
            return Step.JOIN, self._join
        if message.sent:
            return Step.REVEAL, self._reveal
        return Step.UNPAIR, self._unpair

    @property
    def _needed(self) -> int:
        return threshold(len(self._cohort), self._least)

    def _deal(self, message: Sum) -> Answer:
        """Deal shares of both secrets to all members of a cohort."""
        names = sorted(message.keys)
        self._require(message.keys.get(self._name) == self.keys, names)
        for keys in message.keys.values():
            check_keys(keys)
        self._cohort = message.keys
        sealed = {}
        shares = split_secrets(self._own_secret, self._mask_key, self._needed, len(names))
        for name, shares_of_member in zip(names, shares, strict=True):
            seal_key = message.keys[name][0]
            place = dealing_place(self._place, self._name, name)
            dealing = seal_shares(shares_of_member, seal_key, place)
            sealed[name] = dealing.seal
            self._openings[name] = dealing.opening
        return {"sealed": sealed}

    def _check(self, message: Sum) -> Answer:
        """Open the shares that were dealt, and answer the challenge for each dealer.

        An empty answer accuses the dealer: its shares do not open.
        """
        self._require(message.dealt.keys() <= self._cohort.keys(), message.dealt)
        challenge = int(message.challenge or "0", 16)
        answers = {}
        for dealer, sealed in message.dealt.items():
            place = dealing_place(self._place, dealer, self._name)
            shares = open_shares(sealed, self._seal_key, place)
            if shares is None:
                answers[dealer] = ""
                continue
            self._received[dealer] = shares
            answers[dealer] = to_digits(shares.answer(challenge))
        return {"checks": answers}

    def _prove(self, message: Sum) -> Answer:
        """Open the shares of some members that report them as wrong."""
        disputed = set(message.disputed)
        is_bounded = len(disputed) <= most_openings(self._needed)
        fits = is_bounded and self._name not in disputed and disputed <= self._openings.keys()
        self._require(fits, self._cohort)
        return {"openings": {name: self._openings[name] for name in sorted(disputed)}}

    def _join(self, message: Sum) -> Answer:
        """Learn the remaining members, which share masks with this one."""
        members = frozenset(message.members)
        self._require(self._name in members and members <= self._received.keys(), members)
        self.partners = members
        return {}

    def _reveal(self, message: Sum) -> Answer:
        """Reveal one share of every member, which depends on whether its vector arrived."""
        sent = frozenset(message.sent)
        # A member reveals only its own sums, so that all who know of a sum are in it.
        self._require(self._name in sent and sent <= self.partners, sent)
        self._sent = sent
        revealed = {}
        for name in sorted(self.partners):
            shares = self._received[name]
            revealed[name] = to_digits(shares.own if name in sent else shares.mask)
        return {"revealed": revealed}

    def _unpair(self, message: Sum) -> Answer:
        """Return the keys of shared masks with members who dealt shares of a wrong key."""
        unmatched = set(message.unmatched)
        self._require(unmatched <= self.partners - self._sent, self._sent)
        keys = {}
        for name in sorted(unmatched):
            keys[name] = pair_key(self._mask_key, self._cohort[name][1], self._place).hex()
        return {"pair_keys": keys}

    def _require(self, fits: object, members: Collection[str]) -> None:
        """Refuse a step that does not fit, or has too few members."""
        if not fits or len(members) < self._needed:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"a secure sum with {', '.join(sorted(members))} contradicts an earlier step of "
                f"it, or has fewer members than {self._needed}",
            )

    def masked(self, update: bytes) -> bytes:
        """Return the blob to send, from a blob with the `whole_numbers` of an update."""
        metadata, numbers = blob_in(update)
        total = numbers[MASKED].astype(np.uint32)
        total += own_mask(self._own_secret, self._place, total.size)
        for name in self.partners:
            if name != self._name:
                key = pair_key(self._mask_key, self._cohort[name][1], self._place)
                total += pair_mask(self._name, name, key, total.size)
        return encode_weights({MASKED: total}, metadata)


def _request(message: Sum) -> object:
    """Return the request in a message, to compare it with a repetition."""
    return (
        message.keys,
        message.dealt,
        message.challenge,
        frozenset(message.disputed),
        frozenset(message.members),
        frozenset(message.sent),
        frozenset(message.unmatched),
    )
