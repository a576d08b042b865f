"""Sums of updates of which the server learns the sum alone: pairwise masks that cancel, and shares
for who drops out.

Keith Bonawitz et al.: "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS
2017, https://doi.org/10.1145/3133956.3133982, figure 4, for honest but curious servers. The members
of a cohort train one plan, so that their entries are the same. In order:

1. every member makes a :class:`Member` and tells its two public keys;
2. it deals shares of its two secrets, sealed for each member, which the server passes on;
3. it sends its vector of whole numbers, masked with a mask of its own and with one for each other
   member that dealt;
4. of those whose vector came the members that are left reveal their shares of the own masks, of the
   others those of the
   mask keys, and never both of one member.

Whole numbers are counted modulo 2^32, and no sum of `SUM_LIMIT` vectors runs over. Keys and shares
are hexadecimal.
"""

import math
import secrets
from collections.abc import Collection, Mapping

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.identity.sealing import (
    agreed_key,
    derive_key,
    new_key,
    private_key,
    public_key,
    seal,
    unseal,
)
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.messages import Sum
from fleet_protocol.messages.values import SHARE_DIGITS, SUM_LIMIT, KeyPair
from fleet_protocol.noise import Tensors, bounded
from fleet_protocol.weights import MASKED, encode_weights

Words = NDArray[np.uint32]

STEPS = 2**31 // SUM_LIMIT - 1
"""Whole numbers from nothing to the bound of an entry."""

_PRIME = 2**256 + 297  # larger than any secret of 32 bytes


class Member:
    """One device's part in one sum. It is in memory alone: nobody finds its secrets on a disk.

    The place is the digest of the weights that all of them were sent, so that nothing counts in
    another sum. As soon as there are shares `dealt` to it its vector can be masked.
    """

    def __init__(self, name: str, place: str, least: int) -> None:
        self._name = name
        self._place = place
        self._least = least
        self._seal = new_key()
        self._mask = new_key()
        self._own = new_key()
        self._cohort: Mapping[str, KeyPair] = {}
        self.dealt: Mapping[str, str] = {}
        self._answers: dict[int, tuple[object, dict[str, Mapping[str, str]]]] = {}

    @property
    def keys(self) -> KeyPair:
        """What others are told of it: to the first they seal its shares, by the second masks are
        agreed.
        """
        return public_key(self._seal), public_key(self._mask)

    def answer(self, said: Sum) -> dict[str, Mapping[str, str]]:
        """Take the next step, each once, and say what goes back, as `Shares` has it.

        What comes again, likewise.

        Raises:
            RefusedError: it does not fit an earlier step, is for too few, or a share was not sealed
                for this member.
        """
        at = 2 if said.sent else 1 if said.dealt else 0
        asked = (said.keys, said.dealt, frozenset(said.sent))
        if at not in self._answers:
            self._answers[at] = asked, (self._deal, self._meet, self._reveal)[at](said)
        before, found = self._answers[at]
        # Shares of both secrets of one member, or masks for two cohorts, would show its vector.
        self._require(asked == before, said.keys or said.dealt or said.sent)
        return found

    def _deal(self, said: Sum) -> dict[str, Mapping[str, str]]:
        names = sorted(said.keys)
        self._require(said.keys.get(self._name) == self.keys, names)
        for keys in said.keys.values():
            check_keys(keys)
        own, mask = (
            split(int(secret, 16), majority(len(names)), len(names))
            for secret in (self._own, self._mask)
        )
        sealed = {}
        for name, one, two in zip(names, own, mask, strict=True):
            shares = bytes.fromhex(f"{one:0{SHARE_DIGITS}x}{two:0{SHARE_DIGITS}x}")
            sealed[name] = seal(
                shares, said.keys[name][0], f"{self._place}/{self._name}/{name}"
            ).hex()
        self._cohort = said.keys
        return {"sealed": sealed}

    def _meet(self, said: Sum) -> dict[str, Mapping[str, str]]:
        self._require(said.dealt.keys() <= self._cohort.keys(), said.dealt)
        self.dealt = said.dealt
        return {}

    def _reveal(self, said: Sum) -> dict[str, Mapping[str, str]]:
        sent = set(said.sent)
        self._require(sent <= self.dealt.keys(), sent)
        revealed = {}
        for name, sealed in self.dealt.items():
            shares = unseal(
                bytes.fromhex(sealed),
                [self._seal],
                f"{self._place}/{name}/{self._name}",
            ).hex()
            revealed[name] = shares[:SHARE_DIGITS] if name in sent else shares[SHARE_DIGITS:]
        return {"revealed": revealed}

    def _require(self, fits: object, members: Collection[str]) -> None:
        least = max(self._least, majority(len(self._cohort)))
        if not fits or len(members) < least:
            said = f"a secure sum with {', '.join(sorted(members))} does not fit what was said of it before"
            raise _refused(f"{said}, or has fewer members than {least}")

    def masked(self, update: bytes) -> bytes:
        """The blob to send, from one with the `whole_numbers` of an update."""
        metadata, numbers = blob_in(update)
        total = numbers[MASKED].astype(np.uint32)
        total += _own_mask(self._own, self._place, total.size)
        for name in self.dealt:
            if name != self._name:
                total += _pair_mask(
                    (self._name, name),
                    self._mask,
                    self._cohort[name][1],
                    self._place,
                    total.size,
                )
        return encode_weights({MASKED: total}, metadata)


