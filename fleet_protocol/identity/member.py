"""A member of a fleet at work: its enrolment and what it keeps beside it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_protocol.identity.enrolment import Enrolment

if TYPE_CHECKING:
    from fleet_protocol.identity.certificate import Certificate
    from fleet_protocol.identity.group import Group


@dataclass(frozen=True)
class Member:
    """Who speaks and listens.

    Attributes:
        enrolment: who it is.
        folder: where it keeps what makes a repetition one; made for its owner alone.
        remembers: whether counters it has heard, and what its operator says, survive a restart, as
            on a board.
        revoked: whether another is no longer a member.
        papers: what the operator says to devices, by name.
        members: names of the devices that are members; None where that is not known.
        group: who reads what this member sends to all, and under which key; None for everybody.
    """

    enrolment: Enrolment
    folder: Path
    remembers: bool = False
    revoked: "Callable[[Certificate], bool]" = lambda _: False
    papers: Callable[[], Mapping[str, bytes]] = dict
    members: Callable[[], Collection[str] | None] = lambda: None
    group: "Callable[[], Group | None]" = lambda: None
