"""The members of an enrolled fleet as its server knows them: names, keys and revocations."""

import contextlib
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError, RefusedError, StorageError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.enrolment import Papers

if TYPE_CHECKING:
    from fleet_protocol.identity.certificate import Certificate, Revocations
    from fleet_protocol.identity.papers import Membership

REGISTRY = "registry.json"
_LAST = 2**32 - 2**24  # epochs are told in 4 bytes
_LOOK_SECONDS = 1.0


def later(number: int) -> int:
    """Return a number after another: by the clock, so that none comes again after a backup."""
    return max(number + 1, min(int(time.time()), _LAST))


class MemberEntry(FrozenModel):
    """One member.

    Attributes:
        role: ``server`` or ``device``.
        serial: of its newest certificate; older ones count for nothing.
        token: password that it gives to the broker, for one that asks.
        revoked: whether it is a member no longer.
        sealing: of a device, the public key to which the group's key is sealed; None if it was
            enrolled before there were such keys.
        tls: number of its client certificate, in hexadecimal.
        expires: seconds since 1970 after which it is one no longer, 0 for never.
        certificate: its newest; None if it was enrolled before there were renewals.
        renewed: whether that is another than it was enrolled with.
    """

    role: str
    serial: int
    token: str
    revoked: bool = False
    sealing: str | None = None
    tls: str | None = None
    expires: int = 0
    certificate: str | None = None
    renewed: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether its enrolment has ended."""
        return 0 < self.expires < time.time()


class Registry(FrozenModel):
    """All members that there ever were.

    Attributes:
        serial: of the newest certificate.
        epoch: of the key under which blobs go down; it grows whenever an enrolment counts for
            nothing any more.
        withdrawn: numbers of client certificates of devices that count for nothing any more.
        since: by name, the lowest serial that counts.
        revoked: the same as the operator signed it, with the epoch as its counter.
        members: by name.
    """

    serial: int = 0
    epoch: int = 1
    withdrawn: tuple[str, ...] = ()
    since: Mapping[str, int] = Field(default_factory=dict)
    revoked: str | None = None
    members: Mapping[str, MemberEntry] = Field(default_factory=dict)

    @property
    def lacking(self) -> list[str]:
        """Devices that could not read what is sealed to all: because of them nothing is."""
        return [name for name, entry in self.devices().items() if entry.sealing is None]

    def readers(self, revocations: "Revocations") -> tuple[int, dict[str, str]]:
        """Return which devices read what is sent now.

        Returns:
            An epoch, which grows when an enrolment ends, too, and public keys by name.
        """
        ended = 0
        keys = {}
        for name, entry in self.devices().items():
            if entry.has_ended:
                ended += 1
            elif entry.sealing is not None and entry.serial >= revocations.since.get(name, 0):
                keys[name] = entry.sealing
        epoch = max(self.epoch, revocations.counter) + ended
        return epoch, keys

    def papers(self) -> dict[str, bytes]:
        """Return what the operator says to each device, if anything.

        A device that is revoked gets the list, too, so that it knows and stops asking.
        """
        if self.revoked is None:
            return {}
        papers = {}
        for name, entry in self.members.items():
            if entry.role == "device" and entry.revoked:
                papers[name] = Papers(revoked=self.revoked).to_bytes()
        for name, entry in self.devices().items():
            certificate = entry.certificate if entry.renewed else None
            papers[name] = Papers(revoked=self.revoked, certificate=certificate).to_bytes()
        return papers

    def devices(self) -> dict[str, MemberEntry]:
        """Return the devices that are members, by name."""
        devices = {}
        for name, entry in self.members.items():
            if entry.role == "device" and not entry.revoked:
                devices[name] = entry
        return devices

    def names(self) -> list[str]:
        """Return the names of the members, the server among them."""
        return [name for name, entry in self.members.items() if not entry.revoked]

    def without(self, name: str) -> "Registry":
        """Return the registry with all that a member has so far counting for nothing.

        It is the same where there is no such member.
        """
        entry = self.members.get(name)
        if entry is None:
            return self
        withdrawn = self.withdrawn
        # The server that runs keeps its way into the broker until it starts again.
        if entry.tls is not None and entry.role == "device":
            withdrawn = (*withdrawn, entry.tls)
        revoked = entry.model_copy(update={"revoked": True})
        changes = {
            "withdrawn": withdrawn,
            "members": {**self.members, name: revoked},
            "since": {**self.since, name: entry.serial + 1},
            "epoch": later(self.epoch),
        }
        return self.model_copy(update=changes)

    def caught_up(self, newest: "Revocations") -> "Registry":
        """Return the registry with what the operator has revoked since, if it is from a backup."""
        if newest.counter <= self.epoch:
            return self
        # Each in turn: withdrawn certificates and the epoch grow with every one.
        registry = self
        for name, entry in self.members.items():
            if not entry.revoked and entry.serial < newest.since.get(name, 0):
                registry = registry.without(name)
        changes = {
            "epoch": later(newest.counter),
            "serial": max(self.serial, *newest.since.values()),
            "since": {**registry.since, **newest.since},
        }
        return registry.model_copy(update=changes)

    def write(self, folder: Path) -> None:
        """Write it into the fleet's folder.

        Raises:
            StorageError: it cannot be written.
        """
        write_atomically(folder / REGISTRY, self.model_dump_json(indent=1).encode())


def read_registry(folder: Path) -> Registry:
    """Return the registry of a fleet's folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    try:
        return Registry.model_validate_json((folder / REGISTRY).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{folder} is no fleet's folder ({error.strerror}); `shoal init` makes one"
        ) from error
    except ValidationError as error:
        raise ConfigError(f"{folder / REGISTRY} is damaged: {error.errors()[0]['msg']}") from error


