"""Which sub-model of an offer a board takes.

A board that chooses measures its link and its processor in every round before it does
(specification 4.2, step 1): it fetches the narrowest sub-model, and weights that tell more of the
link than how long an answer takes, and times steps.
"""

from collections.abc import Sequence

from device_runtime.agent.task_store import StoredTask
from device_runtime.settings import DeviceConfig
from device_runtime.training.choosers import Situation, chooser_of
from device_runtime.training.choosers.memory import ChooserMemory
from device_runtime.training.choosers.rule import width_of, within
from device_runtime.training.routines import may_join
from device_runtime.training.task import DeviceSetup
from fleet_protocol.messages import BlobRef, Offer, TierChoice

# A smaller download takes hardly longer than an answer, and tells nothing of the link.
_TELLING_BYTES = 64 * 1024


def able_choices(offer: Offer, config: DeviceConfig, setup: DeviceSetup) -> tuple[TierChoice, ...]:
    """Return the sub-models of an offer that this board may train, in its order.

    What only measures makes forward passes, so the limits of training do not count.

    Raises:
        RefusedError: the board cannot do what is asked, or does not know how to choose.
    """
    routine = may_join(offer, setup)
    # Raises where this board does not know the rule, before anything is fetched.
    chooser_of(offer)
    if routine.phase == "measuring":
        return tuple(offer.choices)
    width = config.max_width
    depth = config.max_depth
    return tuple(choice for choice in offer.choices if within(choice.tier, width, depth))


def choice_to_measure(choices: Sequence[TierChoice]) -> TierChoice:
    """Return the narrowest sub-model, whose steps are timed before a choice."""
    return min(choices, key=lambda choice: width_of(choice.tier))


def weights_to_measure(choices: Sequence[TierChoice]) -> BlobRef:
    """Return the weights whose download tells of the link: the smallest that say enough."""
    weights = sorted((choice.weights for choice in choices), key=lambda ref: ref.size)
    return next((ref for ref in weights if ref.size >= _TELLING_BYTES), weights[-1])


def choose_tier(
    record: StoredTask,
    config: DeviceConfig,
    setup: DeviceSetup,
    bytes_per_second: float | None,
    step_seconds: float,
) -> str:
    """Return the tier that the board wants.

    Args:
        record: of the task whose narrowest sub-model was measured.
        config: the board's limits.
        setup: the board's data.
        bytes_per_second: of its link, None where it is not known.
        step_seconds: of a training step of the sub-model that was measured.
    """
    offer = record.offer
    chooser = chooser_of(offer)
    if chooser is None:
        return record.tier
    situation = Situation(
        tiers=tuple(choice.tier for choice in able_choices(offer, config, setup)),
        steps=offer.train.steps_for(setup.examples),
        bytes_per_second=bytes_per_second,
        step_seconds=step_seconds,
    )
    memory = ChooserMemory(config.state_dir).load(offer.run, chooser)
    return chooser.choose(memory, situation)


def remember_round(record: StoredTask, config: DeviceConfig, loss: float) -> None:
    """Keep what the next choice of a tier needs to know of a round.

    `loss` is the mean over all steps of the round.
    """
    offer = record.offer
    chooser = chooser_of(offer)
    if chooser is None:
        return
    file = ChooserMemory(config.state_dir)
    before = file.load(offer.run, chooser)
    file.save(offer.run, chooser, chooser.learn(before, offer.round, loss))
