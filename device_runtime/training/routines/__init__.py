"""The routines by name. A new routine needs one file and one row here."""

from collections.abc import Mapping
from types import MappingProxyType

from device_runtime.training.own_settings import read_settings
from device_runtime.training.routines import dynamic, mutual, private, statistics, train
from device_runtime.training.routines.routine import Result, Routine
from device_runtime.training.task import DeviceSetup
from fleet_protocol.encodings import ENCODINGS
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import Instructions

__all__ = ["ROUTINES", "Result", "Routine", "may_join", "routine_of"]

ROUTINES: Mapping[str, Routine] = MappingProxyType(
    {
        train.ROUTINE.name: train.ROUTINE,
        statistics.ROUTINE.name: statistics.ROUTINE,
        mutual.ROUTINE.name: mutual.ROUTINE,
        private.ROUTINE.name: private.ROUTINE,
        dynamic.ROUTINE.name: dynamic.ROUTINE,
    }
)


def routine_of(instructions: Instructions) -> Routine:
    """Return the routine of a task.

    Raises:
        RefusedError: this board has no routine of that name.
    """
    routine = ROUTINES.get(instructions.routine)
    if routine is None:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"this board has no routine {instructions.routine!r} (it has "
            f"{', '.join(ROUTINES)}); update Shoal on it",
        )
    return routine


def may_join(instructions: Instructions, setup: DeviceSetup) -> Routine:
    """Check that a board supports a task before anything is fetched; return its routine.

    Raises:
        RefusedError: the board does not support the routine or the update's encoding, a setting is
            wrong, or the board lacks what the routine needs.
    """
    routine = routine_of(instructions)
    _check_encoding(instructions.upload.encoding, routine)
    read_settings(routine.settings, instructions.settings, f"routine {routine.name}")
    routine.join(instructions, setup)
    return routine


def _check_encoding(encoding: str, routine: Routine) -> None:
    """Raise a RefusedError if a routine's update cannot have an encoding."""
    is_known = encoding in ENCODINGS
    # Statistics are not differences from the sent weights, for which encodings are made.
    is_for_training = encoding != "fp32"
    if is_known and (routine.phase == "training" or not is_for_training):
        return
    raise RefusedError(
        RefusalReason.UNSUPPORTED,
        f"no upload encoding {encoding!r} for {routine.name} on this board (it has "
        f"{', '.join(ENCODINGS)}); update Shoal on it, or run with [upload] encoding = "
        '"fp32"',
    )
