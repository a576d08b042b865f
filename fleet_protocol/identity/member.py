"""A connected member of a fleet: its enrolment, and everything to sign and verify messages."""

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
        saves_counters: whether each counter survives a restart, in a file that only this process
            writes, as on a server.
        revoked: whether the certificate of another member is revoked.
        papers: statements of the operator for devices, by name.
        members: names of the devices that are members; None if unknown.
        group: readers of this member's messages to all devices, with their key; None if everybody
            can read them.
    """

    enrolment: Enrolment
    folder: Path
    remembers: bool = False
    saves_counters: bool = False
    revoked: "Callable[[Certificate], bool]" = lambda _: False
    papers: Callable[[], Mapping[str, bytes]] = dict
    members: Callable[[], Collection[str] | None] = lambda: None
    group: "Callable[[], Group | None]" = lambda: None
