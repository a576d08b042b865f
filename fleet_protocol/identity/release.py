"""A release that the operator has signed: a runtime or artifact sets, for certain boards."""

import platform
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from fleet_protocol.identity.certificate import SignedStatement
from fleet_protocol.messages.bounds import Count, Positive, Word
from fleet_protocol.messages.values import BlobRef, Name

MOST_SETS = 16
MOST_PLANS = 32  # of all sets together

_Plans = Annotated[tuple[BlobRef, ...], Field(max_length=MOST_PLANS)]


class Release(SignedStatement):
    """A runtime, or artifact sets that replace those of the run in progress.

    Attributes:
        number: number of the release, which grows with each release. A board refuses a release with
            a lower number than the highest that it knows.
        builds: by `board_kind`, a tar.gz of the files below opt/shoal/lib.
        sets: a manifest, by tier; its graphs are fetched by the digests in it.
        plans: manifests of the plans of these sets, by tier, the fastest first. None if the sets
            have none: boards of earlier versions do not know the field.
        expires: time after which no board accepts the release, in seconds since 1970; 0 for never.
    """

    purpose: ClassVar[bytes] = b"shoal-release-1\0"
    run: ClassVar[str] = "release"  # a request for its chunks names this and the next two values
    task: ClassVar[str] = "release"
    round: ClassVar[int] = 1

    fleet: Name
    number: Positive
    builds: Annotated[Mapping[Word, BlobRef], Field(max_length=16)] = {}
    sets: Annotated[Mapping[Word, BlobRef], Field(max_length=MOST_SETS)] = {}
    plans: Annotated[Mapping[Word, _Plans], Field(max_length=MOST_SETS)] | None = None
    expires: Count = 0

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if bool(self.builds) == bool(self.sets):
            raise ValueError("a release is a runtime or artifact sets")
        plans = self.plans or {}
        if not plans.keys() <= self.sets.keys():
            raise ValueError("plans of tiers whose artifact sets are missing")
        return self

    def manifests(self, tier: str) -> tuple[BlobRef, ...]:
        """Return the manifest of a tier's set and then those of its plans, the fastest first.

        Empty if the release has no set of the tier.
        """
        if tier not in self.sets:
            return ()
        plans = self.plans or {}
        return (self.sets[tier], *plans.get(tier, ()))


def board_kind(machine: str = "", python: str = "") -> str:
    """Return the name of a kind of board; all boards of a kind run the same builds.

    Args:
        machine: as in ``uname -m``; empty for this machine.
        python: first two numbers of the version of Python; empty for this interpreter.
    """
    own_python = ".".join(platform.python_version_tuple()[:2])
    return f"{machine or platform.machine()}-{python or own_python}"
