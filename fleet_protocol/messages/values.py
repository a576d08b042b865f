"""What messages carry: blobs by content, evaluations, what a device is and what it measured."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from fleet_protocol.digests import DIGEST_PATTERN
from fleet_protocol.errors import single_line
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages.bounds import (
    CHUNKS_LIMIT,
    DEFAULT_CHUNK_BYTES,
    LEAST_CHUNK_BYTES,
    MOST_CHUNK_BYTES,
    MOST_FINDINGS,
    Count,
    Finding,
    Loss,
    Measure,
    Positive,
    SizeBytes,
    Text,
    Word,
)
from fleet_protocol.messages.labels import Labels
from fleet_protocol.topics import NAME_PATTERN

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Digest = Annotated[str, Field(pattern=DIGEST_PATTERN)]

_PublicKey = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
MemberKeys = tuple[_PublicKey, _PublicKey, _PublicKey]
"""The keys of a member of a secure sum (`fleet_protocol.secure_sum`) in hexadecimal digits."""
SHARE_DIGITS = 66  # of a share of one secret
SUM_LIMIT = 128  # members of a secure sum: what each of them is told stays below 50 kB


class BlobRef(FrozenModel):
    """A blob by content.

    Attributes:
        digest: see `fleet_protocol.digests`.
        size: bytes.
        chunk_bytes: payload bytes of every chunk but the last.
    """

    digest: Digest
    size: SizeBytes
    chunk_bytes: int = Field(default=DEFAULT_CHUNK_BYTES, ge=LEAST_CHUNK_BYTES, le=MOST_CHUNK_BYTES)

    @model_validator(mode="after")
    def _few_chunks(self) -> "BlobRef":
        if self.chunks > CHUNKS_LIMIT:
            raise ValueError(
                f"a blob of {self.size} bytes is cut into {self.chunks} chunks; {CHUNKS_LIMIT} "
                "are the most"
            )
        return self

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.size // self.chunk_bytes)


RELEASE_PATTERN = r"^(running|fetched|trial|failed) [0-9]{1,15} [0-9]{1,15} [0-9]{1,2}( .*)?$"

ReleaseRecord = Annotated[
    str, Field(pattern=RELEASE_PATTERN, max_length=2000), AfterValidator(single_line)
]


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
        provider: what computes its training steps, and why that; empty where there is no choice, or
            not yet one.
        unable: why it cannot train, or pauses now, with what to do; empty where it can.
        memory_below: the predicted memory of what it takes must be less; None where nothing was too
            large for it.
        lowered: why, and when it will take larger sub-models again.
        release: record of `device_runtime.agent.releases`; None where the board takes none.
        sets: the same of releases that are artifact sets.
        findings: what looks wrong in its data, or different from the fleet's; None if there is
            nothing to report, or if reporting is off.
        labels_digest: SHA-256 of the labels that its own ``labels`` in ``[data]`` names, in order;
            None if it names none, or if reporting is off.
    """

    arch: Word
    system: Word
    cores: int = Field(ge=1, le=65536)
    ram_bytes: Count
    free_ram_bytes: Count
    backends: Annotated[Mapping[Word, Word], Field(max_length=16)]
    runtime_version: Word
    python: Word
    max_width: float = Field(gt=0, le=1)
    max_depth: int | None = Field(default=None, ge=1, le=65536)
    examples: Count
    step_seconds: Measure | None = None
    link_bytes_per_second: Measure | None = None
    temperature_celsius: float | None = Field(default=None, ge=-300, le=10_000)
    on_battery: bool | None = None
    provider: Text = ""
    unable: Text = ""
    memory_below: Count | None = None
    lowered: Text | None = None
    release: ReleaseRecord | None = None
    sets: ReleaseRecord | None = None
    findings: (
        Annotated[tuple[Finding, ...], Field(min_length=1, max_length=MOST_FINDINGS)] | None
    ) = None
    labels_digest: Digest | None = None


class Measured(FrozenModel):
    """A metric of a model on some samples, with the sums that it is made of.

    Attributes:
        name: of the metric.
        rule: that makes a number of the sums (`fleet_protocol.metrics`).
        value: the number.
        sums: over the samples; they add up over devices.
    """

    name: Word
    rule: Word
    value: Loss
    sums: Annotated[
        tuple[Annotated[tuple[Loss, ...], Field(max_length=4096)], ...],
        Field(max_length=8),
    ]


class Evaluation(FrozenModel):
    """Loss, accuracy and metrics of a model on some samples.

    Attributes:
        examples: samples, or labels that count.
        loss: mean over them.
        accuracy: share of labels that are the largest logit of their place; None where the loss
            knows no labels.
        metrics: that the recipe asks for.
    """

    examples: Positive
    loss: Loss
    accuracy: float | None = Field(default=None, ge=0, le=1)
    metrics: Annotated[tuple[Measured, ...], Field(max_length=32)] = ()

    @property
    def rank(self) -> float:
        """A number that is larger for better models: the accuracy, or else the negative loss."""
        return -self.loss if self.accuracy is None else self.accuracy

    @property
    def shown(self) -> float:
        """The single figure of a column: the accuracy, or else the loss."""
        return self.loss if self.accuracy is None else self.accuracy

    def text(self, digits: int = 4) -> str:
        """Return the numbers for people: accuracy if there is one, loss, metrics."""
        numbers = {"accuracy": self.accuracy, "loss": self.loss}
        for metric in self.metrics:
            numbers[metric.name] = metric.value
        texts = []
        for name, number in numbers.items():
            if number is not None:
                texts.append(f"{name} {number:.{digits}f}")
        return ", ".join(texts)


class TaskMetrics(FrozenModel):
    """What a device measured in one task.

    Attributes:
        examples: training samples.
        batches: batches processed (steps of training, or batches of a statistics pass).
        labels: labels present in the training data (C_k of the specification), needed by the label
            rule; none where a part of the model stays on the device. Many travel as a bitmap.
        train_loss: mean loss over the last epoch.
        mean_loss: mean loss over all training steps, where it is known.
        fetch_seconds: from the offer to the weights on disk.
        train_seconds: training alone.
        resident_bytes: peak resident memory of the process.
        evaluation: on the device's own held-out samples, when it keeps any: of the trained
            sub-model, or of the device's own model where the routine trains one.
    """

    examples: Positive
    batches: Positive
    labels: Labels
    train_loss: Loss | None = None
    mean_loss: Loss | None = None
    fetch_seconds: Measure
    train_seconds: Measure
    resident_bytes: Count
    evaluation: Evaluation | None = None