class RegistryReader:
    """Reads which members there are from the file, so that a revocation needs no restart.

    The server keeps what it has obeyed in its `Membership`; an older file takes none of it back.

    Args:
        folder: of the fleet.
        membership: of the server.

    Raises:
        ConfigError: there is no registry, or it is older than what the server has obeyed.
    """

    def __init__(self, folder: Path, membership: "Membership") -> None:
        self._folder = folder
        self._membership = membership
        self._papers: Mapping[str, bytes] = {}
        self._registry = self._read()
        self._read_at = time.monotonic()

    def _read(self) -> Registry:
        registry = read_registry(self._folder)
        if registry.revoked is not None:
            try:
                self._membership.accept(Papers(revoked=registry.revoked).to_bytes())
            except RefusedError as error:
                raise ConfigError(
                    f"{self._folder / REGISTRY} is not what the operator has signed last "
                    f"({error}): put the newest one in its place, or let `shoal enroll server` "
                    "take up what the server knows"
                ) from error
        # A server that was renewed says nothing of it until it starts again.
        self._papers = (
            {} if self._membership.revoked(self._membership.certificate) else registry.papers()
        )
        return registry

    def revoked(self, certificate: "Certificate") -> bool:
        """Return whether a certificate counts for nothing.

        Its member was revoked, or has a newer one.
        """
        entry = self.current().members.get(certificate.name)
        if entry is None or entry.revoked or certificate.serial != entry.serial:
            return True
        return self._membership.revoked(certificate)

    def papers(self) -> Mapping[str, bytes]:
        """Return what the operator says to devices, by name.

        It is the same object until the file is another.
        """
        self.current()
        return self._papers

    def members(self) -> Collection[str]:
        """Return the names of the devices that are members, and whose enrolment has not ended."""
        devices = self.current().devices()
        return {name for name, entry in devices.items() if not entry.has_ended}

    def current(self) -> Registry:
        """Return the registry as it is now, or was a second ago."""
        if time.monotonic() - self._read_at > _LOOK_SECONDS:
            self._read_at = time.monotonic()
            with contextlib.suppress(ConfigError, StorageError):  # what was obeyed stays
                # A file that is written anew with the same content costs no check of a signature.
                if read_registry(self._folder) != self._registry:
                    self._registry = self._read()
        return self._registry
