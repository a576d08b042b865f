"""The messages of the protocol: frozen values, JSON on the wire, validated on arrival.

Control messages are small and readable with ``mosquitto_sub``; tensors travel as chunks (``blobs``). Every message
carries the schema version, the fleet and a sequence number; task messages carry run, round and task as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.labels import Labels
from fleet_protocol.sizing import WhaleSettings
from fleet_protocol.topics import NAME_PATTERN

__all__ = [
    "SCHEMA_VERSION",
    "Accept",
    "BlobRef",
    "Cancel",
    "DeviceMessage",
    "DeviceStatus",
    "Done",
    "Evaluation",
    "MutualSettings",
    "NeedChunks",
    "Offer",
    "Profile",
    "Progress",
    "Ranges",
    "Refuse",
    "ServerMessage",
    "ServerStatus",
    "Sizing",
    "TaskMetrics",
    "TierChoice",
    "TrainSettings",
    "UploadAck",
    "UploadMissing",
    "UploadRefused",
    "parse_device_message",
    "parse_server_message",
    "parse_status",
]

SCHEMA_VERSION = 1

MESSAGE_LIMIT = 256 * 1024  # bytes; the largest control message is a chunk list of a few kB

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Ranges = tuple[tuple[int, int], ...]  # half-open [start, stop) chunk indices


class BlobRef(FrozenModel):
    """A blob by content.

    Attributes:
        digest: sha256, 64 hexadecimal digits.
        size: bytes.
        chunk_bytes: payload bytes of every chunk but the last.
    """

    digest: Digest
    size: int = Field(ge=1)
    chunk_bytes: int = Field(ge=1024)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.size // self.chunk_bytes)


class _Message(FrozenModel):
    """What every message carries.

    Attributes:
        schema_version: version of the message formats.
        fleet: name of the fleet.
        seq: counts the sender's messages, for the log.
    """

    schema_version: Literal[1] = 1
    fleet: Name
    seq: int = Field(default=0, ge=0)

    def to_bytes(self) -> bytes:
        """The message as it travels."""
        return self.model_dump_json().encode()


class Profile(FrozenModel):
    """What a device says about itself.

    Attributes:
        arch: machine type, as in ``uname -m``.
        system: operating system and release.
        cores: processors the agent may use.
        ram_bytes: memory of the board.
        free_ram_bytes: memory available when probed.
        backends: training backends to the version of their runtime.
        runtime_version: version of Shoal on the board.
        python: version of the interpreter.
        max_width: widest sub-model the operator lets it train.
        max_depth: deepest, or None for no limit.
        examples: samples in its training data.
        step_seconds: measured time of one training step at its tier, when known.
        link_bytes_per_second: measured download speed, when known.
        temperature_celsius: of the processor, where the board tells.
        on_battery: power state, where the board tells.
    """

    arch: str
    system: str
    cores: int = Field(ge=1)
    ram_bytes: int = Field(ge=0)
    free_ram_bytes: int = Field(ge=0)
    backends: Mapping[str, str]
    runtime_version: str
    python: str
    max_width: float = Field(gt=0, le=1)
    max_depth: int | None = Field(default=None, ge=1)
    examples: int = Field(ge=0)
    step_seconds: float | None = Field(default=None, ge=0)
    link_bytes_per_second: float | None = Field(default=None, ge=0)
    temperature_celsius: float | None = None
    on_battery: bool | None = None


class DeviceStatus(_Message):
    """Retained presence of a device; its will is the same message with ``online`` false.

    Attributes:
        device: id of the device.
        online: connected now.
        state: state of the agent's machine.
        profile: what the board is, absent in the will.
    """

    type: Literal["status"] = "status"
    device: Name
    online: bool
    state: str
    profile: Profile | None = None


class ServerStatus(_Message):
    """Retained presence of the server.

    Attributes:
        online: connected now.
        run: the run in progress, if any.
    """

    type: Literal["server"] = "server"
    online: bool
    run: str | None = None


class MutualSettings(FrozenModel):
    """How much the two models of mutual learning trust the labels in one round (METHODS 5.1).

    Attributes:
        alpha: of the personal model; the rest is trust in the meme.
        beta: of the meme; the rest is trust in the personal model.
        stays: parameters of the model that stay on the device (its adaptor, which may have another shape there); they
            are not in its update, and its labels are not in its metrics.
    """

    alpha: float = Field(default=0.5, ge=0, le=1)
    beta: float = Field(default=0.5, ge=0, le=1)
    stays: tuple[str, ...] = ()


class Sizing(FrozenModel):
    """What a device needs to choose its tier itself (METHODS 4).

    Attributes:
        settings: the constants.
        full_bytes: size of the whole model, whose time on the link T_cm is.
    """

    settings: WhaleSettings
    full_bytes: int = Field(ge=1)


class TrainSettings(FrozenModel):
    """How a device trains in one task.

    Attributes:
        learning_rate: input of the train graph.
        epochs: passes over the device's training data.
        steps: instead of whole passes exactly so many steps, over as many passes as they take; None for ``epochs``.
        batch_size: samples per step; the last batch of an epoch may be shorter.
        seed: of the shuffling, made unique per task by the device and round.
        mask_labels: zero the logits of labels the device does not hold (METHODS 1.5).
        proximal_mu: pull towards the weights the round started from (FedProx); 0 for none.
        sizing: set where the device chooses among the offered tiers itself.
        mutual: set where the device trains a personal model beside the one it was sent.
    """

    learning_rate: float = Field(gt=0)
    epochs: int = Field(ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(ge=1)
    seed: int = Field(ge=0)
    mask_labels: bool = True
    proximal_mu: float = Field(default=0.0, ge=0)
    sizing: Sizing | None = None
    mutual: MutualSettings | None = None


class TierChoice(FrozenModel):
    """One sub-model a device may take.

    Attributes:
        tier: id of the tier.
        artifact_set: the manifest.
        weights: the plan's slice of the global weights.
    """

    tier: str
    artifact_set: BlobRef
    weights: BlobRef


class _TaskMessage(_Message):
    """What every message about a task carries.

    Attributes:
        run: id of the run.
        round: number of the round, from 1.
        task: id of the task.
    """

    run: Name
    round: int = Field(ge=1)
    task: Name


class Offer(_TaskMessage):
    """The server asks a device to take part in a round.

    Attributes:
        kind: ``train``, or ``statistics`` (one pass that returns batch norm statistics, METHODS 1.6).
        version: number of the global version the weights were cut from.
        choices: tiers the device may take; it takes the first unless it sizes itself.
        train: settings of the training; of a statistics task only the batch size counts.
        seconds_left: time until the round closes, relative because a board's clock may be wrong.
    """

    type: Literal["offer"] = "offer"
    kind: Literal["train", "statistics"] = "train"
    version: int = Field(ge=0)
    choices: tuple[TierChoice, ...] = Field(min_length=1)
    train: TrainSettings
    seconds_left: float = Field(gt=0)


class Cancel(_TaskMessage):
    """The server no longer wants a task's result.

    Attributes:
        reason: for the device's log.
    """

    type: Literal["cancel"] = "cancel"
    reason: str


class UploadAck(_TaskMessage):
    """The update is on the server's disk; the device may forget it."""

    type: Literal["upload-ack"] = "upload-ack"


