"""Values in messages: blobs by content, evaluations, and the profiles and metrics of devices."""

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
    PositiveMeasure,
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
SUM_LIMIT = 128  # members of a secure sum: a message to each of them stays below 50 kB


class BlobRef(FrozenModel):
    """A blob, identified by its content.

    Attributes:
        digest: digest of the blob; see `fleet_protocol.digests`.
        size: size of the blob in bytes.
        chunk_bytes: payload bytes of every chunk except the last.
    """

    digest: Digest
    size: SizeBytes
    chunk_bytes: int = Field(default=DEFAULT_CHUNK_BYTES, ge=LEAST_CHUNK_BYTES, le=MOST_CHUNK_BYTES)

    @model_validator(mode="after")
    def _few_chunks(self) -> "BlobRef":
        if self.chunks > CHUNKS_LIMIT:
            raise ValueError(
                f"a blob of {self.size} bytes has {self.chunks} chunks; at most "
                f"{CHUNKS_LIMIT} are allowed"
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
    """A device's description of itself.

    Attributes:
        arch: machine type, as in ``uname -m``.
        system: operating system and release.
        cores: number of processors that the agent may use.
        ram_bytes: total memory of the board, in bytes.
        free_ram_bytes: free memory at the time of measurement, in bytes.
        backends: the board's training backends, each with the version of its runtime.
        runtime_version: version of Shoal on the board.
        python: version of the board's Python interpreter.
        max_width: width of the widest sub-model that the operator allows.
        max_depth: depth of the deepest sub-model that the operator allows, in blocks; None for no
            limit.
        examples: number of training samples on the board.
        step_seconds: mean time of a training step in the board's latest task, in seconds; None if
            none was measured.
        link_bytes_per_second: measured download speed in bytes per second; None if none was
            measured.
        temperature_celsius: temperature of the processor in degrees Celsius, if the board reports
            one.
        on_battery: whether the board runs on battery power, if the board reports it.
        provider: execution provider that computes the board's training steps, and why it was
            chosen; empty if the board has no choice, or has not chosen yet.
        unable: why the board cannot train or has paused, and what to do; empty if the board can
            train.
        memory_below: upper bound in bytes: the board's sub-model must need less memory than this.
            None if no sub-model was too large.
        lowered: why the board's memory limit was lowered, and when the board will try larger
            sub-models again.
        release: the board's record of runtime releases (`device_runtime.agent.releases`); None if
            the board accepts no releases.
        sets: the board's record of releases of artifact sets (`device_runtime.agent.releases`);
            None if the board accepts none.
        findings: possible faults in the board's data, or differences from the fleet's data. None if
            there is nothing to report, or if reporting is off.
        labels_digest: SHA-256 of the list ``labels`` in the board's own ``[data]``, in its order;
            None if there is no such list, or if reporting is off.
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
    """A metric of a model on some samples, with the sums from which it is computed.

    Attributes:
        name: name of the metric.
        rule: rule that computes the metric from the sums (`fleet_protocol.metrics`).
        value: value of the metric.
        sums: sums over the samples; the sums of several devices can be added.
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
        examples: number of evaluated samples, or of evaluated labels if each sample has several.
        loss: mean loss over the evaluated samples or labels.
        accuracy: share of correctly predicted labels; None if the loss has no labels.
        metrics: metrics that the recipe requests.
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
        """The single figure for a column: the accuracy, or else the loss."""
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
    """The measurements of a device in one task.

    Attributes:
        examples: number of training samples; None if all updates count equally, because the server
            then does not need the number.
        batches: number of processed batches (training steps, or batches of a statistics pass); None
            if this number would reveal the number of samples.
        labels: labels present in the training data (C_k of the specification), which the label rule
            needs; empty if a part of the model stays on the device. Many labels are sent as a
            bitmap.
        train_loss: mean training loss over the last epoch.
        mean_loss: mean loss over all training steps, if known.
        fetch_seconds: seconds from the offer until the weights were on disk.
        train_seconds: seconds that the training itself took.
        resident_bytes: peak resident memory of the process, in bytes.
        efficiency: system efficiency that the device measured before it chose its tier, in the unit
            of the choice rule; None if the device measured or chose nothing.
        evaluation: evaluation on the device's own held-out samples, if there are any: of the
            trained sub-model, or of the device's own model if the routine trains one.
        shared_evaluation: evaluation of the trained sub-model on the same samples, without the
            parameters that only this device has; None if the run does not compare the two.
    """

    examples: Positive | None = None
    batches: Positive | None = None
    labels: Labels
    train_loss: Loss | None = None
    mean_loss: Loss | None = None
    fetch_seconds: Measure
    train_seconds: Measure
    resident_bytes: Count
    efficiency: PositiveMeasure | None = None
    evaluation: Evaluation | None = None
    shared_evaluation: Evaluation | None = None

    @property
    def weight(self) -> int:
        """Number of samples with which the update counts: one if the device reports no number."""
        return 1 if self.examples is None else self.examples
