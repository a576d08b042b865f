"""Removes the masks from a secure sum: the server's last step, as a function of revealed shares."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.identity.sealing import public_key
from fleet_protocol.messages.values import MemberKeys
from fleet_protocol.secure_sum.fixed_point import Words
from fleet_protocol.secure_sum.masks import own_mask, pair_key, pair_mask
from fleet_protocol.secure_sum.sharing import (
    SecretRestorer,
    from_digits,
    threshold,
)


@dataclass(frozen=True)
class Revealed:
    """The state of a sum whose vectors have arrived.

    Attributes:
        place: digest of the weights that all members were sent.
        least: fewest members of a sum.
        cohort: public keys of all devices that made shares.
        members: those that share masks; vectors of some of them may not have arrived.
        sent: members whose vectors arrived.
        shares: the shares, by the member that revealed them and the member whose secret it is.
        pair_keys: keys of shared masks, by the member that sent them and its partner.
    """

    place: str
    least: int
    cohort: Mapping[str, MemberKeys]
    members: frozenset[str]
    sent: frozenset[str]
    shares: Mapping[str, Mapping[str, str]]
    pair_keys: Mapping[str, Mapping[str, str]]

    @property
    def needed(self) -> int:
        """Return how many shares restore a secret."""
        return threshold(len(self.cohort), self.least)


@dataclass(frozen=True)
class Secrets:
    """Secrets that the shares of a sum restore.

    Attributes:
        own: secrets of own masks, by the member whose vector arrived.
        mask_keys: private mask keys, by the member whose vector did not arrive.
        unmatched: members whose vector did not arrive, and whose shares restore a key other than
            theirs.
        lost: members whose vector arrived, and whose shares contradict one another, or their key
            with no share to spare.
        liars: members that dealt or revealed wrong shares, with the reason.
    """

    own: Mapping[str, str]
    mask_keys: Mapping[str, str]
    unmatched: frozenset[str]
    lost: frozenset[str]
    liars: Mapping[str, str]


@dataclass(frozen=True)
class _Restored:
    """The result of restoring one member's secret.

    Attributes:
        secret: the secret, 32 bytes in hexadecimal; empty if nothing is restored.
        fits_key: whether it belongs to the member's public key.
        liars: members whose shares contradict it.
    """

    secret: str
    fits_key: bool
    liars: frozenset[str] = frozenset()


def restore_secrets(revealed: Revealed) -> Secrets:
    """Restore the secrets that remove the masks from a sum, as far as the shares allow.

    Raises:
        RefusedError: too few members revealed shares.
    """
    count = len(revealed.shares)
    if count < revealed.needed:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"{count} members revealed shares, but {revealed.needed} are needed",
        )
    own = {}
    mask_keys = {}
    unmatched = set()
    lost = set()
    liars = {}
    restoring = _Restoring(revealed)
    for name in sorted(revealed.members):
        is_sent = name in revealed.sent
        restored = restoring.restore(name)
        for liar in restored.liars:
            liars[liar] = f"{liar} revealed a wrong share of {name}"
        if restored.secret and not restored.fits_key:
            liars[name] = f"{name} dealt shares of a secret that does not belong to its key"
        if is_sent and restored.secret:
            # The shares count, not the key: a member may use any mask, just as it may send any
            # update.
            own[name] = restored.secret
        elif is_sent:
            lost.add(name)
        elif restored.fits_key:
            mask_keys[name] = restored.secret
        else:
            unmatched.add(name)
    return Secrets(own, mask_keys, frozenset(unmatched), frozenset(lost), liars)


class _Restoring:
    """Restores the secrets of the members of a sum, one after the other."""

    def __init__(self, revealed: Revealed) -> None:
        self._revealed = revealed
        self._names = sorted(revealed.cohort)
        # Every member reveals shares of all, so that mostly one restorer serves for all of them.
        self._restorers: dict[tuple[int, ...], SecretRestorer] = {}

    def restore(self, name: str) -> _Restored:
        """Restore the secret of a member, or find that its shares contradict one another."""
        shares = self._shares_of(name)
        if len(shares) < self._revealed.needed:
            return _Restored("", fits_key=False)
        restorer = self._restorer_for(tuple(shares))
        _, mask_public, own_public = self._revealed.cohort[name]
        expected = own_public if name in self._revealed.sent else mask_public
        result = restorer.restore(shares, partial(_has_public_key, expected))
        if result is not None:
            secret, wrong_places = result
            liars = frozenset(self._names[place - 1] for place in wrong_places)
            return _Restored(f"{secret:064x}", fits_key=True, liars=liars)
        # Any shares agree if there is none to spare. Then either the dealer or the revealing member
        # may have cheated: the secret may be wrong, and neither is accused.
        has_spare = len(shares) > self._revealed.needed
        if not has_spare or not restorer.are_consistent(shares):
            return _Restored("", fits_key=False)
        return _Restored(f"{restorer.value(shares) % 2**256:064x}", fits_key=False)

    def _shares_of(self, name: str) -> dict[int, int]:
        """Return the revealed shares of a member's secret, by place."""
        shares = {}
        for place, member in enumerate(self._names, 1):
            digits = self._revealed.shares.get(member, {}).get(name, "")
            share = from_digits(digits) if digits else None
            if share is not None:
                shares[place] = share
        return shares

    def _restorer_for(self, places: tuple[int, ...]) -> SecretRestorer:
        if places not in self._restorers:
            self._restorers[places] = SecretRestorer(places, self._revealed.needed)
        return self._restorers[places]


def _has_public_key(expected: str, secret: int) -> bool:
    # The prime is larger than 2^256, and every secret is below that.
    return secret < 2**256 and public_key(f"{secret:064x}") == expected


def unmasked(
    vectors: Mapping[str, Words],
    revealed: Revealed,
    secrets: Secrets,
) -> Words:
    """Return the sum of masked vectors without the masks.

    Args:
        vectors: those that arrived, by member.
        revealed: what is known of the sum.
        secrets: restored from its shares.

    Raises:
        RefusedError: a secret is lost, and its mask cannot be removed otherwise.
    """
    size = len(next(iter(vectors.values())))
    # Unsigned integers wrap around, as the masks require.
    total = np.zeros(size, np.uint32)
    for vector in vectors.values():
        total += vector
    for name in sorted(revealed.members):
        if name in vectors:
            if name not in secrets.own:
                raise _lost(name)
            total -= own_mask(secrets.own[name], revealed.place, size)
            continue
        for partner in vectors:
            key = _pair_key(name, partner, revealed, secrets)
            total -= pair_mask(partner, name, key, size)
    return total


def _pair_key(name: str, partner: str, revealed: Revealed, secrets: Secrets) -> bytes:
    """Return the key of the mask that a partner added for a member whose vector did not arrive."""
    mask_key = secrets.mask_keys.get(name)
    if mask_key is not None:
        return pair_key(mask_key, revealed.cohort[partner][1], revealed.place)
    sent_key = revealed.pair_keys.get(partner, {}).get(name)
    if sent_key is None:
        raise _lost(name)
    return bytes.fromhex(sent_key)


def _lost(name: str) -> RefusedError:
    return RefusedError(
        RefusalReason.BAD_SHARES,
        f"the shares of {name} do not restore its secret, so its masks stay on the sum",
    )
