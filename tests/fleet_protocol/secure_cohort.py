"""A cohort of a secure sum in memory, for tests: its members, and a server that keeps to the
protocol.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Shares, Sum
from fleet_protocol.secure_sum import Member, Words
from fleet_protocol.secure_sum.checks import Dealings, examine, judge, new_challenge
from fleet_protocol.secure_sum.opening import Revealed, Secrets, restore_secrets, unmasked
from fleet_protocol.weights import MASKED, encode_weights

HEAD = {"fleet": "f", "run": "r", "round": 1, "task": "t"}
PLACE = "digest of the weights"


def instruct(**fields: object) -> Sum:
    """A step of a sum, as it travels."""
    return Sum(**HEAD, **fields)


def answer(member: Member, name: str, **fields: object) -> Shares:
    """What a member answers, as it travels."""
    return Shares(**HEAD, device=name, **member.answer(instruct(**fields)))


@dataclass
class CohortOfMembers:
    """Members of one cohort, and what the server has of them."""

    names: Collection[str]
    least: int = 3
    place: str = PLACE
    members: dict[str, Member] = field(default_factory=dict)
    sealed: dict[str, Mapping[str, str]] = field(default_factory=dict)
    checks: dict[str, Mapping[str, str]] = field(default_factory=dict)
    challenge: str = field(default_factory=new_challenge)
    joined: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.names:
            self.members.setdefault(name, Member(name, self.place, self.least))
        self.keys = {name: member.keys for name, member in self.members.items()}

    def deal(self, never: Collection[str] = ()) -> None:
        for name, member in self.members.items():
            if name not in never:
                self.sealed[name] = answer(member, name, keys=self.keys).sealed

    def dealt_to(self, name: str) -> dict[str, str]:
        return {dealer: sealed[name] for dealer, sealed in self.sealed.items()}

    def check(self, never: Collection[str] = ()) -> None:
        for name in self.sealed:
            if name not in never:
                fields = {"dealt": self.dealt_to(name), "challenge": self.challenge}
                self.checks[name] = answer(self.members[name], name, **fields).checks

    def dealings(self) -> Dealings:
        return Dealings(self.place, self.least, self.keys, self.sealed, self.challenge, self.checks)

    def liars(self) -> dict[str, str]:
        """Who is found, after all who are asked have opened shares."""
        findings = examine(self.dealings())
        openings = {}
        for dealer, accusers in findings.disputes.items():
            opened = answer(self.members[dealer], dealer, disputed=tuple(accusers))
            openings[dealer] = opened.openings
        return {**findings.liars, **judge(self.dealings(), findings.disputes, openings)}

    def join(self, without: Collection[str] = ()) -> None:
        self.joined = tuple(name for name in self.checks if name not in without)
        for name in self.joined:
            assert not self.members[name].partners
            assert self.members[name].answer(instruct(members=self.joined)) == {}

    def met(self, never_dealt: Collection[str] = ()) -> "CohortOfMembers":
        """The cohort, ready to mask."""
        self.deal(never_dealt)
        self.check()
        assert self.liars() == {}
        self.join()
        return self

    def vector(self, name: str, words: Words) -> Words:
        blob = self.members[name].masked(encode_weights({MASKED: words}, {"task": "t"}))
        return tensors_in(blob)[MASKED]

    def reveal(
        self, sent: Collection[str], never: Collection[str] = ()
    ) -> dict[str, Mapping[str, str]]:
        revealed = {}
        for name in sent:
            if name not in never:
                revealed[name] = answer(self.members[name], name, sent=tuple(sent)).revealed
        return revealed

    def revealed(
        self,
        sent: Collection[str],
        shares: Mapping[str, Mapping[str, str]],
        pair_keys: Mapping[str, Mapping[str, str]] | None = None,
    ) -> Revealed:
        return Revealed(
            place=self.place,
            least=self.least,
            cohort=self.keys,
            members=frozenset(self.joined),
            sent=frozenset(sent),
            shares=shares,
            pair_keys=pair_keys or {},
        )

    def open(
        self, vectors: Mapping[str, Words], shares: Mapping[str, Mapping[str, str]]
    ) -> tuple[Words, Secrets]:
        """The sum of some vectors, as the server computes it, and what it found."""
        revealed = self.revealed(vectors, shares)
        restored = restore_secrets(revealed)
        if restored.unmatched:
            pair_keys = {}
            for name in vectors:
                fields = {"unmatched": tuple(restored.unmatched)}
                pair_keys[name] = answer(self.members[name], name, **fields).pair_keys
            revealed = self.revealed(vectors, shares, pair_keys)
        return unmasked(vectors, revealed, restored), restored


def added(words: Mapping[str, Words], names: Collection[str]) -> Words:
    """The sum of whole numbers, without any mask."""
    total = np.zeros_like(next(iter(words.values())))
    for name in names:
        total += words[name]
    return total
