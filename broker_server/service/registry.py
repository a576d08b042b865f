"""The members of an enrolled fleet as its server knows them: logins, and who is one no longer."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.enrolment import write_secret

if TYPE_CHECKING:
    from fleet_protocol.identity.certificate import Certificate

REGISTRY = "registry.json"
_LOOK_SECONDS = 1.0


class MemberEntry(FrozenModel):
    """One member.

    Attributes:
        role: ``server`` or ``device``.
        serial: of its newest certificate; older ones count for nothing.
        token: password at the broker.
        revoked: whether it is a member no longer.
        sealing: of a device, the public key to which the group's key is sealed; None if it was enrolled before there
            were such keys.
        tls: number of its client certificate, in hexadecimal.
    """

    role: str
    serial: int
    token: str
    revoked: bool = False
    sealing: str | None = None
    tls: str | None = None


class Registry(FrozenModel):
    """All members that there ever were.

    Attributes:
        serial: of the newest certificate.
        epoch: of the key under which blobs go down; it grows whenever an enrolment counts for nothing any more.
        withdrawn: numbers of client certificates of devices that count for nothing any more.
        members: by name.
    """

    serial: int = 0
    epoch: int = 1
    withdrawn: tuple[str, ...] = ()
    members: Mapping[str, MemberEntry] = Field(default_factory=dict)

    @property
    def lacking(self) -> list[str]:
        """Devices that could not read what is sealed to all: because of them nothing is."""
        return [name for name, entry in self.devices().items() if entry.sealing is None]

    def readers(self) -> dict[str, str]:
        """Public keys of the devices, by name."""
        return {name: entry.sealing for name, entry in self.devices().items() if entry.sealing is not None}

    def devices(self) -> dict[str, MemberEntry]:
        """Those that are members, by name."""
        return {name: entry for name, entry in self.members.items() if entry.role == "device" and not entry.revoked}

    def logins(self) -> dict[str, str]:
        """Names and passwords that the broker lets in."""
        return {name: entry.token for name, entry in self.members.items() if not entry.revoked}

    def without(self, name: str) -> "Registry":
        """The same, with all that a member has so far counting for nothing; of one that is none, the same."""
        entry = self.members.get(name)
        if entry is None:
            return self
        gone = entry.model_copy(update={"revoked": True})
        # The server that runs keeps its way into the broker until it starts again.
        withdrawn = (entry.tls,) if entry.tls is not None and entry.role == "device" else ()
        changes = {"withdrawn": (*self.withdrawn, *withdrawn), "members": {**self.members, name: gone}}
        return self.model_copy(update={**changes, "epoch": self.epoch + 1})

    def write(self, folder: Path) -> None:
        """Keep it in the fleet's folder.

        Raises:
            StorageError: it cannot be written.
        """
        write_secret(folder / REGISTRY, self.model_dump_json(indent=1))


def read_registry(folder: Path) -> Registry:
    """Read the registry of a fleet's folder.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Registry.model_validate_json((folder / REGISTRY).read_bytes())
    except OSError as error:
        raise ConfigError(f"{folder} is no fleet's folder ({error.strerror}); `shoal init` makes one") from error
    except ValidationError as error:
        raise ConfigError(f"{folder / REGISTRY} is damaged: {error.errors()[0]['msg']}") from error


class RegistryReader:
    """Who is no longer a member, from the file, so that a revocation needs no restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._registry = read_registry(folder)
        self._looked = time.monotonic()

    def revoked(self, certificate: "Certificate") -> bool:
        """Whether a certificate counts for nothing: its member was revoked, or has a newer one."""
        entry = self.current().members.get(certificate.name)
        return entry is None or entry.revoked or certificate.serial != entry.serial

    def current(self) -> Registry:
        """The registry as it is now, or was a second ago."""
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._registry = read_registry(self._folder)
        return self._registry
