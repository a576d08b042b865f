"""What a device says to the server."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.errors import RefusalReason
from fleet_protocol.frozen import FiniteJson
from fleet_protocol.messages.bounds import Count, Loss, Positive, Ranges, Text, Word
from fleet_protocol.messages.header import DeviceTaskMessage
from fleet_protocol.messages.values import (
    SHARE_DIGITS,
    SUM_LIMIT,
    BlobRef,
    Digest,
    MemberKeys,
    Name,
    TaskMetrics,
)

Sealed = Annotated[str, Field(pattern=f"^[0-9a-f]{{{3 * SHARE_DIGITS + 104}}}$")]
"""Three sealed shares of a secure sum, in hexadecimal digits."""
_Opening = Annotated[str, Field(pattern=f"^[0-9a-f]{{{64 + 3 * SHARE_DIGITS}}}$")]
_Share = Annotated[str, Field(pattern=f"^[0-9a-f]{{{SHARE_DIGITS}}}$")]
_Check = Annotated[str, Field(pattern=f"^([0-9a-f]{{{SHARE_DIGITS}}})?$")]
_PairKey = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Accept(DeviceTaskMessage):
    """A device takes a task.

    Attributes:
        tier: the choice it took, left out where that is the first.
        lacks: what of that choice it has nothing of, and asks for as a whole. What it has is not
            sent.
        keys: of the device in a secure sum, where the update goes into one.
    """

    type: Literal["accept"] = "accept"
    tier: Word = ""
    lacks: Annotated[tuple[Literal["artifact_set", "weights"], ...], Field(max_length=2)] = ()
    keys: MemberKeys | None = None


class Progress(DeviceTaskMessage):
    """How far a device is.

    Attributes:
        epoch: finished epochs.
        epochs: epochs in all.
        step: finished steps.
        loss: mean training loss of the last finished epoch, absent before the first.
    """

    type: Literal["progress"] = "progress"
    epoch: Count
    epochs: Positive
    step: Count
    loss: Loss | None = None


class NeedChunks(DeviceTaskMessage):
    """A device asks for chunks of a blob it waits for.

    Attributes:
        digest: the blob.
        ranges: half-open ranges of chunk indices.
    """

    type: Literal["need-chunks"] = "need-chunks"
    digest: Digest
    ranges: Ranges


class Done(DeviceTaskMessage):
    """A device has sent every chunk of its update.

    Attributes:
        update: the blob the chunks make up.
        tier: the tier it trained, left out where that is the first that it was offered.
        metrics: what it measured.
    """

    type: Literal["done"] = "done"
    update: BlobRef
    tier: Word = ""
    metrics: TaskMetrics


class Shares(DeviceTaskMessage):
    """A device's answer to a step of a secure sum.

    One of these is there.

    Attributes:
        sealed: shares of its secrets, by the member that each is sealed for.
        checks: answers to the challenge, by the dealer whose shares they are of; empty where those
            shares do not open.
        openings: keys of seals with the shares in them, by the member that it dealt these to.
        revealed: shares of the members' secrets, by member.
        pair_keys: keys of the masks in common with members, by member.
    """

    type: Literal["shares"] = "shares"
    sealed: Annotated[Mapping[Name, Sealed], Field(max_length=SUM_LIMIT)] = {}
    checks: Annotated[Mapping[Name, _Check], Field(max_length=SUM_LIMIT)] = {}
    openings: Annotated[Mapping[Name, _Opening], Field(max_length=SUM_LIMIT)] = {}
    revealed: Annotated[Mapping[Name, _Share], Field(max_length=SUM_LIMIT)] = {}
    pair_keys: Annotated[Mapping[Name, _PairKey], Field(max_length=SUM_LIMIT)] = {}


class Refuse(DeviceTaskMessage):
    """A device will not, or cannot, finish a task.

    Attributes:
        reason: why.
        detail: for the operator.
    """

    type: Literal["refuse"] = "refuse"
    reason: RefusalReason
    detail: Text


class Predicted(DeviceTaskMessage):
    """The answer to `Ask` of a board, or of the server in its place.

    The server passes a board's answer on to the operator who asked.

    Attributes:
        reason: why there is no prediction; None where there is one.
        detail: that, for people, with what to do.
        model: which model judged, with its digest; ``own`` is in it where that is the board's own.
        predictions: of each sample its outputs by head, and of labels the largest one's ``label``
            and ``share``.
    """

    type: Literal["predicted"] = "predicted"
    reason: RefusalReason | None = None
    detail: Text = ""
    model: Annotated[Mapping[Word, Word | Count], Field(max_length=16)] = {}
    predictions: tuple[Mapping[Word, FiniteJson], ...] = ()


DeviceMessage = Annotated[
    Accept | Progress | NeedChunks | Done | Refuse | Shares | Predicted,
    Field(discriminator="type"),
]
