"""Which sub-model of an offer a board takes, and what it remembers of a round for the next choice."""

from device_runtime.agent.measured import Measured
from device_runtime.agent.task_store import StoredTask
from device_runtime.settings import DeviceConfig
from device_runtime.training.choosers import Experience, Situation, chooser_of
from device_runtime.training.choosers.memory import ChooserMemory
from device_runtime.training.choosers.rule import within
from device_runtime.training.routines import may_join
from device_runtime.training.task import Bench
from fleet_protocol.messages import Offer, TierChoice


def choose(offer: Offer, config: DeviceConfig, bench: Bench, measured: Measured) -> TierChoice | None:
    """The first sub-model of an offer that this board may train, or the one it wants if it may choose; None if none.

    What only measures makes forward passes, so the limits of training do not count.

    Raises:
        RefusedError: the board cannot do what is asked, or does not know how to choose.
    """
    measures = may_join(offer, bench).phase == "measuring"
    able = [choice for choice in offer.choices if measures or within(choice.tier, config.max_width, config.max_depth)]
    chooser = chooser_of(offer)
    if not able or chooser is None:
        return able[0] if able else None
    situation = Situation(
        tiers=tuple(choice.tier for choice in able),
        steps=offer.train.steps_for(bench.examples),
        bytes_per_second=measured.link_bytes_per_second,
    )
    wanted = chooser.choose(ChooserMemory(config.state_dir).load(offer.run, chooser), situation)
    return next(choice for choice in able if choice.tier == wanted)


def remember_round(record: StoredTask, config: DeviceConfig, measured: Measured, loss: float) -> None:
    """Keep what the next choice of a tier needs to know of this round, whose mean loss over all steps is given."""
    offer, chooser = record.offer, chooser_of(record.offer)
    if chooser is None:
        return
    memory = ChooserMemory(config.state_dir)
    experience = Experience(offer.round, record.tier, loss, measured.step_seconds)
    memory.save(offer.run, chooser, chooser.learn(memory.load(offer.run, chooser), experience))
