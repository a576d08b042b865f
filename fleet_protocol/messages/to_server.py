"""Messages from a device to the server."""

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
    """A device accepts a task.

    Attributes:
        tier: id of the tier that the device chose; omitted if the device chose the first offered
            tier.
        lacks: blobs of the chosen tier of which the device has no chunks, and which it requests in
            full. The server does not send the tier's other blobs.
        keys: public keys of the device, if its update is part of a secure sum.
        clock: time on the device's clock, in seconds since 1970; absent in messages from earlier
            versions.
    """

    type: Literal["accept"] = "accept"
    tier: Word = ""
    lacks: Annotated[tuple[Literal["artifact_set", "weights"], ...], Field(max_length=2)] = ()
    keys: MemberKeys | None = None
    clock: Count | None = None


class Progress(DeviceTaskMessage):
    """The progress of a device in its task.

    Attributes:
        epoch: number of finished epochs.
        epochs: total number of epochs in the task.
        step: number of finished steps.
        loss: mean training loss of the last finished epoch; absent before the first epoch has
            finished.
    """

    type: Literal["progress"] = "progress"
    epoch: Count
    epochs: Positive
    step: Count
    loss: Loss | None = None


class NeedChunks(DeviceTaskMessage):
    """A device requests chunks of a blob.

    Attributes:
        digest: digest of the requested blob.
        ranges: half-open ranges of the indices of the requested chunks.
    """

    type: Literal["need-chunks"] = "need-chunks"
    digest: Digest
    ranges: Ranges


class Done(DeviceTaskMessage):
    """A device has sent every chunk of its update.

    Attributes:
        update: the blob that the chunks make up.
        tier: id of the tier that the device trained; omitted if the device trained the first
            offered tier.
        metrics: its measurements.
    """

    type: Literal["done"] = "done"
    update: BlobRef
    tier: Word = ""
    metrics: TaskMetrics


class Shares(DeviceTaskMessage):
    """A device's answer to a step of a secure sum.

    Exactly one of these is set.

    Attributes:
        sealed: shares of the device's secrets, by the member for which each share is sealed.
        checks: answers to the challenge, by the dealer of the shares; empty if the shares cannot be
            opened.
        openings: keys that open the sealed shares, by the member to which the device dealt them.
        revealed: shares of the members' secrets, by member.
        pair_keys: keys of the masks that the device shares with other members, by member.
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
        reason: why the device refuses the task.
        detail: details of the refusal, for the operator.
    """

    type: Literal["refuse"] = "refuse"
    reason: RefusalReason
    detail: Text


class Predicted(DeviceTaskMessage):
    """The answer to `Ask`, from a board or from the server on the board's behalf.

    The server forwards a board's answer to the operator who sent the request.

    Attributes:
        reason: why there is no prediction; None if there is one.
        detail: the reason and the remedy, as a sentence.
        model: name and digest of the model. The field ``own`` is present if this is the board's own
            model.
        predictions: for each sample, the outputs of each head; for labels, also the most probable
            ``label``, and its probability (softmax) as ``share``.
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
