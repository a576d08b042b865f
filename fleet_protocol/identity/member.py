"""A member of a fleet at work: its enrolment and what it keeps beside it."""

from collections.abc import Callable
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
        remembers: whether counters it has heard survive a restart, as they must on a board.
        revoked: whether another is no longer a member.
        group: who reads what this member sends to all, and under which key; None for everybody.
    """

    enrolment: Enrolment
    folder: Path
    remembers: bool = False
    revoked: "Callable[[Certificate], bool]" = lambda _: False
    group: "Callable[[], Group | None]" = lambda: None