def unmasked(
    vectors: Mapping[str, Words],
    cohort: Mapping[str, KeyPair],
    dealt: Collection[str],
    revealed: Mapping[str, Mapping[str, str]],
    place: str,
) -> Words:
    """The sum of the masked vectors that came of a cohort, of which some `dealt` shares, whether
    theirs came or not.

    Shares are told by the member that revealed them and the member they are of.

    Raises:
        RefusedError: too few shares were revealed.
    """
    size = len(next(iter(vectors.values())))
    needed = majority(len(cohort))
    places = {name: at for at, name in enumerate(sorted(cohort), 1)}
    total = np.zeros(size, np.uint32)
    for vector in vectors.values():
        total += vector
    for name in dealt:
        shares = [
            (places[by], int(found[name], 16)) for by, found in revealed.items() if name in found
        ][:needed]
        if len(shares) < needed:
            raise _refused(f"{len(shares)} shares of {name} were revealed, {needed} are needed")
        secret = f"{joined(dict(shares)) % 2**256:064x}"
        if name in vectors:
            total -= _own_mask(secret, place, size)
        else:
            for other in vectors:
                total -= _pair_mask((other, name), secret, cohort[other][1], place, size)
    return total


def majority(count: int) -> int:
    """How many shares make a secret: of a server's two stories of who dropped out one finds too
    few.
    """
    return count // 2 + 1


def split(secret: int, needed: int, count: int) -> list[int]:
    """Shares of a secret: Shamir, "How to Share a Secret", CACM 1979, at 1, 2 and so on, modulo a
    prime.
    """
    factors = [secret, *(secrets.randbelow(_PRIME) for _ in range(needed - 1))]
    return [
        sum(factor * at**power for power, factor in enumerate(factors)) % _PRIME
        for at in range(1, count + 1)
    ]


def joined(shares: Mapping[int, int]) -> int:
    """The secret of as many shares as are needed, by place; of fewer, or of others, any number."""
    total = 0
    for at, share in shares.items():
        others = [other for other in shares if other != at]
        total += (
            share * math.prod(others) * pow(math.prod(other - at for other in others), -1, _PRIME)
        )
    return total % _PRIME


def check_keys(keys: KeyPair) -> None:
    """See that others can agree on something with these keys.

    A RefusedError for one that would spoil the sum.
    """
    try:
        for key in keys:
            agreed_key(private_key(new_key()), bytes.fromhex(key), b"")
    except ValueError as error:
        raise _refused(f"with the keys {', '.join(keys)} nobody can agree on a secret") from error


def whole_numbers(update: Tensors, sent: Tensors, clip: float) -> Words:
    """What an update adds to a sum: its difference to what was sent, in whole numbers, tensors in
    order of their names.

    The Euclidean norm over all tensors is `clip` at most, which bounds every entry and is `STEPS`,
    modulo 2^32.
    """
    change = bounded(update, sent, clip)
    flat = np.concatenate([change[name].reshape(-1) for name in sorted(change)]).astype(np.float64)
    return np.rint(np.clip(flat / clip, -1, 1) * STEPS).astype(np.int64).astype(np.uint32)


def restored(total: Words, clip: float) -> NDArray[np.float64]:
    """The sum of differences from the sum of their whole numbers."""
    return total.view(np.int32).astype(np.float64) * (clip / STEPS)


def _own_mask(secret: str, place: str, size: int) -> Words:
    return _stream(derive_key(bytes.fromhex(secret), f"shoal sum own {place}".encode()), size)


def _pair_mask(names: tuple[str, str], private: str, public: str, place: str, size: int) -> Words:
    """What the first of two adds for the second; the second adds the opposite."""
    mask = _stream(
        agreed_key(
            private_key(private),
            bytes.fromhex(public),
            f"shoal sum pair {place}".encode(),
        ),
        size,
    )
    return mask if names[0] < names[1] else -mask


def _stream(key: bytes, size: int) -> Words:
    """The key stream of a cipher as whole numbers; a key makes one only, so its nonce is zero."""
    stream = ChaCha20Poly1305(key).encrypt(bytes(12), bytes(4 * size), None)
    return np.frombuffer(stream, "<u4", size).astype(np.uint32)


def _refused(why: str) -> RefusedError:
    return RefusedError(RefusalReason.UNSUPPORTED, why)
