"""Messages from the server to a device."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.errors import RefusalReason
from fleet_protocol.frozen import FiniteJson
from fleet_protocol.messages.bounds import (
    Count,
    Positive,
    PositiveMeasure,
    Ranges,
    Text,
)
from fleet_protocol.messages.header import Message, TaskMessage
from fleet_protocol.messages.instructions import Instructions, TierChoice
from fleet_protocol.messages.to_server import Sealed
from fleet_protocol.messages.values import SHARE_DIGITS, SUM_LIMIT, MemberKeys, Name


class Offer(Instructions, TaskMessage):
    """The server asks a device to take part in a round, and sends the instructions.

    Attributes:
        version: number of the global version from which the server cut the weights.
        choices: tiers that the device may train; without a chooser, the device trains the first
            tier that it can train.
        seconds_left: seconds until the round closes. The time is relative, because a board's clock
            may be wrong.
    """

    type: Literal["offer"] = "offer"
    run: Name
    round: Positive
    version: Count
    choices: tuple[TierChoice, ...] = Field(min_length=1, max_length=256)
    seconds_left: PositiveMeasure


class Cancel(TaskMessage):
    """The server no longer needs a task's result.

    Attributes:
        reason: why the task was cancelled, for the device's log.
    """

    type: Literal["cancel"] = "cancel"
    reason: Text


class UploadAck(TaskMessage):
    """The server has stored the update on disk, so the device may delete its copy."""

    type: Literal["upload-ack"] = "upload-ack"


class UploadMissing(TaskMessage):
    """The server still lacks chunks of an update.

    Attributes:
        ranges: half-open ranges of the indices of the missing chunks.
    """

    type: Literal["upload-missing"] = "upload-missing"
    ranges: Ranges


class UploadRefused(TaskMessage):
    """The server will not merge an update.

    Attributes:
        reason: why the server refused the update.
        detail: details of the refusal, for the device's log.
    """

    type: Literal["upload-refused"] = "upload-refused"
    reason: RefusalReason
    detail: Text


class Sum(TaskMessage):
    """A device's input for its next step in a secure sum (`fleet_protocol.secure_sum`).

    Exactly one of these is set, except that the challenge comes with the shares.

    Attributes:
        keys: keys of the members for which the device deals shares, by member.
        dealt: shares that were sealed for this device, by the member that dealt them.
        challenge: a random challenge, which the device answers for each member that dealt shares.
        disputed: members that report invalid shares from this device; the device opens these
            shares.
        members: members whose masks are in the sum; the device masks its update for them.
        sent: members whose masked updates arrived; the device reveals the shares that remove their
            masks from the sum.
        unmatched: members whose shares restored a mask key that differs from their own key; the
            device sends the keys of the masks that it shares with these members.
    """

    type: Literal["sum"] = "sum"
    keys: Annotated[Mapping[Name, MemberKeys], Field(max_length=SUM_LIMIT)] = {}
    dealt: Annotated[Mapping[Name, Sealed], Field(max_length=SUM_LIMIT)] = {}
    challenge: Annotated[str, Field(pattern=f"^([0-9a-f]{{{SHARE_DIGITS}}})?$")] = ""
    disputed: Annotated[tuple[Name, ...], Field(max_length=SUM_LIMIT)] = ()
    members: Annotated[tuple[Name, ...], Field(max_length=SUM_LIMIT)] = ()
    sent: Annotated[tuple[Name, ...], Field(max_length=SUM_LIMIT)] = ()
    unmatched: Annotated[tuple[Name, ...], Field(max_length=SUM_LIMIT)] = ()


class Introduce(Message):
    """The server asks a device for its profile and status again.

    The previous ones were lost, or somebody has replaced them at the broker.
    """

    type: Literal["introduce"] = "introduce"


class Ask(TaskMessage):
    """An operator's request for predictions from a board's model.

    The server forwards it to the board unchanged.

    Attributes:
        task: id that the sender chose; the answer repeats it.
        device: id of the board.
        asked: input samples; see `device_runtime.predictions.requests`.
        seconds: seconds after which the sender stops waiting for the answer.
    """

    type: Literal["ask"] = "ask"
    device: Name
    asked: FiniteJson
    seconds: PositiveMeasure


TaskAnswer = Cancel | UploadAck | UploadMissing | UploadRefused | Sum
"""A message from a server about a task that it has offered."""

ServerMessage = Annotated[
    Offer | TaskAnswer | Introduce | Ask,
    Field(discriminator="type"),
]
