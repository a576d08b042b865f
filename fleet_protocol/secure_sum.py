"""Secure sums: the server learns the sum of updates, and no single update.

Pairwise masks cancel in the sum, and shares of secrets replace members that drop out.

Keith Bonawitz et al.: "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS
2017, https://doi.org/10.1145/3133956.3133982, figure 4, for honest but curious servers. The members
of a cohort train one plan, so that their entries are the same. In order:

1. every member makes a :class:`Member` and sends its two public keys;
2. it deals shares of its two secrets, sealed for each member, which the server passes on;
3. it sends its vector of whole numbers, masked with its own mask and with one for each other member
   that dealt;
4. the members that are left reveal shares: of the own mask of a member whose vector came, of the
   mask key of another, and never both of one member.

Whole numbers are counted modulo 2^32, and no sum of `SUM_LIMIT` vectors runs over. Keys and shares
are hexadecimal.
"""

import math
import secrets
from collections.abc import Callable, Collection, Mapping

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
    """One device's part in one sum.

    It exists only in memory, so that nobody finds its secrets on a disk.

    Args:
        name: of the device.
        place: digest of the weights that all members were sent, so that nothing counts in another
            sum.
        least: members that a sum must have.

    Attributes:
        dealt: sealed shares that other members dealt to this one, by name; once there are some, its
            vector can be masked.
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
        # Each of the three secrets is for one purpose and for this sum alone.
        self._seal_key = new_key()
        self._mask_key = new_key()
        self._own_secret = new_key()
        self._cohort: Mapping[str, KeyPair] = {}
        self.dealt: Mapping[str, str] = {}
        # The request and the answer of each step that was taken.
        self._answers: dict[int, tuple[object, dict[str, Mapping[str, str]]]] = {}

    @property
    def keys(self) -> KeyPair:
        """Public keys: others seal shares to the first, and agree on masks by the second."""
        return public_key(self._seal_key), public_key(self._mask_key)

    def answer(self, message: Sum) -> dict[str, Mapping[str, str]]:
        """Take the next step, once, and return the content of `Shares` that answers it.

        A repeated message gets the same answer.

        Raises:
            RefusedError: it does not fit an earlier step, is for too few, or a share was not sealed
                for this member.
        """
        step, take_step = self._step_of(message)
        request = (message.keys, message.dealt, frozenset(message.sent))
        if step not in self._answers:
            self._answers[step] = (request, take_step(message))
        first_request, answer = self._answers[step]
        # Shares of both secrets of one member, or masks for two cohorts, would show its vector.
        self._require(request == first_request, message.keys or message.dealt or message.sent)
        return answer

    def _step_of(self, message: Sum) -> tuple[int, Callable[[Sum], dict[str, Mapping[str, str]]]]:
        if message.sent:
            return 2, self._reveal
        if message.dealt:
            return 1, self._receive_shares
        return 0, self._deal

    def _deal(self, message: Sum) -> dict[str, Mapping[str, str]]:
        """Deal shares of both secrets to all members of a cohort."""
        names = sorted(message.keys)
        self._require(message.keys.get(self._name) == self.keys, names)
        for keys in message.keys.values():
            check_keys(keys)
        # Own mask and mask key are shared apart, because only one of them may be revealed.
        needed = majority(len(names))
        own_shares = split_secret(int(self._own_secret, 16), needed, len(names))
        mask_shares = split_secret(int(self._mask_key, 16), needed, len(names))
        sealed = {}
        for name, own, mask in zip(
            names,
            own_shares,
            mask_shares,
            strict=True,
        ):
            shares = bytes.fromhex(f"{own:0{SHARE_DIGITS}x}{mask:0{SHARE_DIGITS}x}")
            seal_key, _ = message.keys[name]
            sealed[name] = seal(shares, seal_key, f"{self._place}/{self._name}/{name}").hex()
        self._cohort = message.keys
        return {"sealed": sealed}

    def _receive_shares(self, message: Sum) -> dict[str, Mapping[str, str]]:
        """Keep the shares of the members that dealt some."""
        self._require(message.dealt.keys() <= self._cohort.keys(), message.dealt)
        self.dealt = message.dealt
        return {}

    def _reveal(self, message: Sum) -> dict[str, Mapping[str, str]]:
        """Reveal one share of every member, which depends on whether its vector came."""
        sent = set(message.sent)
        self._require(sent <= self.dealt.keys(), sent)
        revealed = {}
        for name, sealed in self.dealt.items():
            place = f"{self._place}/{name}/{self._name}"
            shares = unseal(bytes.fromhex(sealed), [self._seal_key], place).hex()
            revealed[name] = shares[:SHARE_DIGITS] if name in sent else shares[SHARE_DIGITS:]
        return {"revealed": revealed}

    def _require(self, fits: object, members: Collection[str]) -> None:
        """Refuse a step that does not fit, or has too few members."""
        least = max(self._least, majority(len(self._cohort)))
        if not fits or len(members) < least:
            raise _refused(
                f"a secure sum with {', '.join(sorted(members))} does not fit what was said of it "
                f"before, or has fewer members than {least}"
            )

    def masked(self, update: bytes) -> bytes:
        """Return the blob to send, from a blob with the `whole_numbers` of an update."""
        metadata, numbers = blob_in(update)
        total = numbers[MASKED].astype(np.uint32)
        total += _own_mask(self._own_secret, self._place, total.size)
        for name in self.dealt:
            if name != self._name:
                _, public = self._cohort[name]
                pair = (self._name, name)
                total += _pair_mask(
                    pair,
                    self._mask_key,
                    public,
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
    """Return the sum of masked vectors without the masks.

    Args:
        vectors: those that came, by member.
        cohort: public keys of all members.
        dealt: members that dealt shares; vectors of some of them may not have come.
        revealed: shares, by the member that revealed them and the member whose secret they are of.
        place: digest of the weights that all members were sent.

    Raises:
        RefusedError: too few shares were revealed.
    """
    size = len(next(iter(vectors.values())))
    needed = majority(len(cohort))
    places = {name: at for at, name in enumerate(sorted(cohort), 1)}
    # Unsigned whole numbers wrap around, as the masks need.
    total = np.zeros(size, np.uint32)
    for vector in vectors.values():
        total += vector
    for name in dealt:
        shares = []
        for member, shares_of in revealed.items():
            if name in shares_of:
                shares.append((places[member], int(shares_of[name], 16)))
        if len(shares) < needed:
            raise _refused(f"{len(shares)} shares of {name} were revealed, {needed} are needed")
        # The prime is larger than 2^256, and every secret is below that.
        secret = f"{join_secret(dict(shares[:needed])) % 2**256:064x}"
        if name in vectors:
            total -= _own_mask(secret, place, size)
            continue
        for partner in vectors:
            _, public = cohort[partner]
            total -= _pair_mask(
                (partner, name),
                secret,
                public,
                place,
                size,
            )
    return total


def majority(count: int) -> int:
    """Return how many shares restore a secret.

    It is a majority, so that a server cannot tell two groups of members two stories of who dropped
    out: one of them would have too few shares.
    """
    return count // 2 + 1


def split_secret(
    secret: int,
    needed: int,
    count: int,
) -> list[int]:
    """Return shares of a secret, at the places 1, 2 and so on, modulo a prime.

    Shamir, "How to Share a Secret", CACM 1979: the shares are values of a random polynomial.
    """
    coefficients = [secret]
    for _ in range(needed - 1):
        coefficients.append(secrets.randbelow(_PRIME))
    shares = []
    for place in range(1, count + 1):
        powers = enumerate(coefficients)
        shares.append(sum(factor * place**power for power, factor in powers) % _PRIME)
    return shares


def join_secret(shares: Mapping[int, int]) -> int:
    """Return the secret of as many shares as are needed, by place.

    Too few shares, or others, give any number.
    """
    total = 0
    for place, share in shares.items():
        further_places = [further for further in shares if further != place]
        divisor = math.prod(further - place for further in further_places)
        total += share * math.prod(further_places) * pow(divisor, -1, _PRIME)
    return total % _PRIME


def check_keys(keys: KeyPair) -> None:
    """Check that others can agree on a secret with these keys.

    Raises:
        RefusedError: a key would spoil the sum.
    """
    try:
        for key in keys:
            agreed_key(private_key(new_key()), bytes.fromhex(key), b"")
    except ValueError as error:
        raise _refused(f"with the keys {', '.join(keys)} nobody can agree on a secret") from error


def whole_numbers(
    update: Tensors,
    sent: Tensors,
    clip: float,
) -> Words:
    """Return an update's difference to the weights that were sent, in whole numbers modulo 2^32.

    Tensors are in the order of their names. The Euclidean norm over all tensors is `clip` at most,
    which also bounds every entry, and corresponds to `STEPS`.
    """
    change = bounded(update, sent, clip)
    joined = np.concatenate([change[name].reshape(-1) for name in sorted(change)])
    flat = joined.astype(np.float64)
    return np.rint(np.clip(flat / clip, -1, 1) * STEPS).astype(np.int64).astype(np.uint32)


def restored(total: Words, clip: float) -> NDArray[np.float64]:
    """Return the sum of differences from the sum of their whole numbers."""
    return total.view(np.int32).astype(np.float64) * (clip / STEPS)


def _own_mask(
    secret: str,
    place: str,
    size: int,
) -> Words:
    return _key_stream(derive_key(bytes.fromhex(secret), f"shoal sum own {place}".encode()), size)


def _pair_mask(
    names: tuple[str, str],
    private: str,
    public: str,
    place: str,
    size: int,
) -> Words:
    """Return what the first of two members adds; the second adds the opposite."""
    purpose = f"shoal sum pair {place}".encode()
    key = agreed_key(private_key(private), bytes.fromhex(public), purpose)
    mask = _key_stream(key, size)
    first, second = names
    return mask if first < second else -mask


def _key_stream(key: bytes, size: int) -> Words:
    """Return the key stream of a cipher as whole numbers.

    A key serves for one stream only, so its nonce is zero.
    """
    stream = ChaCha20Poly1305(key).encrypt(bytes(12), bytes(4 * size), None)
    # Little-endian on every machine, or masks of two boards would not cancel.
    return np.frombuffer(stream, "<u4", size).astype(np.uint32)


def _refused(why: str) -> RefusedError:
    return RefusedError(RefusalReason.UNSUPPORTED, why)
