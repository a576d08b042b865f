"""Chooses the sub-model of an offer that a board trains.

A board that chooses its sub-model first measures its link and its processor, in every round
(specification 4.2, step 1). It downloads the narrowest sub-model, then, with nothing else on the
link, weights whose transfer takes long enough to time, and it times a few steps.
"""

from collections.abc import Callable, Sequence

from device_runtime.agent.link_speed import TELLING_BYTES
from device_runtime.agent.task_store import StoredTask
from device_runtime.settings import DeviceConfig
from device_runtime.training.choosers import Decision, Situation, chooser_of
from device_runtime.training.choosers.memory import ChooserMemory
from device_runtime.training.choosers.rule import trained_share_of, width_of, within
from device_runtime.training.routines import may_join
from device_runtime.training.task import DeviceSetup
from fleet_protocol.messages import BlobRef, Offer, TierChoice


def able_choices(offer: Offer, config: DeviceConfig, setup: DeviceSetup) -> tuple[TierChoice, ...]:
    """Return the sub-models of an offer that this board may train, in its order of preference.

    Statistics tasks run only forward passes, so the limits on training do not apply to them.

    Raises:
        RefusedError: the board does not support the task, or the rule for choosing.
    """
    routine = may_join(offer, setup)
    # Raises if this board does not support the rule, before it fetches anything.
    chooser_of(offer)
    if routine.phase == "measuring":
        return tuple(offer.choices)
    width = config.max_width
    depth = config.max_depth
    return tuple(choice for choice in offer.choices if within(choice.tier, width, depth))


def choice_to_measure(choices: Sequence[TierChoice]) -> TierChoice:
    """Return the smallest sub-model, whose steps are timed before the choice.

    It is the narrowest sub-model and, among equally narrow ones, the one that trains least.
    """

    def size(choice: TierChoice) -> tuple[float, float]:
        return width_of(choice.tier), trained_share_of(choice.tier)

    return min(choices, key=size)


def weights_to_measure(choices: Sequence[TierChoice], has: Callable[[str], bool]) -> BlobRef | None:
    """Return the weights whose download times the link.

    They are the smallest missing weights with enough bytes behind their first chunk, or else the
    largest: weights that are on disk already take no time on the link.

    Args:
        choices: the sub-models that the board may train.
        has: whether the blob of a digest is on disk.

    Returns:
        None if all are on disk.
    """
    missing = [choice.weights for choice in choices if not has(choice.weights.digest)]
    missing.sort(key=lambda ref: ref.size)
    for ref in missing:
        if ref.size - ref.chunk_bytes >= TELLING_BYTES:
            return ref
    return missing[-1] if missing else None


def choose_tier(
    record: StoredTask,
    config: DeviceConfig,
    setup: DeviceSetup,
    bytes_per_second: float | None,
    step_seconds: float,
) -> Decision:
    """Choose the tier that the board wants.

    Args:
        record: record of the task, whose narrowest sub-model was measured.
        config: the board's limits.
        setup: the board's data.
        bytes_per_second: speed at which it sends; None if it is unknown.
        step_seconds: seconds of a training step of the sub-model that was measured.
    """
    offer = record.offer
    chooser = chooser_of(offer)
    if chooser is None:
        return Decision(record.tier)
    situation = Situation(
        tiers=tuple(choice.tier for choice in able_choices(offer, config, setup)),
        steps=offer.train.steps_for(setup.examples),
        bytes_per_second=bytes_per_second,
        step_seconds=step_seconds,
    )
    memory = ChooserMemory(config.state_dir).load(offer.run, chooser)
    return chooser.choose(memory, situation)


def remember_round(record: StoredTask, config: DeviceConfig, loss: float) -> None:
    """Save what the next choice of a tier needs to know about a round.

    `loss` is the mean over all steps of the round.
    """
    offer = record.offer
    chooser = chooser_of(offer)
    if chooser is None:
        return
    file = ChooserMemory(config.state_dir)
    before = file.load(offer.run, chooser)
    file.save(offer.run, chooser, chooser.learn(before, offer.round, loss))
