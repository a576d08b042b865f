"""The key under which blobs go down: one for all members of a fleet, until one of them is none any
more.

Each epoch has a key of its own. The server tells it to each device alone, sealed to the device's
key, on a topic of the device, where the broker keeps it:

    bytes  content
    4      number of the epoch, big-endian
    ...    the key of 32 bytes, sealed as `fleet_protocol.identity.sealing` says
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.identity.certificate import Certificate
from fleet_protocol.identity.enrolment import Enrolment, write_secret
from fleet_protocol.identity.papers import Membership
from fleet_protocol.identity.replay_guard import read_saved
from fleet_protocol.identity.sealing import seal, unseal
from fleet_protocol.topics import Topics

_EPOCH = struct.Struct(">I")
_EPOCHS_KEPT = 2  # chunks of the one before are still on their way when it changes


class Group(NamedTuple):
    """Who reads what the server sends to all: public keys by name, 32 bytes in hexadecimal, and one
    key, 32 bytes.

    Its epoch counts from 1, and grows whenever somebody is a member no longer.
    """

    epoch: int
    key: bytes
    readers: Mapping[str, str]


class DeviceNotices:
    """Tells every device the key of its group, once for each epoch and connection."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._told: dict[str, tuple[int, str]] = {}
        self._papers: dict[str, bytes] = {}
        self._source: Mapping[str, bytes] | None = None

    def keys_due(self, group: Group) -> Iterator[tuple[str, bytes]]:
        """Topic and payload for every device that was not told."""
        for name, reader in group.readers.items():
            if self._told.get(name) != (group.epoch, reader):
                topic = self._topics.key(name)
                yield topic, _EPOCH.pack(group.epoch) + seal(group.key, reader, topic)
                self._told[name] = (group.epoch, reader)

    def papers_due(self, papers: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Topic and payload for every device to which the operator says something that it was not
        told.
        """
        known = papers is self._source
        self._source = papers
        for name, payload in papers.items() if not known else ():
            if self._papers.get(name) != payload:
                yield self._topics.papers(name), payload
                self._papers[name] = payload

    def forget_device(self, name: str) -> None:
        """Tell a device again, which has come anew: somebody may have put another word in the
        broker's keeping.
        """
        self._told.pop(name, None)
        self._papers.pop(name, None)
        self._source = None

    def forget_all(self) -> None:
        """Tell everybody again: the broker may have lost what it kept."""
        self._told = {}
        self._papers = {}
        self._source = None


class KnownKeys:
    """What a member has been told of the keys of others: the server's, and the group's.

    They survive a restart at a path, as the broker need not say them again; a member that may
    forget has none.

    Attributes:
        membership: what the operator says of the member, where it does not forget.
    """

    def __init__(self, enrolment: Enrolment, path: Path | None = None) -> None:
        self.membership = (
            Membership(enrolment, path.with_name("papers.json")) if path is not None else None
        )
        self._enrolment = enrolment
        self._path = path
        self._known = read_saved(path, dict[str, str])

    @property
    def server_key(self) -> str | None:
        """The server's public key; empty if it has none, None while it was not heard."""
        return self._known.get("server")

    def record_signer(self, signer: Certificate) -> None:
        """Note who said something."""
        if signer.role == "server" and self._enrolment.role == "device":
            self._keep("server", signer.sealing or "")

    def group_key(self, epoch: int) -> bytes | None:
        """The key of an epoch, None if it was not told."""
        key = self._known.get(str(epoch))
        return None if key is None else bytes.fromhex(key)

    def receive_group_key(self, topic: str, payload: bytes) -> None:
        """Note the key of an epoch; a RefusedError where it is not sealed to this member."""
        if len(payload) < _EPOCH.size:
            raise RefusedError(RefusalReason.BAD_SEAL, f"no key of a group on {topic}")
        key = unseal(payload[_EPOCH.size :], self._enrolment.sealing, topic)
        self._keep(str(_EPOCH.unpack_from(payload)[0]), key.hex())

    def _keep(self, name: str, value: str) -> None:
        if self._known.get(name) == value:
            return
        known = {other: key for other, key in self._known.items() if other != name} | {name: value}
        told = [other for other in known if other != "server"][
            -_EPOCHS_KEPT:
        ]  # a new fleet begins with a low number
        self._known = {
            other: key for other, key in known.items() if other == "server" or other in told
        }
        if self._path is not None:
            write_secret(self._path, json.dumps(self._known))
