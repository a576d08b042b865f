"""The key under which blobs are sent to all devices of a fleet, and its distribution.

Each epoch has its own key, and a new epoch begins whenever a device is no longer a member. The
server sends it to each device, sealed to the device's key, on a topic of the device, where the
broker retains it:

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
_EPOCHS_KEPT = 2  # chunks of the previous epoch are still in transit when it changes
_SERVER = "server"


class Group(NamedTuple):
    """The devices that can read what the server sends to all.

    Attributes:
        epoch: counts from 1, and grows whenever a device is no longer a member.
        key: symmetric key of the epoch, 32 bytes.
        readers: public keys of the devices by name, 32 bytes in hexadecimal.
    """

    epoch: int
    key: bytes
    readers: Mapping[str, str]


class DeviceNotices:
    """Chooses which devices still need the group's key or the operator's papers.

    Each device receives each of them once for every change and every connection.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._sent_keys: dict[str, tuple[int, str]] = {}  # epoch and public key by device
        self._sent_papers: dict[str, bytes] = {}
        self._last_papers: Mapping[str, bytes] | None = None

    def keys_due(self, group: Group) -> Iterator[tuple[str, bytes]]:
        """Yield topic and payload for every device that lacks the group's key."""
        for name, reader in group.readers.items():
            if self._sent_keys.get(name) != (group.epoch, reader):
                topic = self._topics.key(name)
                yield topic, _EPOCH.pack(group.epoch) + seal(group.key, reader, topic)
                self._sent_keys[name] = (group.epoch, reader)

    def papers_due(self, papers: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Yield topic and payload for every device that lacks its papers."""
        # The same object as before has no changes: comparing all papers of a large fleet for each
        # window of chunks would take long.
        is_unchanged = papers is self._last_papers
        self._last_papers = papers
        if is_unchanged:
            return
        for name, payload in papers.items():
            if self._sent_papers.get(name) != payload:
                yield self._topics.papers(name), payload
                self._sent_papers[name] = payload

    def forget_device(self, name: str) -> None:
        """Send everything again to a device that has reconnected.

        Somebody may have replaced the messages that the broker retains for it.
        """
        self._sent_keys.pop(name, None)
        self._sent_papers.pop(name, None)
        self._last_papers = None

    def forget_all(self) -> None:
        """Send everything again to all devices: the broker may have lost its retained messages."""
        self._sent_keys = {}
        self._sent_papers = {}
        self._last_papers = None


class KnownKeys:
    """The keys that a member has received: the server's, and those of the group.

    Args:
        enrolment: enrolment of the member.
        path: file in which the keys survive a restart, because the broker need not send them again;
            None for a member that need not remember.

    Attributes:
        membership: the operator's statements about the member; None without a path.
    """

    def __init__(self, enrolment: Enrolment, path: Path | None = None) -> None:
        self.membership: Membership | None = None
        if path is not None:
            self.membership = Membership(enrolment, path.with_name("papers.json"))
        self._enrolment = enrolment
        self._path = path
        self._keys = read_saved(path, dict[str, str])

    @property
    def server_key(self) -> str | None:
        """The server's public key; empty if it has none, None before its first message."""
        return self._keys.get(_SERVER)

    def record_signer(self, signer: Certificate) -> None:
        """Record the key of a server that has signed a message."""
        if signer.role == "server" and self._enrolment.role == "device":
            self._save(_SERVER, signer.sealing or "")

    def group_key(self, epoch: int) -> bytes | None:
        """Return the key of an epoch; None if it was not received."""
        key = self._keys.get(str(epoch))
        return None if key is None else bytes.fromhex(key)

    def receive_group_key(self, topic: str, payload: bytes) -> None:
        """Open and save the key of an epoch.

        Raises:
            RefusedError: it is not sealed to this member.
        """
        if len(payload) < _EPOCH.size:
            raise RefusedError(
                RefusalReason.BAD_SEAL, f"a message on {topic} that is not a group key"
            )
        key = unseal(payload[_EPOCH.size :], self._enrolment.sealing, topic)
        (epoch,) = _EPOCH.unpack_from(payload)
        self._save(str(epoch), key.hex())

    def _save(self, name: str, key: str) -> None:
        if self._keys.get(name) == key:
            return
        # The newest entry is the last one. The order of arrival decides which epochs stay, because
        # the epochs of a new fleet begin with low numbers.
        keys = dict(self._keys)
        keys.pop(name, None)
        keys[name] = key
        epochs = [entry for entry in keys if entry != _SERVER]
        for old_epoch in epochs[:-_EPOCHS_KEPT]:
            del keys[old_epoch]
        self._keys = keys
        if self._path is not None:
            write_secret(self._path, json.dumps(self._keys))
