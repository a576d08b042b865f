"""A member of a fleet that is connected: its enrolment, and what it needs to sign and verify."""

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
    """A member that sends and receives messages.

    Attributes:
        enrolment: its identity.
        folder: private folder for counters and keys.
        remembers: whether counters, keys and the operator's statements survive a restart, as on a
            board.
        revoked: whether the certificate of another member is revoked.
        papers: statements of the operator for devices, by name.
        members: names of the devices that are members; None if that is not known.
        group: readers of what this member sends to all devices, with their key; None if everybody
            reads it.
    """

    enrolment: Enrolment
    folder: Path
    remembers: bool = False
    revoked: "Callable[[Certificate], bool]" = lambda _: False
    papers: Callable[[], Mapping[str, bytes]] = dict
    members: Callable[[], Collection[str] | None] = lambda: None
    group: "Callable[[], Group | None]" = lambda: None
