"""Which sub-model of an offer a board takes, and what it remembers of a round for the next choice.

A board that chooses measures its link and its processor in every round before it does
(specification 4.2, step 1): it fetches the narrowest sub-model, and weights that tell more of the
link than how long an answer takes, and times steps.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, ValidationError

from device_runtime.agent.task_store import StoredTask
from device_runtime.settings import DeviceConfig
from device_runtime.training.choosers import Situation, TierChooser, chooser_of
from device_runtime.training.choosers.rule import width_of, within
from device_runtime.training.routines import may_join
from device_runtime.training.task import DeviceSetup
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import StorageError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import BlobRef, Offer, TierChoice

_TELLING_BYTES = 64 * 1024


class _Stored(FrozenModel):
    """The file; it belongs to a run, and another one starts afresh."""

    version: Literal[1] = 1
    rule: str
    run: str
    memory: Mapping[str, JsonValue]


class ChooserMemory:
    """The memory of one board, in the agent's state folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "chooser.json"

    def load(self, run: str, chooser: TierChooser) -> FrozenModel | None:
        """What a rule remembers of a run; None if there is nothing that can be read."""
        with contextlib.suppress(OSError, ValidationError):
            stored = _Stored.model_validate_json(self.path.read_bytes())
            if (stored.run, stored.rule) == (run, chooser.rule.name):
                memory: FrozenModel = chooser.rule.memory.model_validate(stored.memory)
                return memory
        return None

    def save(self, run: str, chooser: TierChooser, memory: FrozenModel) -> None:
        """Replace the memory atomically.

        Where the disk is full, the next round goes without this one.
        """
        stored = _Stored(rule=chooser.rule.name, run=run, memory=memory.model_dump(mode="json"))
        with contextlib.suppress(StorageError):
            write_atomically(self.path, stored.model_dump_json(indent=1).encode())


def able(offer: Offer, config: DeviceConfig, setup: DeviceSetup) -> tuple[TierChoice, ...]:
    """The sub-models of an offer that this board may train, in its order.

    What only measures makes forward passes, so the limits of training do not count.

    Raises:
        RefusedError: the board cannot do what is asked, or does not know how to choose.
    """
    measures = may_join(offer, setup).phase == "measuring"
    chooser_of(offer)
    width = config.max_width
    depth = config.max_depth
    return tuple(
        choice for choice in offer.choices if measures or within(choice.tier, width, depth)
    )


def probe(choices: Sequence[TierChoice]) -> tuple[TierChoice, BlobRef]:
    """What is measured before a choice: the narrowest sub-model, and the weights whose download
    tells of the link.
    """
    weights = sorted((choice.weights for choice in choices), key=lambda ref: ref.size)
    telling = next((ref for ref in weights if ref.size >= _TELLING_BYTES), weights[-1])
    return min(choices, key=lambda choice: width_of(choice.tier)), telling


def choose(
    record: StoredTask,
    config: DeviceConfig,
    setup: DeviceSetup,
    bytes_per_second: float | None,
    step: float,
) -> str:
    """The tier that the board wants, by its link and the seconds of a step of the one that it has
    measured.
    """
    offer = record.offer
    chooser = chooser_of(record.offer)
    if chooser is None:
        return record.tier
    situation = Situation(
        tiers=tuple(choice.tier for choice in able(offer, config, setup)),
        steps=offer.train.steps_for(setup.examples),
        bytes_per_second=bytes_per_second,
        step_seconds=step,
    )
    return chooser.choose(ChooserMemory(config.state_dir).load(offer.run, chooser), situation)


def remember_round(record: StoredTask, config: DeviceConfig, loss: float) -> None:
    """Keep what the next choice of a tier needs to know of this round, whose mean loss over all
    steps is given.
    """
    offer = record.offer
    chooser = chooser_of(record.offer)
    if chooser is None:
        return
    memory = ChooserMemory(config.state_dir)
    memory.save(
        offer.run,
        chooser,
        chooser.learn(memory.load(offer.run, chooser), offer.round, loss),
    )
