"""Devices that choose their tier: what a board remembers for it between rounds, and the choice itself.

Su et al.: "WHALE-FL", 2024, https://arxiv.org/abs/2405.00885; METHODS 4.2. The formulas are `device_runtime.adaptive`;
here are the measurements that they need:

- T_cm, the time of the WHOLE model on the link (METHODS 4.2, step 2): its size by the speed of the last download.
- T_cp, the time of a round's steps at the NARROWEST tier. It was timed when the board first trained that tier; since
  then it is scaled by how much slower or faster the board's last round was than the first one of the same tier.

Where one of them is not known yet, the narrowest tier is taken, which measures both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from device_runtime.adaptive import WhaleState, choose, fit, initial, observe
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import StorageError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Sizing

__all__ = ["SizingRecord", "SizingStore", "after_round", "choose_width"]


class SizingRecord(FrozenModel):
    """What must survive a restart.

    Attributes:
        version: of this schema.
        run: the run it belongs to; another run starts afresh.
        round: the last one whose loss is in it.
        state: training efficiency and last loss.
        step_seconds: time of a training step at each width, at the speed of the board when `drift` is 1.
        drift: how many times slower the board was in its last round.
    """

    version: Literal[1] = 1
    run: str
    round: int = Field(default=0, ge=0)
    state: WhaleState
    step_seconds: Mapping[str, float] = Field(default_factory=dict)
    drift: float = Field(default=1.0, gt=0)


class SizingStore:
    """The record on disk.

    Args:
        folder: the agent's state folder; it must exist.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sizing.json"

    def load(self, run: str, sizing: Sizing) -> SizingRecord:
        """The record of a run; a new one if there is none that can be read.

        Args:
            run: id of the run.
            sizing: of the offer.
        """
        with contextlib.suppress(OSError, ValidationError):
            record = SizingRecord.model_validate_json(self.path.read_bytes())
            if record.run == run:
                return record
        return SizingRecord(run=run, state=initial(sizing.settings))

    def save(self, record: SizingRecord) -> None:
        """Replace the record atomically; where the disk is full, the next round goes without this one."""
        with contextlib.suppress(StorageError):
            write_atomically(self.path, record.model_dump_json(indent=1).encode())


def choose_width(
    record: SizingRecord, sizing: Sizing, offered: Sequence[float], *, steps: int, bytes_per_second: float | None
) -> float:
    """Choose the width of the coming round.

    Args:
        record: what the board remembers.
        sizing: of the offer.
        offered: widths that the board may train, at least one.
        steps: training steps of the round.
        bytes_per_second: of the last download, None if there was none.

    Returns:
        One of the offered widths.
    """
    settings, narrowest = sizing.settings, min(offered)
    transmit = compute = 1.0
    if settings.arm != "training":  # that arm holds the system efficiency fixed
        single = record.step_seconds.get(f"{narrowest:g}")
        if not single or not bytes_per_second:
            return narrowest
        transmit, compute = sizing.full_bytes / bytes_per_second, single * record.drift * steps
    choice = choose(record.state, settings, transmit_seconds=transmit, compute_seconds=compute, maximum=max(offered))
    return fit(choice.width, offered)


def after_round(
    record: SizingRecord, sizing: Sizing, *, number: int, width: float, step_seconds: float | None, loss: float
) -> SizingRecord:
    """Take a finished round into account.

    Args:
        record: before it.
        sizing: of the offer.
        number: of the round; one that is in the record already changes nothing.
        width: the board trained.
        step_seconds: measured time of a training step.
        loss: mean training loss over all steps of the round.
    """
    if number <= record.round:
        return record
    known, drift = dict(record.step_seconds), record.drift
    if step_seconds:
        key = f"{width:g}"
        if key in known:
            drift = step_seconds / known[key]
        else:
            known[key] = step_seconds / drift
    return record.model_copy(
        update={
            "round": number,
            "state": observe(record.state, sizing.settings, loss),
            "step_seconds": known,
            "drift": drift,
        }
    )
