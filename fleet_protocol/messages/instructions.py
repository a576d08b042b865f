"""The instructions of a task: routine and settings, training, and the choice of a tier."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.data.terms import DataContract
from fleet_protocol.encodings import KEEP
from fleet_protocol.frozen import FiniteJson, FrozenModel
from fleet_protocol.messages.bounds import Measure, Positive, PositiveMeasure, Word
from fleet_protocol.messages.values import SUM_LIMIT, BlobRef, Name
from fleet_protocol.schedule import RateSchedule


class Ramp(FrozenModel):
    """How the learning rate changes within a task.

    Attributes:
        schedule: rule for the change.
        position: number of finished rounds in the run.
        rounds: number of rounds in the run.
    """

    schedule: RateSchedule
    position: Measure
    rounds: PositiveMeasure


class TrainSettings(FrozenModel):
    """How a device trains in one task.

    Attributes:
        learning_rate: learning rate, an input of the train graph.
        epochs: number of passes over the device's training data.
        steps: exact number of training steps, instead of whole passes; None for ``epochs``.
        batch_size: samples per step; the last batch of an epoch may be shorter.
        micro_batch: number of samples that a board processes at once if a whole batch does not fit
            in its memory. The board sums the gradients of these pieces for one step. None for whole
            batches.
        seed: seed that, together with the round, epoch and step, determines all random draws; all
            devices of a round use the same seed.
        mask_labels: whether to zero the logits of labels that the device does not have
            (specification 1.5).
        proximal_mu: strength of the proximal term (FedProx), which pulls the weights towards those
            at the start of the round; 0 for no term.
        optimizer_state: whether the optimizer starts each round with a new state (``reset``), or
            with the state after the device's last round of the same tier (``keep``).
        ramp: multipliers of the learning rate, step by step; None for a constant rate.
        knobs: numeric parameters of the loss, by name; the manifest has the defaults of missing
            ones. None if the method sets no parameters.
    """

    learning_rate: PositiveMeasure
    epochs: Positive
    steps: Positive | None = None
    batch_size: Positive
    micro_batch: Positive | None = None
    seed: int = Field(ge=0, le=2**64)
    mask_labels: bool = True
    proximal_mu: Measure = 0.0
    optimizer_state: Literal["reset", "keep"] = "reset"
    ramp: Ramp | None = None
    knobs: Annotated[Mapping[Word, Measure], Field(max_length=16)] | None = None

    def steps_for(self, samples: int) -> int:
        """Number of steps of a task over this many samples."""
        return self.steps or self.epochs * math.ceil(samples / self.batch_size)

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of one step of a task, from 0."""
        if self.ramp is None:
            return self.learning_rate
        # The position counts rounds with fractions, so that the rate moves within a task.
        position = self.ramp.position + step / steps
        return self.learning_rate * self.ramp.schedule.multiplier(
            position, self.ramp.rounds, 1 / steps
        )


class Chooser(FrozenModel):
    """How a device chooses among the tiers that it is offered.

    Attributes:
        rule: name of the rule; a device that does not support the rule refuses the offer.
        settings: settings of the rule; the rule itself reads and checks them.
    """

    rule: Name
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)


class Hiding(FrozenModel):
    """How a device hides its update before it sends it (`fleet_protocol.noise`).

    Attributes:
        clip: maximum norm of the difference between an update and the weights that were sent.
        deviation: standard deviation of the noise that is added to every entry of the difference.
    """

    clip: PositiveMeasure
    deviation: PositiveMeasure


class Summing(FrozenModel):
    """How updates are added without being revealed (`fleet_protocol.secure_sum`).

    Attributes:
        clip: maximum norm of the difference between an update and the weights that were sent.
        least: minimum number of updates in a sum; a device does not take part in a smaller sum. A
            sum of one update would reveal that update.
    """

    clip: PositiveMeasure
    least: Annotated[int, Field(ge=2, le=SUM_LIMIT)]


class Upload(FrozenModel):
    """How an update is sent.

    Attributes:
        encoding: name of the encoding (see `fleet_protocol.encodings`); a device that does not
            support the encoding refuses the offer.
        keep: share of the entries of a tensor that ``topk`` sends.
        feedback: whether the device keeps the encoding's error and adds it to its next update of
            the same tier. If not, the device rounds at random, because its next slice may have
            different units.
        hiding: how the device hides its update; None if it does not. With hiding, devices send
            neither losses nor labels.
        summing: how the update is hidden in a sum; None if the update is sent as it is. As with
            noise, devices send neither losses nor labels.
    """

    encoding: Name = "fp32"
    keep: float = Field(default=KEEP, gt=0, le=1)
    feedback: bool = True
    hiding: Hiding | None = None
    summing: Summing | None = None

    @property
    def silent(self) -> bool:
        """Whether neither losses nor labels are sent."""
        return self.hiding is not None or self.summing is not None


class Instructions(FrozenModel):
    """The instructions of a task.

    Attributes:
        routine: name of the routine: ``train``, ``statistics`` (one pass that returns batch norm
            statistics, specification 1.6), or the name of a routine that a method adds. A device
            that does not support the routine refuses the offer.
        settings: settings of the routine; the routine itself reads and checks them.
        train: settings of the training; for a statistics task only batch size and seed count.
        chooser: how the device chooses among the offered tiers; None for the first tier that the
            device can train.
        stays: parameters of the model that stay on the device, where they may have a different
            shape. The update does not contain these parameters, and the metrics do not contain the
            device's labels.
        upload: how the update is sent.
        contract: the fleet's definition of a sample; the device brings its data into this form, or
            refuses the task. None if the fleet has no contract.
    """

    routine: Name = "train"
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)
    train: TrainSettings
    chooser: Chooser | None = None
    stays: tuple[Word, ...] = ()
    upload: Upload = Upload()
    contract: DataContract | None = None

    @property
    def board_defines_labels(self) -> bool:
        """Return whether a board may define what its labels mean.

        It may if a part of the model stays on it: this part may be the head.
        """
        return bool(self.stays)


class TierChoice(FrozenModel):
    """A sub-model that a device may train.

    Attributes:
        tier: id of the tier.
        artifact_set: the manifest of the tier's artifact set.
        weights: the plan's slice of the global weights.
    """

    tier: Word
    artifact_set: BlobRef
    weights: BlobRef
