"""The fleet's certificate authority for TLS between members and broker (X.509, ECDSA P-256)."""

import datetime as dt
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from broker_server.store.key_files import load_private_key
from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.enrolment import write_secret

# The operator's signed certificate limits a membership, not the TLS certificates.
_YEARS = 20
_DAMAGED = (
    IndexError,
    InternalError,
    UnsupportedAlgorithm,
    ValueError,
    x509.InvalidVersion,
)
"""Errors of a damaged PEM file; an IndexError if it has no name."""
# the date at which boards without a clock start
_BEGIN = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> str:
    """Return a private key in PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


@dataclass(frozen=True)
class Authority:
    """A private certificate authority, named after its fleet.

    Certificate and private key are in PEM.
    """

    fleet: str
    certificate: str
    key: str

    @classmethod
    def generate(cls, fleet: str) -> "Authority":
        """Return a new authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = _builder(fleet, None, key.public_key())
        certificate = builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256())
        return cls(fleet, _text(certificate), pem(key))

    @classmethod
    def read(cls, folder: Path) -> "Authority":
        """Return the authority in a fleet's folder.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            certificate = (folder / "ca.pem").read_text(encoding="utf-8")
            key = (folder / "ca.key").read_text(encoding="utf-8")
            subject = x509.load_pem_x509_certificate(certificate.encode()).subject
            fleet = subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
            authority = cls(str(fleet), certificate, key)
            authority.require_key()
        except (OSError, *_DAMAGED) as error:
            raise ConfigError(
                f"cannot read the certificate authority in {folder}: {error}"
            ) from error
        return authority

    def require_key(self) -> None:
        """Check that the key can sign.

        Raises:
            ConfigError: it is of another kind.
            ValueError: it is damaged.
        """
        self._parent()

    def write(self, folder: Path) -> None:
        """Write it into a fleet's folder.

        Raises:
            StorageError: it cannot be written.
        """
        write_secret(folder / "ca.pem", self.certificate)
        write_secret(folder / "ca.key", self.key)

    def issue(self, name: str, *, hosts: Iterable[str] = ()) -> tuple[str, str]:
        """Issue a certificate for a client, or for a broker.

        Args:
            name: name of the client or broker.
            hosts: addresses of the broker; none for a client.

        Returns:
            The certificate and its private key, in PEM.

        Raises:
            ConfigError: the key of this authority is of another kind.
        """
        parent, issuer = self._parent()
        key = ec.generate_private_key(ec.SECP256R1())
        # Each once, in order: the host may be one of this computer's addresses.
        names = [_alternative(host) for host in dict.fromkeys(hosts)]
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(parent.public_key())
        builder = _builder(name, issuer.subject, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        builder = builder.add_extension(identifier, critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return _text(builder.sign(parent, hashes.SHA256())), pem(key)

    def revoked(self, serials: Iterable[str]) -> str:
        """Return the list of revoked certificates (RFC 5280) in PEM.

        Args:
            serials: their numbers, see `serial_of`.
        """
        parent, issuer = self._parent()
        # Brokers admit nobody if the list has expired, so it must stay valid while nothing is
        # revoked.
        until = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=365 * _YEARS)
        builder = x509.CertificateRevocationListBuilder(issuer.subject, _BEGIN, until)
        for serial in serials:
            revoked = x509.RevokedCertificateBuilder(int(serial, 16), _BEGIN).build()
            builder = builder.add_revoked_certificate(revoked)
        return _text(builder.sign(parent, hashes.SHA256()))

    def _parent(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = load_private_key(self.key.encode())
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(
                "the key of the certificate authority is not of the kind that `shoal init` makes"
            )
        return key, x509.load_pem_x509_certificate(self.certificate.encode())


def _text(signed: x509.Certificate | x509.CertificateRevocationList) -> str:
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def serial_of(certificate: str) -> str:
    """Return the number of a certificate in PEM, in hexadecimal."""
    return f"{x509.load_pem_x509_certificate(certificate.encode()).serial_number:x}"


def withdrawn_serials(path: Path) -> frozenset[int]:
    """Return the numbers of a list of revoked certificates; none if the file does not exist.

    Raises:
        ConfigError: the file is not such a list.
    """
    if not path.exists():
        return frozenset()
    try:
        revocations = x509.load_pem_x509_crl(path.read_bytes())
    except _DAMAGED as error:
        raise ConfigError(
            f"{path} is not a list of revoked certificates ({error}): `shoal enroll server` "
            "writes it again"
        ) from error
    return frozenset(certificate.serial_number for certificate in revocations)


def _builder(
    name: str, issuer: x509.Name | None, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    """Return the common part of all certificates.

    Args:
        name: name of the subject.
        issuer: None for the certificate of an authority, which signs its own.
        key: key of the subject.
    """
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    authority = issuer is None
    # Clients and brokers only sign their handshakes.
    usage = x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=365 * _YEARS))
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None),
            critical=True,
        )
        .add_extension(usage, critical=True)
    )
