"""The members of an enrolled fleet as its server knows them: logins, and who is one no longer."""

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
    """A number after another: by the clock, so that of a registry from a backup none comes again."""
    return max(number + 1, min(int(time.time()), _LAST))


class MemberEntry(FrozenModel):
    """One member."""

    role: str  # ``server`` or ``device``
    serial: int  # of its newest certificate; older ones count for nothing
    token: str  # password at the broker
    revoked: bool = False  # whether it is a member no longer
    # of a device, the public key to which the group's key is sealed; None if it was enrolled before
    # there were such keys
    sealing: str | None = None
    tls: str | None = None  # number of its client certificate, in hexadecimal
    expires: int = 0  # seconds since 1970 after which it is one no longer, 0 for never
    certificate: str | None = None  # its newest; None if it was enrolled before there were renewals
    renewed: bool = False  # whether that is another than it was enrolled with


class Registry(FrozenModel):
    """All members that there ever were."""

    serial: int = 0  # of the newest certificate
    # of the key under which blobs go down; it grows whenever an enrolment counts for nothing any
    # more
    epoch: int = 1
    withdrawn: tuple[
        str, ...
    ] = ()  # numbers of client certificates of devices that count for nothing any more
    since: Mapping[str, int] = Field(default_factory=dict)  # by name, the lowest serial that counts
    revoked: str | None = None  # the same as the operator signed it, with the epoch as its counter
    members: Mapping[str, MemberEntry] = Field(default_factory=dict)  # by name

    @property
    def lacking(self) -> list[str]:
        """Devices that could not read what is sealed to all: because of them nothing is."""
        return [name for name, entry in self.devices().items() if entry.sealing is None]

    def readers(self, revocations: "Revocations") -> tuple[int, dict[str, str]]:
        """Who reads what is sent now: an epoch, which grows when an enrolment ends, too, and public
        keys by name.
        """
        ended = [name for name, entry in self.devices().items() if 0 < entry.expires < time.time()]
        its = {
            name: entry.sealing
            for name, entry in self.devices().items()
            if entry.sealing is not None
        }
        out = {
            name for name in its if self.members[name].serial < revocations.since.get(name, 0)
        } | {*ended}
        epoch = max(self.epoch, revocations.counter) + len(ended)
        return epoch, {name: key for name, key in its.items() if name not in out}

    def papers(self) -> dict[str, bytes]:
        """What the operator says to each device that is a member, if anything."""
        if self.revoked is None:
            return {}
        said = {
            name: entry.certificate if entry.renewed else None
            for name, entry in self.devices().items()
        }
        return {
            name: Papers(revoked=self.revoked, certificate=its).to_bytes()
            for name, its in said.items()
        }

    def devices(self) -> dict[str, MemberEntry]:
        """Those that are members, by name."""
        return {
            name: entry
            for name, entry in self.members.items()
            if entry.role == "device" and not entry.revoked
        }

    def logins(self) -> dict[str, str]:
        """Names and passwords that the broker lets in."""
        return {name: entry.token for name, entry in self.members.items() if not entry.revoked}

    def without(self, name: str) -> "Registry":
        """The same, with all that a member has so far counting for nothing.

        Of one that is none, the same.
        """
        entry = self.members.get(name)
        if entry is None:
            return self
        gone = entry.model_copy(update={"revoked": True})
        # The server that runs keeps its way into the broker until it starts again.
        withdrawn = (entry.tls,) if entry.tls is not None and entry.role == "device" else ()
        changes = {
            "withdrawn": (*self.withdrawn, *withdrawn),
            "members": {**self.members, name: gone},
        }
        changes["since"] = {**self.since, name: entry.serial + 1}
        return self.model_copy(update={**changes, "epoch": later(self.epoch)})

    def caught_up(self, known: "Revocations") -> "Registry":
        """The same, with whom the operator has revoked since, where this is from a backup."""
        if known.counter <= self.epoch:
            return self
        new = self
        for name, entry in self.members.items():
            if not entry.revoked and entry.serial < known.since.get(name, 0):
                new = new.without(name)
        numbers = {
            "epoch": later(known.counter),
            "serial": max(self.serial, *known.since.values()),
        }
        return new.model_copy(update={**numbers, "since": {**new.since, **known.since}})

    def write(self, folder: Path) -> None:
        """Keep it in the fleet's folder; a StorageError where it cannot be written."""
        write_atomically(folder / REGISTRY, self.model_dump_json(indent=1).encode())


def read_registry(folder: Path) -> Registry:
    """Read the registry of a fleet's folder; a ConfigError where there is none."""
    try:
        return Registry.model_validate_json((folder / REGISTRY).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{folder} is no fleet's folder ({error.strerror}); `shoal init` makes one"
        ) from error
    except ValidationError as error:
        raise ConfigError(f"{folder / REGISTRY} is damaged: {error.errors()[0]['msg']}") from error


class RegistryReader:
    """Who is no longer a member, from the file, so that a revocation needs no restart.

    What the server has obeyed it keeps, as its `Membership`; an older file takes none of it back. No
    registry, or an older one at the start, is a ConfigError.
    """

    def __init__(self, folder: Path, standing: "Membership") -> None:
        self._folder = folder
        self._standing = standing
        self._papers: Mapping[str, bytes] = {}
        self._registry = self._read()
        self._looked = time.monotonic()

    def _read(self) -> Registry:
        registry = read_registry(self._folder)
        if registry.revoked is not None:
            try:
                self._standing.accept(Papers(revoked=registry.revoked).to_bytes())
            except RefusedError as error:
                raise ConfigError(
                    f"{self._folder / REGISTRY} is not what the operator has signed last ({error}): put the newest one "
                    "in its place, or let `shoal enroll server` take up what the server knows"
                ) from error
        # A server that was renewed says nothing of it until it starts again.
        self._papers = (
            {} if self._standing.revoked(self._standing.certificate) else registry.papers()
        )
        return registry

    def revoked(self, certificate: "Certificate") -> bool:
        """Whether a certificate counts for nothing: its member was revoked, or has a newer one."""
        entry = self.current().members.get(certificate.name)
        gone = entry is None or entry.revoked or certificate.serial != entry.serial
        return gone or self._standing.revoked(certificate)

    def papers(self) -> Mapping[str, bytes]:
        """What the operator says to devices, by name; the same object until the file is another."""
        self.current()
        return self._papers

    def members(self) -> Collection[str]:
        """Names of the devices that are members, and whose enrolment has not ended."""
        its = self.current().devices()
        now = time.time()
        return {name for name, entry in its.items() if not 0 < entry.expires < now}

    def current(self) -> Registry:
        """The registry as it is now, or was a second ago."""
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            with contextlib.suppress(ConfigError, StorageError):  # what was obeyed stays
                if read_registry(self._folder) != self._registry:
                    self._registry = self._read()
        return self._registry
