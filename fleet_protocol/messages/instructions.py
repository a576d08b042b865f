"""What a task asks of a device: routine and settings, training, and how to choose a tier."""

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from fleet_protocol.data.terms import DataContract
from fleet_protocol.encodings import KEEP
from fleet_protocol.frozen import FiniteJson, FrozenModel
from fleet_protocol.messages.bounds import Measure, Positive, PositiveMeasure, Word
from fleet_protocol.messages.values import BlobRef, Name
from fleet_protocol.schedule import RateSchedule


class Ramp(FrozenModel):
    """How the learning rate changes within a task.

    Attributes:
        schedule: the rule.
        position: rounds of the run that are over.
        rounds: of the run.
    """

    schedule: RateSchedule
    position: Measure
    rounds: PositiveMeasure


class TrainSettings(FrozenModel):
    """How a device trains in one task.

    Attributes:
        learning_rate: input of the train graph.
        epochs: passes over the device's training data.
        steps: instead of whole passes exactly so many steps, over as many passes as they take; None
            for ``epochs``.
        batch_size: samples per step; the last batch of an epoch may be shorter.
        micro_batch: samples that are computed at once, where a board cannot hold a batch: the
            gradients of such pieces make one step; None for whole batches.
        seed: of all that is drawn, with the round, epoch and step; devices of a round draw alike.
        mask_labels: zero the logits of labels the device does not hold (specification 1.5).
        proximal_mu: pull towards the weights the round started from (FedProx); 0 for none.
        optimizer_state: whether the optimizer begins each round anew (``reset``), or with what the
            device's last round of the same tier left (``keep``).
        ramp: what the learning rate is multiplied with, step by step; None for nothing.
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

    def steps_for(self, samples: int) -> int:
        """Steps of a task over so many samples."""
        return self.steps or self.epochs * math.ceil(samples / self.batch_size)

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of one step of a task, from 0."""
        if self.ramp is None:
            return self.learning_rate
        position = self.ramp.position + step / steps
        return self.learning_rate * self.ramp.schedule.multiplier(
            position, self.ramp.rounds, 1 / steps
        )


class Chooser(FrozenModel):
    """How a device chooses among the tiers that it is offered.

    Attributes:
        rule: name of the rule; a device that does not know it refuses the offer.
        settings: of the rule, which reads them itself.
    """

    rule: Name
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)


class Hiding(FrozenModel):
    """What a device does to its update before anybody sees it (`fleet_protocol.noise`).

    Attributes:
        clip: the largest norm of its difference to what was sent.
        deviation: of the noise that is added to every entry of the difference.
    """

    clip: PositiveMeasure
    deviation: PositiveMeasure


class Summing(FrozenModel):
    """That updates are added up without being seen (`fleet_protocol.secure_sum`).

    Attributes:
        clip: the largest norm of an update's difference to what was sent.
        least: updates that a sum must have; a device takes no part in a smaller one.
    """

    clip: PositiveMeasure
    least: Positive


class Upload(FrozenModel):
    """How an update travels.

    Attributes:
        encoding: see `fleet_protocol.encodings`; a device that does not know it refuses the offer.
        keep: share of the entries of a tensor that ``topk`` sends.
        feedback: whether the device keeps what was lost and adds it to its next update of the same
            tier. Without, because the next slice may have other units, it rounds at random.
        hiding: what hides the device's part, None for nothing. With it neither losses nor labels
            are told.
        summing: the update goes into a sum and is seen by nobody, None if it is sent as it is. The
            same holds then.
    """

    encoding: Name = "fp32"
    keep: float = Field(default=KEEP, gt=0, le=1)
    feedback: bool = True
    hiding: Hiding | None = None
    summing: Summing | None = None

    @property
    def silent(self) -> bool:
        """Whether neither losses nor labels are told."""
        return self.hiding is not None or self.summing is not None


class Instructions(FrozenModel):
    """What a task asks of a device.

    Attributes:
        routine: name of the routine that does it: ``train``, ``statistics`` (one pass that returns
            batch norm statistics, specification 1.6), or one that a method brings; a device that
            does not know it refuses the offer.
        settings: of the routine, which reads them itself.
        train: settings of the training; of a statistics task only batch size and seed count.
        chooser: how the device chooses among the offered tiers; None for the first that it can
            train.
        stays: parameters of the model that stay on the device (they may have another shape there).
            They are not in its update, and its labels are not in its metrics.
        upload: how the update travels.
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


class TierChoice(FrozenModel):
    """One sub-model a device may take.

    Attributes:
        tier: id of the tier.
        artifact_set: the manifest.
        weights: the plan's slice of the global weights.
    """

    tier: Word
    artifact_set: BlobRef
    weights: BlobRef
