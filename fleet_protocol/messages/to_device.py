"""What the server says to a device."""

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
    """The server asks a device to take part in a round, and says what it is to do.

    Attributes:
        version: number of the global version the weights were cut from.
        choices: tiers the device may take; it takes the first that it can train unless there is a
            chooser.
        seconds_left: time until the round closes, relative because a board's clock may be wrong.
    """

    type: Literal["offer"] = "offer"
    run: Name
    round: Positive
    version: Count
    choices: tuple[TierChoice, ...] = Field(min_length=1, max_length=256)
    seconds_left: PositiveMeasure


class Cancel(TaskMessage):
    """The server no longer wants a task's result.

    Attributes:
        reason: for the device's log.
    """

    type: Literal["cancel"] = "cancel"
    reason: Text


class UploadAck(TaskMessage):
    """The update is on the server's disk; the device may forget it."""

    type: Literal["upload-ack"] = "upload-ack"


class UploadMissing(TaskMessage):
    """The server still misses chunks of an update.

    Attributes:
        ranges: half-open ranges of chunk indices.
    """

    type: Literal["upload-missing"] = "upload-missing"
    ranges: Ranges


class UploadRefused(TaskMessage):
    """The server will not merge an update.

    Attributes:
        reason: why.
        detail: for the device's log.
    """

    type: Literal["upload-refused"] = "upload-refused"
    reason: RefusalReason
    detail: Text


class Sum(TaskMessage):
    """What a device needs for its next step in a secure sum (`fleet_protocol.secure_sum`).

    One of these is there, but for the challenge, which comes with the shares.

    Attributes:
        keys: of the members that it deals shares for, by name.
        dealt: shares that were sealed for it, by the member they are of.
        challenge: a random number; the device answers it for each member that dealt.
        disputed: members who say that the shares which this device dealt to them are bad; it opens
            these shares.
        members: whose masks are in the sum; the device masks its update for these.
        sent: members whose masked updates came; it reveals the shares that take their masks off the
            sum.
        unmatched: members whose shares restored another mask key than theirs; the device gives the
            keys of its masks in common with these.
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
    """The server asks a device to say again what it is and what it does.

    What it said before was lost on its way, or somebody has put something else in its place at the
    broker.
    """

    type: Literal["introduce"] = "introduce"


class Ask(TaskMessage):
    """A request of an operator for predictions of a board's model.

    The server passes it on to the board unchanged.

    Attributes:
        task: id chosen by the asker; the answer carries it.
        device: id of the board.
        asked: the samples, see `device_runtime.predictions.requests`.
        seconds: after which nobody waits for the answer.
    """

    type: Literal["ask"] = "ask"
    device: Name
    asked: FiniteJson
    seconds: PositiveMeasure


TaskAnswer = Cancel | UploadAck | UploadMissing | UploadRefused | Sum
"""What a server says about a task that it has offered."""

ServerMessage = Annotated[
    Offer | TaskAnswer | Introduce | Ask,
    Field(discriminator="type"),
]
