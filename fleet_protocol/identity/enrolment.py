"""The file that makes a device, or the server, a member of a fleet."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel, problems
from fleet_protocol.messages.bounds import Count
from fleet_protocol.messages.values import Name
from fleet_protocol.transport import BrokerAddress

_LIMIT_BYTES = 64 * 1024
_OTHERS_BITS = 0o077  # of a file's mode: rights of the group and of everybody
REVOKED_DIGITS = 2**21  # of a signed list of revocations in hexadecimal: some 40,000 names
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=4096)]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SignedRevocations = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=REVOKED_DIGITS)]
Pem = Annotated[str, Field(max_length=16_384)]


class Enrolment(FrozenModel):
    """The identity of a member; anyone who has this file can act as the member."""

    format: Literal[1] = 1  # of this file
    fleet: Name
    role: Literal["server", "device"]  # what it may sign
    name: Name  # of the device, or ``server``
    broker: str = Field(max_length=300)  # ``mqtt[s]://host:port``, without a login
    operator: Key  # public key that vouches for every member, 32 bytes in hexadecimal
    certificate: Hex  # signed by the operator; see `fleet_protocol.identity.certificate`
    key: Key  # private key of this member, 32 bytes in hexadecimal
    # Private keys that open data sealed to it: its own, and a server's previous one.
    sealing: tuple[Key, ...] = ()
    token: str = Field(max_length=200)  # password at the broker; the login is the name
    # Certificate of the fleet's authority, which vouches for the broker; None without TLS.
    ca: Pem | None = None
    tls_certificate: Pem | None = None  # client certificate for brokers that require one
    tls_key: Pem | None = None

    def address(self, folder: Path, broker: str | None = None) -> BrokerAddress:
        """Return the address of the broker with this member's login.

        Certificates are written to files, because the TLS library reads files.

        Args:
            folder: a private folder for them.
            broker: another address of the broker.

        Raises:
            ConfigError: the address is malformed.
            StorageError: the files cannot be written.
        """
        texts = {
            "ca": self.ca,
            "tls_certificate": self.tls_certificate,
            "tls_key": self.tls_key,
        }
        paths = _write_certificates(folder, texts)
        address = BrokerAddress.parse(
            broker or self.broker,
            ca_file=paths.get("ca"),
            cert_file=paths.get("tls_certificate"),
            key_file=paths.get("tls_key"),
        )
        return replace(address, username=self.name, password=self.token)


class Papers(FrozenModel):
    """The operator's statements since a device's enrolment; none of them is secret.

    Attributes:
        revoked: the revoked certificates; see `fleet_protocol.identity.certificate.Revocations`.
        certificate: a new certificate for the same keys, with a later expiry; None if there is
            none.
        release: the runtime that the device should install; see
            `fleet_protocol.identity.release.Release`. None if there is none.
        heard: number of the release that the device is trying. The number confirms that the server
            has received a message from this release. Only the server adds this number.
    """

    revoked: SignedRevocations
    certificate: Hex | None = None
    release: Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=2**14)] | None = None
    heard: Count | None = None


def read_enrolment(path: Path, role: str = "") -> Enrolment:
    """Read the file of ``shoal enroll`` or ``shoal init``.

    Args:
        path: path of the file.
        role: role that it must have; empty for any.

    Raises:
        ConfigError: the file is of another kind, has another role, or others may read it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_LIMIT_BYTES)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"cannot read the enrolment {path}: {error.strerror}") from error
    if os.name == "posix" and mode & _OTHERS_BITS:
        raise ConfigError(
            f"others can read the enrolment {path}, which holds a key: chmod 600 {quote(str(path))}"
        )
    try:
        enrolment = Enrolment.model_validate_json(data)
    except ValidationError as error:
        problem = problems(error, "the file", 1)
        raise ConfigError(
            f"{path} is not an enrolment of this version: {problem}; make one with `shoal enroll`"
        ) from error
    if role not in {"", enrolment.role}:
        raise ConfigError(
            f"{path} is the enrolment of a {enrolment.role}, not of a {role}; make one with "
            "`shoal enroll`"
        )
    return enrolment


def write_secret(
    path: Path,
    content: str | bytes,
    *,
    durable: bool = False,
) -> None:
    """Write a file that only its owner may read, atomically replacing an existing one.

    Args:
        path: path of the file; its folder is created for the owner only.
        content: content of the file.
        durable: whether it must survive a power cut, as with `replacing`.

    Raises:
        StorageError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    write_atomically(path, data, durable=durable)


def _write_certificates(folder: Path, texts: Mapping[str, str | None]) -> dict[str, Path]:
    """Write certificates and keys that are set, and return their paths by name."""
    paths = {}
    for name, text in texts.items():
        if text is None:
            continue
        path = folder / f"{name}.pem"
        paths[name] = path
        if _has_content(path, text):  # a full disk must not prevent a connection
            continue
        write_secret(path, text)
        _give_to_owner_of(folder, path)
    return paths


def _has_content(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:  # another user's file is replaced
        return False


def _give_to_owner_of(folder: Path, path: Path) -> None:
    """Give files that root has written, as in ``shoal device doctor``, to the agent's user."""
    if os.name != "posix" or os.geteuid() != 0:
        return
    owner = folder.parent.stat()
    for written in (folder, path):
        # The agent may have put a link to a folder of root there.
        os.chown(written, owner.st_uid, owner.st_gid, follow_symlinks=False)
