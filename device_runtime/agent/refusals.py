"""Converts the failure of a task to a reason and a text for the operator."""

import errno

from fleet_protocol.errors import (
    BlobError,
    BrokerRefusedError,
    ConfigError,
    DataChangedError,
    DataError,
    MismatchError,
    RefusalReason,
    RefusedError,
    StorageError,
)
from fleet_protocol.refusals import PACKET_TOO_LARGE, explain
from fleet_protocol.transport import Refused

Refusal = tuple[RefusalReason, str]
"""A reason with its detail, a text for the operator."""


def refused_error(refused: Refused) -> BrokerRefusedError:
    """Return a broker's refusal as an error, for the server and the log."""
    return BrokerRefusedError(
        refused.code, f"the broker refuses this board {refused} {explain(refused.code)}"
    )


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal to send to the server for a failure."""
    if isinstance(error, RefusedError):
        return error.reason, str(error)
    if isinstance(error, BrokerRefusedError):
        too_large = error.code == PACKET_TOO_LARGE
        reason = (
            RefusalReason.TOO_LARGE_FOR_BROKER if too_large else RefusalReason.REFUSED_BY_BROKER
        )
        return reason, str(error)
    if isinstance(error, StorageError):
        cause = error.__cause__
        full = isinstance(cause, OSError) and cause.errno in {
            errno.ENOSPC,
            errno.EDQUOT,
        }
        return (RefusalReason.NO_SPACE if full else RefusalReason.FAILED), str(error)
    if isinstance(error, MismatchError):
        return RefusalReason.DATA_MISMATCH, str(error)
    if isinstance(error, DataChangedError):
        return RefusalReason.DATA_CHANGED, str(error)
    if isinstance(error, DataError):
        return RefusalReason.NO_DATA, str(error)
    if isinstance(error, BlobError):
        return RefusalReason.MALFORMED, str(error)
    if isinstance(error, ConfigError):
        return RefusalReason.UNSUPPORTED, str(error)
    return RefusalReason.FAILED, f"{type(error).__name__}: {error}"
