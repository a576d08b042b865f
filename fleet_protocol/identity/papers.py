"""What the operator says to a member after it was enrolled: that it is one for longer, and who is
one no longer.

A server carries it and can make none of it: that a certificate ends later is the operator's word,
and so is the list of those that count for nothing, whose counter never goes back. The file that a
member was enrolled with is not touched. What was said since lies beside it, so that a power cut
costs at worst what the broker says again.
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
    """A member as its operator last said that it is.

    At a path is kept what was said since it was enrolled.
    """

    def __init__(self, enrolment: Enrolment, path: Path) -> None:
        self.enrolment = enrolment
        self.revocations = Revocations(fleet=enrolment.fleet)
        self._operator = Ed25519PublicKey.from_public_bytes(bytes.fromhex(enrolment.operator))
        self._path = path
        with contextlib.suppress(
            OSError, RefusedError
        ):  # nothing was said yet, or by another operator
            self.enrolment, self.revocations, _ = self._judged(path.read_bytes())

    @property
    def certificate(self) -> Certificate:
        """The member's own."""
        return read_certificate(bytes.fromhex(self.enrolment.certificate), self._operator)

    def revoked(self, certificate: Certificate) -> bool:
        """Whether a certificate counts for nothing, as far as is known."""
        return certificate.serial < self.revocations.since.get(certificate.name, 0)

    def accept(self, data: bytes) -> OperatorNotice:
        """Believe what the operator has signed, on disk first.

        Raises:
            RefusedError: with `MALFORMED`, `FORGED`, or `REPLAYED` for a list before the one that
                is known.
            StorageError: it cannot be kept; nothing has changed.
        """
        enrolment, revocations, papers = self._judged(data)
        renewed = enrolment is not self.enrolment
        if renewed or revocations != self.revocations:
            write_atomically(
                self._path,
                Papers(revoked=papers.revoked, certificate=enrolment.certificate).to_bytes(),
            )
        self.enrolment = enrolment
        self.revocations = revocations
        told = bytes.fromhex(papers.release or "")
        return OperatorNotice(
            renewed,
            read_signed(Release, told, self._operator) if told else None,
            papers.heard or 0,
        )

    def _judged(self, data: bytes) -> tuple[Enrolment, Revocations, Papers]:
        try:
            papers = Papers.model_validate_json(data)
        except ValidationError as error:
            raise RefusedError(RefusalReason.MALFORMED, problems(error, "papers")) from error
        enrolment = self.enrolment
        known = self.revocations
        revocations = read_signed(Revocations, bytes.fromhex(papers.revoked), self._operator)
        if revocations != known and (
            revocations.fleet != known.fleet or revocations.counter <= known.counter
        ):
            text = f"revocations {revocations.counter} of fleet {revocations.fleet}, where {known.counter} are known"
            raise RefusedError(RefusalReason.REPLAYED, text)
        if papers.certificate is not None:
            old = self.certificate
            new = read_certificate(bytes.fromhex(papers.certificate), self._operator)
            same = old == new.model_copy(
                update={"expires": old.expires}
            )  # and not another enrolment of this device
            if same and new.outlives(old):
                enrolment = enrolment.model_copy(update={"certificate": papers.certificate})
        return enrolment, revocations, papers