class UploadMissing(_TaskMessage):
    """The server still misses chunks of an update.

    Attributes:
        ranges: half-open ranges of chunk indices.
    """

    type: Literal["upload-missing"] = "upload-missing"
    ranges: Ranges


class UploadRefused(_TaskMessage):
    """The server will not merge an update.

    Attributes:
        reason: why.
        detail: for the device's log.
    """

    type: Literal["upload-refused"] = "upload-refused"
    reason: RefusalReason
    detail: str


class _DeviceTaskMessage(_TaskMessage):
    """What every message of a device about a task carries.

    Attributes:
        device: id of the device.
    """

    device: Name


class Accept(_DeviceTaskMessage):
    """A device takes a task.

    Attributes:
        tier: the choice it took.
    """

    type: Literal["accept"] = "accept"
    tier: str


class Progress(_DeviceTaskMessage):
    """How far a device is.

    Attributes:
        epoch: finished epochs.
        epochs: epochs in all.
        step: finished steps.
        loss: mean training loss of the last finished epoch, absent before the first.
    """

    type: Literal["progress"] = "progress"
    epoch: int = Field(ge=0)
    epochs: int = Field(ge=1)
    step: int = Field(ge=0)
    loss: float | None = None


class NeedChunks(_DeviceTaskMessage):
    """A device asks for chunks of a blob it waits for.

    Attributes:
        digest: the blob.
        ranges: half-open ranges of chunk indices.
    """

    type: Literal["need-chunks"] = "need-chunks"
    digest: Digest
    ranges: Ranges


