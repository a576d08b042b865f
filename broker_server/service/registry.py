"""The members of an enrolled fleet as its server knows them: names, keys and revocations."""

import contextlib
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import BlobError, ConfigError, RefusedError, StorageError
from fleet_protocol.foreign_files import read_regular
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.enrolment import Hex, Key, Papers, SignedRevocations
from fleet_protocol.messages.bounds import Count

if TYPE_CHECKING:
    from fleet_protocol.identity.certificate import Certificate, Revocations
    from fleet_protocol.identity.papers import Membership

REGISTRY = "registry.json"
_LAST = 2**32 - 2**24  # an epoch has 4 bytes in messages
_LOOK_SECONDS = 1.0


def later(number: int) -> int:
    """Return a number above another, from the clock, so that none occurs again after a backup."""
    return max(number + 1, min(int(time.time()), _LAST))


class MemberEntry(FrozenModel):
    """A member.

    Attributes:
        role: ``server`` or ``device``.
        serial: serial of its newest certificate; older ones are invalid.
        token: its password at the broker, for brokers that require one.
        revoked: whether it is no longer a member.
        sealing: public key of a device, to which the group's key is sealed; None if it was
            enrolled before such keys existed.
        tls: number of its client certificate, in hexadecimal.
        expires: end of its enrolment in seconds since 1970, 0 for never.
        certificate: its newest; None if it was enrolled before renewals existed.
        renewed: whether it differs from the certificate at enrolment.
    """

    role: str
    serial: Count
    token: str
    revoked: bool = False
    sealing: Key | None = None
    tls: str | None = None
    expires: Count = 0
    certificate: Hex | None = None
    renewed: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether its enrolment has expired."""
        return 0 < self.expires < time.time()


class Registry(FrozenModel):
    """All members, past and present.

    Attributes:
        serial: serial of the newest certificate.
        epoch: epoch of the key under which blobs are sent to devices; it grows whenever an
            enrolment becomes invalid.
        withdrawn: numbers of the devices' client certificates that are no longer valid.
        since: the lowest valid serial, by name.
        revoked: the same list as the operator signed it, with the epoch as its counter.
        members: the members by name.
    """

    serial: Count = 0
    epoch: Count = 1
    withdrawn: tuple[str, ...] = ()
    since: Mapping[str, Count] = Field(default_factory=dict)
    revoked: SignedRevocations | None = None
    members: Mapping[str, MemberEntry] = Field(default_factory=dict)

    @property
    def lacking(self) -> list[str]:
        """Devices that could not read sealed blobs; while there are any, nothing is sealed."""
        return [name for name, entry in self.devices().items() if entry.sealing is None]

    def readers(self, revocations: "Revocations") -> tuple[int, dict[str, str]]:
        """Return the devices that can read what is sent now.

        Returns:
            An epoch, which also grows when an enrolment expires, and public keys by name.
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
        """Return the operator's message for each device, if any.

        A revoked device receives the list, too, so that it knows and stops retrying.
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
        """Return the names of the members, including the server."""
        return [name for name, entry in self.members.items() if not entry.revoked]

    def without(self, name: str) -> "Registry":
        """Return the registry with all previous papers of a member revoked.

        It is unchanged if the member does not exist.
        """
        entry = self.members.get(name)
        if entry is None:
            return self
        withdrawn = self.withdrawn
        # The running server keeps its access to the broker until it is restarted.
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
        """Return the registry with later revocations of the operator, if it is from a backup."""
        if newest.counter <= self.epoch:
            return self
        # Each in turn: revoked certificates and the epoch grow with every one.
        registry = self
        for name, entry in self.members.items():
            if not entry.revoked and entry.serial < newest.since.get(name, 0):
                registry = registry.without(name)
        changes = {
            "epoch": later(newest.counter),
            "serial": max([self.serial, *newest.since.values()]),
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
        ConfigError: it is missing or damaged.
    """
    try:
        return Registry.model_validate_json(read_regular((folder / REGISTRY).resolve()))
    except BlobError as error:
        raise ConfigError(
            f"{folder} is not the folder of a fleet with identities ({error}); name that folder"
            " with --folder, or create one: `shoal init NAME --host ADDRESS`"
        ) from error
    except ValidationError as error:
        raise ConfigError(f"{folder / REGISTRY} is damaged: {error.errors()[0]['msg']}") from error


class RegistryReader:
    """Reads the current members from the file, so that a revocation needs no restart.

    The server records applied revocations in its `Membership`; an older file does not undo them.

    Args:
        folder: folder of the fleet.
        membership: membership of the server.

    Raises:
        ConfigError: the registry is missing, or older than the revocations that the server has
            applied.
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
                    f"{self._folder / REGISTRY} is not the latest that the operator has "
                    f"signed ({error}): put the newest one in its place, or let `shoal "
                    "enroll server` restore the revocations that the server knows"
                ) from error
        # A renewed server sends nothing about it until it restarts.
        self._papers = (
            {} if self._membership.revoked(self._membership.certificate) else registry.papers()
        )
        return registry

    def revoked(self, certificate: "Certificate") -> bool:
        """Return whether a certificate is no longer valid.

        Its member was revoked, or has a newer one.
        """
        entry = self.current().members.get(certificate.name)
        if entry is None or entry.revoked or certificate.serial != entry.serial:
            return True
        return self._membership.revoked(certificate)

    def papers(self) -> Mapping[str, bytes]:
        """Return the operator's message for each device, by name.

        It is the same object until the file changes.
        """
        self.current()
        return self._papers

    def members(self) -> Collection[str]:
        """Return the names of the devices that are members with a valid enrolment."""
        devices = self.current().devices()
        return {name for name, entry in devices.items() if not entry.has_ended}

    def current(self) -> Registry:
        """Return the registry as it is now, or was a second ago."""
        if time.monotonic() - self._read_at > _LOOK_SECONDS:
            self._read_at = time.monotonic()
            with contextlib.suppress(ConfigError, StorageError):  # applied revocations stay
                # A file that is written again with the same content needs no check of a signature.
                if read_registry(self._folder) != self._registry:
                    self._registry = self._read()
        return self._registry
