"""The one file that makes a device, or the server, a member of a fleet."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel, problems
from fleet_protocol.messages.bounds import Count
from fleet_protocol.messages.values import Name
from fleet_protocol.transport import BrokerAddress

_LIMIT_BYTES = 64 * 1024
REVOKED_DIGITS = 2**21  # of a signed list of revocations in hexadecimal: some 40,000 names
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=4096)]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Pem = Annotated[str, Field(max_length=16_384)]


class Enrolment(FrozenModel):
    """What a member of a fleet has; whoever holds the file is that member."""

    format: Literal[1] = 1  # of this file
    fleet: Name
    role: Literal["server", "device"]  # what it may sign
    name: Name  # of the device, or ``server``
    broker: str = Field(max_length=300)  # ``mqtt[s]://host:port``, without a login
    operator: Key  # public key that vouches for every member, 32 bytes in hexadecimal
    certificate: Hex  # signed by the operator; see `fleet_protocol.identity.certificate`
    key: Key  # private key of this member, 32 bytes in hexadecimal
    # private keys that open what is sealed to it: its own, and of a server the one before it was
    # renewed
    sealing: tuple[Key, ...] = ()
    token: str = Field(max_length=200)  # password at the broker; the login is the name
    ca: Pem | None = (
        # certificate of the fleet's own authority, which vouches for the broker; None without TLS
        None
    )
    tls_certificate: Pem | None = None  # client certificate for brokers that ask for one
    tls_key: Pem | None = None

    def address(self, folder: Path, broker: str | None = None) -> BrokerAddress:
        """The broker, or another address of it, with this member's login.

        Certificates are written out for the TLS library, which reads files, to a folder that nobody
        else may read.

        Raises:
            ConfigError: the address is malformed.
            StorageError: the files cannot be written.
        """
        texts = {
            "ca": self.ca,
            "tls_certificate": self.tls_certificate,
            "tls_key": self.tls_key,
        }
        paths = {name: folder / f"{name}.pem" for name, text in texts.items() if text is not None}
        for name, path in paths.items():
            with contextlib.suppress(OSError):  # another's file is written anew
                if path.read_bytes() == str(texts[name]).encode():  # a disk may be full
                    continue
            write_secret(path, str(texts[name]))
            if (
                os.name == "posix" and os.geteuid() == 0
            ):  # `shoal device doctor`; the agent is another's
                owner = folder.parent.stat()
                for made in (
                    folder,
                    path,
                ):  # the agent may have put a link there, to a folder that is root's
                    os.chown(made, owner.st_uid, owner.st_gid, follow_symlinks=False)
        address = BrokerAddress.parse(
            broker or self.broker,
            ca_file=paths.get("ca"),
            cert_file=paths.get("tls_certificate"),
            key_file=paths.get("tls_key"),
        )
        return replace(address, username=self.name, password=self.token)


class Papers(FrozenModel):
    """What an operator has signed since a member was enrolled; nothing of it is secret.

    Attributes:
        revoked: what counts for nothing; see `fleet_protocol.identity.certificate.Revocations`.
        certificate: that ends later, for the same keys.
        release: a runtime that the member is to take; see
            `fleet_protocol.identity.release.Release`.
        heard: number of the release with which the server has heard the member, its own word.
    """

    revoked: Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=REVOKED_DIGITS)]
    certificate: Hex | None = None
    release: Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=2**14)] | None = None
    heard: Count | None = None


def read_enrolment(path: Path, role: str = "") -> Enrolment:
    """Read the file of ``shoal enroll`` or ``shoal init``, of a role where one is wanted.

    A ConfigError is for one that is none, or another role's, or that others may read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_LIMIT_BYTES)
            others = os.fstat(file.fileno()).st_mode & 0o077 if os.name == "posix" else 0
    except OSError as error:
        raise ConfigError(f"cannot read the enrolment {path}: {error.strerror}") from error
    if others:
        raise ConfigError(
            f"others may read the enrolment {path}, which holds a key: chmod 600 {path}"
        )
    try:
        found = Enrolment.model_validate_json(data)
    except ValidationError as error:
        what = problems(error, "the file", 1)
        raise ConfigError(
            f"{path} is no enrolment of this version: {what}; make one with `shoal enroll`"
        ) from error
    if role not in {"", found.role}:
        raise ConfigError(
            f"{path} is the enrolment of a {found.role}, not of a {role}; make one with `shoal enroll`"
        )
    return found


def write_secret(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file that only its owner may read.

    An existing one is replaced at once, its folder made for the owner.

    Durable it survives a power cut, as with `replacing`. What cannot be written is a StorageError.
    """
    write_atomically(
        path, content.encode() if isinstance(content, str) else content, durable=durable
    )
