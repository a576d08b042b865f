"""The shares that one member deals to another: three under a seal, with a later proof."""

import secrets
from dataclasses import dataclass

from fleet_protocol.errors import RefusedError
from fleet_protocol.identity.sealing import new_key, seal, unseal
from fleet_protocol.messages.values import SHARE_DIGITS
from fleet_protocol.secure_sum.sharing import PRIME, from_digits, split_secret, to_digits

_KEY_DIGITS = 64


@dataclass(frozen=True)
class DealtShares:
    """Shares of one dealer for one member.

    Attributes:
        own: share of the secret of the dealer's own mask.
        mask: shares of its private mask key.
        blind: shares of a random number, which hides the others in the answer to a challenge.
    """

    own: int
    mask: int
    blind: int

    def answer(self, challenge: int) -> int:
        """Return a combination of the shares, which reveals nothing about the two secrets.

        Combinations of all members lie on one polynomial if their shares do. If the shares of one
        secret do not, those combinations do not either, except for at most two of all challenges.
        """
        return (self.blind + challenge * self.own + challenge**2 * self.mask) % PRIME

    def to_digits(self) -> str:
        """Return the shares as hexadecimal digits of a fixed number."""
        return to_digits(self.own) + to_digits(self.mask) + to_digits(self.blind)

    @classmethod
    def from_digits(cls, digits: str) -> "DealtShares | None":
        """Return the shares from hexadecimal digits; None if they are not valid."""
        shares = []
        for start in range(0, 3 * SHARE_DIGITS, SHARE_DIGITS):
            # Missing digits become a number that is too large for a share.
            share = from_digits(digits[start : start + SHARE_DIGITS] or "f" * SHARE_DIGITS)
            if share is None:
                return None
            shares.append(share)
        own, mask, blind = shares
        return cls(own, mask, blind)


@dataclass(frozen=True)
class SealedShares:
    """Shares in the form in which they are sent, with the dealer's proof.

    Attributes:
        seal: the seal in hexadecimal.
        opening: digits of the key of the seal and of the shares, with which anyone makes the same
            seal again.
    """

    seal: str
    opening: str


def split_secrets(
    own_secret: str,
    mask_key: str,
    needed: int,
    count: int,
) -> list[DealtShares]:
    """Return the shares of both secrets, one for each member in the order of their names.

    Own mask and mask key are shared apart, because only one of them may be revealed.
    """
    own = split_secret(int(own_secret, 16), needed, count)
    mask = split_secret(int(mask_key, 16), needed, count)
    blind = split_secret(secrets.randbelow(PRIME), needed, count)
    shares = []
    for at in range(count):
        shares.append(DealtShares(own[at], mask[at], blind[at]))
    return shares


def seal_shares(shares: DealtShares, seal_key: str, place: str) -> SealedShares:
    """Seal shares for the member with a public seal key.

    Args:
        shares: shares for the member.
        seal_key: public key of the member, 32 bytes in hexadecimal.
        place: sum, dealer and member, see `dealing_place`.
    """
    digits = shares.to_digits()
    key = new_key()
    sealed = seal(bytes.fromhex(digits), seal_key, place, key).hex()
    return SealedShares(sealed, key + digits)


def open_shares(sealed: str, private_seal_key: str, place: str) -> DealtShares | None:
    """Open shares; None if they do not open, or are not three shares."""
    try:
        content = unseal(bytes.fromhex(sealed), [private_seal_key], place)
    except RefusedError:
        return None
    return DealtShares.from_digits(content.hex())


def proven_shares(opening: str, sealed: str, seal_key: str, place: str) -> DealtShares | None:
    """Return the shares that a dealer proves to have dealt; None if its proof fails.

    Args:
        opening: opening from the dealer.
        sealed: sealed shares that it dealt.
        seal_key: public key of the member to which it dealt.
        place: see `seal_shares`.
    """
    key = opening[:_KEY_DIGITS]
    digits = opening[_KEY_DIGITS:]
    if seal(bytes.fromhex(digits), seal_key, place, key).hex() != sealed:
        return None
    return DealtShares.from_digits(digits)


def dealing_place(place: str, dealer: str, member: str) -> str:
    """Return what a seal is bound to: the sum, the dealer and the member."""
    return f"{place}/{dealer}/{member}"