class Evaluation(FrozenModel):
    """Loss and accuracy of a model on some samples.

    Attributes:
        examples: samples.
        loss: mean cross entropy.
        accuracy: share of samples whose largest logit is their label.
    """

    examples: int = Field(ge=1)
    loss: float
    accuracy: float = Field(ge=0, le=1)


class TaskMetrics(FrozenModel):
    """What a device measured in one task.

    Attributes:
        examples: training samples.
        batches: batches processed (steps of training, or batches of a statistics pass).
        labels: labels present in the training data (C_k of METHODS), needed by the label rule; none where an adaptor
            stays on the device. Many travel as a bitmap.
        train_loss: mean loss over the last epoch.
        mean_loss: mean loss over all training steps, where it is known.
        fetch_seconds: from the offer to the weights on disk.
        train_seconds: training alone.
        resident_bytes: peak resident memory of the process.
        evaluation: of the trained sub-model on the device's own held-out samples, when it keeps any; in mutual
            learning of the personal model.
    """

    examples: int = Field(ge=1)
    batches: int = Field(ge=1)
    labels: Labels
    train_loss: float | None = None
    mean_loss: float | None = None
    fetch_seconds: float = Field(ge=0)
    train_seconds: float = Field(ge=0)
    resident_bytes: int = Field(ge=0)
    evaluation: Evaluation | None = None


class Done(_DeviceTaskMessage):
    """A device has sent every chunk of its update.

    Attributes:
        update: the blob the chunks make up.
        tier: the tier it trained.
        metrics: what it measured.
    """

    type: Literal["done"] = "done"
    update: BlobRef
    tier: str
    metrics: TaskMetrics


class Refuse(_DeviceTaskMessage):
    """A device will not, or cannot, finish a task.

    Attributes:
        reason: why.
        detail: for the operator.
    """

    type: Literal["refuse"] = "refuse"
    reason: RefusalReason
    detail: str


ServerMessage = Annotated[
    Offer | Cancel | UploadAck | UploadMissing | UploadRefused,
    Field(discriminator="type"),
]
DeviceMessage = Annotated[
    Accept | Progress | NeedChunks | Done | Refuse,
    Field(discriminator="type"),
]

_SERVER_MESSAGES: TypeAdapter[ServerMessage] = TypeAdapter(ServerMessage)
_DEVICE_MESSAGES: TypeAdapter[DeviceMessage] = TypeAdapter(DeviceMessage)


def _explain(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'message'}: {e['msg']}" for e in error.errors()[:3])


def _check_size(payload: bytes) -> None:
    if len(payload) > MESSAGE_LIMIT:
        raise RefusedError(
            RefusalReason.OVERSIZED,
            f"a control message of {len(payload)} bytes; the limit is {MESSAGE_LIMIT}",
        )


def parse_server_message(payload: bytes) -> ServerMessage:
    """Read a message from the server to a device.

    Args:
        payload: JSON bytes.

    Raises:
        RefusedError: the message is malformed, oversized or of an unknown type.
    """
    _check_size(payload)
    try:
        return _SERVER_MESSAGES.validate_json(payload)
    except ValidationError as error:
        raise RefusedError(RefusalReason.MALFORMED, _explain(error)) from error


def parse_device_message(payload: bytes) -> DeviceMessage:
    """Read a message from a device to the server.

    Args:
        payload: JSON bytes.

    Raises:
        RefusedError: the message is malformed, oversized or of an unknown type.
    """
    _check_size(payload)
    try:
        return _DEVICE_MESSAGES.validate_json(payload)
    except ValidationError as error:
        raise RefusedError(RefusalReason.MALFORMED, _explain(error)) from error


def parse_status(payload: bytes) -> DeviceStatus:
    """Read the retained status of a device.

    Args:
        payload: JSON bytes.

    Raises:
        RefusedError: the message is malformed or oversized.
    """
    _check_size(payload)
    try:
        return DeviceStatus.model_validate_json(payload)
    except ValidationError as error:
        raise RefusedError(RefusalReason.MALFORMED, _explain(error)) from error
