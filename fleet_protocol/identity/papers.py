"""The operator's statements since a member was enrolled: renewals, revocations and releases.

A server forwards these papers and cannot make any of them: only the operator extends a certificate
or revokes one, and the counter of the list of revocations never decreases. The enrolment file does
not change. The papers are in a file beside it, so that a power cut costs at worst a repetition by
the broker.
"""

import contextlib
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import problems
from fleet_protocol.identity.certificate import (
    Certificate,
    Revocations,
    read_certificate,
    read_signed,
)
from fleet_protocol.identity.enrolment import Enrolment, Papers
from fleet_protocol.identity.release import Release
from fleet_protocol.transport import OperatorNotice


class Membership:
    """The state of a member according to the operator's newest papers.

    Args:
        enrolment: enrolment of the member, as it was issued.
        path: file in which the newest papers survive a restart.
    """

    def __init__(self, enrolment: Enrolment, path: Path) -> None:
        self.enrolment = enrolment
        self.revocations = Revocations(fleet=enrolment.fleet)
        self._operator = Ed25519PublicKey.from_public_bytes(bytes.fromhex(enrolment.operator))
        self._path = path
        # There are no papers yet, or another operator has signed them.
        with contextlib.suppress(OSError, RefusedError):
            self._apply(_read_papers(path.read_bytes()))

    @property
    def certificate(self) -> Certificate:
        """The member's own certificate."""
        return read_certificate(bytes.fromhex(self.enrolment.certificate), self._operator)

    @property
    def is_revoked(self) -> bool:
        """Whether this member's own enrolment was revoked, or replaced by a newer one."""
        return self.revoked(self.certificate)

    # An older serial than the list allows: revoked, or replaced by a newer enrolment.
    def revoked(self, certificate: Certificate) -> bool:
        """Return whether a certificate is revoked, as far as is known."""
        return certificate.serial < self.revocations.since.get(certificate.name, 0)

    def accept(self, data: bytes) -> OperatorNotice:
        """Verify papers, store them, and apply them to this member.

        Raises:
            RefusedError: with `MALFORMED`, `FORGED`, or `REPLAYED` for a list older than the known
                one.
            StorageError: they cannot be stored; nothing has changed.
        """
        papers = _read_papers(data)
        # Both are checked before either takes effect.
        revocations = self._newer_revocations(papers)
        enrolment = self._renewed_enrolment(papers)
        is_renewed = enrolment is not self.enrolment
        # Stored first, so that papers that took effect survive a restart.
        if is_renewed or revocations != self.revocations:
            newest = Papers(revoked=papers.revoked, certificate=enrolment.certificate)
            write_atomically(self._path, newest.to_bytes())
        self.enrolment = enrolment
        self.revocations = revocations
        # An invalid release must not prevent a renewal or a revocation.
        release_data = bytes.fromhex(papers.release or "")
        release = read_signed(Release, release_data, self._operator) if release_data else None
        heard = papers.heard or 0
        return OperatorNotice(is_renewed, release, heard, revoked=self.is_revoked)

    def _apply(self, papers: Papers) -> None:
        revocations = self._newer_revocations(papers)
        self.enrolment = self._renewed_enrolment(papers)
        self.revocations = revocations

    def _newer_revocations(self, papers: Papers) -> Revocations:
        """Return the list of revocations in papers, unless it is older than the known one."""
        current = self.revocations
        revocations = read_signed(Revocations, bytes.fromhex(papers.revoked), self._operator)
        if revocations == current:
            return revocations
        if revocations.fleet != current.fleet or revocations.counter <= current.counter:
            raise RefusedError(
                RefusalReason.REPLAYED,
                f"revocations {revocations.counter} of fleet {revocations.fleet} are older "
                f"than the known {current.counter}",
            )
        return revocations

    def _renewed_enrolment(self, papers: Papers) -> Enrolment:
        """Return the enrolment with the certificate in papers if that ends later."""
        if papers.certificate is None:
            return self.enrolment
        old = self.certificate
        new = read_certificate(bytes.fromhex(papers.certificate), self._operator)
        # Only the end may differ: any other difference means another enrolment.
        differs_in_end_only = old == new.model_copy(update={"expires": old.expires})
        if not differs_in_end_only or not new.outlives(old):
            return self.enrolment
        return self.enrolment.model_copy(update={"certificate": papers.certificate})


def _read_papers(data: bytes) -> Papers:
    try:
        return Papers.model_validate_json(data)
    except ValidationError as error:
        raise RefusedError(RefusalReason.MALFORMED, problems(error, "papers")) from error
